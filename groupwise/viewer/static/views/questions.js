// Accuracy per question and step as a heat map: learnt, forgotten, never solved.
(function () {
  "use strict";
  const el = gw.el;
  const samples = gw.samples;

  const ROW_HEIGHT = 14; // pixels of the heat map

  // A colour between two, as #rrggbb; `share` is that of the first.
  function mixed(one, other, share) {
    const parts = [one, other].map((colour) => [1, 3, 5].map((at) => parseInt(colour.slice(at, at + 2), 16)));
    return "#" + parts[0].map((value, index) =>
      Math.round(share * value + (1 - share) * parts[1][index]).toString(16).padStart(2, "0")).join("");
  }

  gw.views.add({
    name: "questions",
    title: "Questions",
    order: 60,
    applies: (run) => samples.hasRollouts(run) || run.evaluation_steps.length > 0,
    render(element, run, params) {
      const asked = samples.latest();
      const state = { part: params.part || "", status: params.status || "all", sort: params.sort || "status",
        page: Number(params.page) || 1 };
      const controls = el("div", { class: "bar" });
      const chips = el("div", {});
      const body = el("div", {});
      gw.append(element, [controls, chips, body]);
      let chart = null;

      function history(row) {
        return gw.link(run.id, "groups", { row, held_out: state.part === "held_out" ? 1 : "" });
      }

      function draw(place, result) {
        const rows = result.rows;
        const last = rows.length - 1; // the first row is at the top, where ECharts has the last one
        const cells = (measured) => rows.flatMap((row, index) => row.cells
          .filter((cell) => Boolean(cell[2]) === measured).map(([bin, value]) => [bin, last - index, value]));
        place.style.height = `${rows.length * ROW_HEIGHT + 78}px`;
        const scale = { min: 0, max: 1, calculable: false };
        const options = (colours) => ({
          grid: { left: 8, right: 14, top: 40, bottom: 24 },
          tooltip: { formatter: ({ data }) => {
            const row = rows[last - data[1]];
            return gw.charts.tip(`${result.bins[data[0]]}, row ${row.row}`, [
              { name: result.value_name, value: samples.number(data[2]) },
              { name: "status", value: row.status_title }]);
          } },
          xAxis: { type: "category", data: result.bins, splitLine: { show: false }, name: "step",
            nameLocation: "middle", nameGap: 24 },
          yAxis: { type: "category", data: rows.map((row) => String(row.row)).reverse(), splitLine: { show: false },
            axisLabel: { interval: rows.length > 30 ? 4 : 0 } },
          visualMap: [
            { ...scale, seriesIndex: 0, inRange: { color: colours }, orient: "horizontal", left: "center", top: 0,
              itemHeight: 120, itemWidth: 10, text: ["1", `${result.value_name} 0`],
              textStyle: { color: gw.color("quiet"), fontSize: 11 } },
            { ...scale, seriesIndex: 1, inRange: { color: colours.map((colour) => mixed(colour, gw.color("surface"), 0.3)) },
              show: false }],
          series: [
            { name: "measured", type: "heatmap", data: cells(true), z: 3,
              itemStyle: { borderColor: gw.color("surface"), borderWidth: 1 } },
            { name: "since then", type: "heatmap", data: cells(false) }],
        });
        const colours = () => ["negative", "raised", "positive"].map(gw.color);
        return gw.charts.add(place, () => options(colours()), {
          lazy: false,
          label: `${result.value_name} of ${rows.length} questions over the steps; the table below has the same questions`,
          setup: (instance) => instance.on("click", ({ data }) => { location.hash = history(rows[last - data[1]].row); }),
        });
      }

      function show(result) {
        state.part = result.part;
        gw.fill(controls,
          result.parts.length > 1 ? el("span", {}, "Questions", el("div", { class: "choice", role: "group",
            "aria-label": "questions" }, result.parts.map((part) => el("button", { type: "button",
            dataset: { part: part.name }, "aria-pressed": String(part.name === result.part),
            onclick: () => load({ part: part.name, page: 1 }) }, part.title)))) : null,
          samples.select("Sort", result.sorts, state.sort, (sort) => load({ sort, page: 1 })));
        gw.fill(chips, samples.chips(result.statuses, state.status, (status) => load({ status, page: 1 }), "status"));
        if (chart) chart.dispose();
        chart = null;
        if (!result.rows.length) {
          gw.fill(body, gw.noteBox(result.note || "No question has this status."));
          return;
        }
        const place = el("div", {});
        gw.fill(body,
          el("p", { class: "quiet" }, result.summary),
          el("div", { class: "card" }, place),
          samples.pager(result.page, result.pages, (page) => load({ page })),
          el("div", { class: "card" }, gw.table([
            { title: "Row", value: (row) => el("a", { href: history(row.row) }, String(row.row)), numeric: true },
            { title: "Status", value: (row) => gw.badge(row.status_title, `status-${row.status}`) },
            { title: "First", value: (row) => samples.number(row.first), numeric: true },
            { title: "Last", value: (row) => samples.number(row.last), numeric: true },
            { title: state.part === "held_out" ? "Evaluations" : "Visits", value: (row) => row.visits, numeric: true },
            { title: "Question", value: (row) => el("span", { class: "one-line" }, row.prompt || ""), class: "wide" },
          ], result.rows, { label: "questions" })));
        chart = draw(place, result);
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        const query = { part: state.part, status: state.status === "all" ? "" : state.status,
          sort: state.sort === "status" ? "" : state.sort, page: state.page > 1 ? state.page : "" };
        gw.setParams(query);
        return samples.loading(body, asked, () => gw.source.get(`run/${run.id}/questions`, query), show);
      }
      load();
      return { update: () => load(), dispose: () => chart && chart.dispose() };
    },
  });
})();
