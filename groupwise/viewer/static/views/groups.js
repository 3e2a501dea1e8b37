// The groups of a step: each prompt with its answers side by side; and one prompt through the run.
(function () {
  "use strict";
  const el = gw.el;
  const samples = gw.samples;

  const SHORT = 60; // characters; answers up to this length get narrow cards

  // A search in texts, marked in what is shown.
  function marked(text, wanted) {
    if (!wanted) return [text];
    const parts = [];
    const lower = text.toLowerCase();
    const key = wanted.toLowerCase();
    let from = 0;
    for (let at = lower.indexOf(key); at >= 0; at = lower.indexOf(key, from)) {
      parts.push(text.slice(from, at), el("mark", {}, text.slice(at, at + key.length)));
      from = at + key.length;
    }
    return [...parts, text.slice(from)];
  }

  function answer(run, group, sample, largest, wanted) {
    const text = wanted && sample.completion.length === sample.length
      ? el("div", { class: "sample-text", dir: "auto" }, ...marked(sample.completion, wanted))
      : samples.fold(sample.completion, {
        length: sample.length,
        load: sample.completion.length < sample.length
          ? async () => {
            const full = await gw.source.get(`run/${run.id}/group`, { step: group.step, prompt: group.prompt_number });
            return full.samples.find((one) => one.sample === sample.sample).completion;
          } : null,
      });
    const card = el("article", { class: "answer" + (sample.why ? " silent" : ""), "data-sample": sample.sample },
      el("div", { class: "answer-number quiet" }, `#${sample.sample}`),
      ...samples.facts(sample, largest), text);
    card.classList.add(sample.advantage > 0 ? "edge-up" : sample.advantage < 0 ? "edge-down" : "edge-none");
    const extra = Object.entries(sample.extra || {});
    if (extra.length) {
      card.append(el("details", { class: "extra" }, el("summary", {}, "logged by rewards"),
        el("dl", {}, ...extra.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]))));
    }
    return card;
  }

  function card(run, group, wanted) {
    const largest = samples.largestAdvantage(group.samples);
    const place = { step: group.step, prompt: group.prompt_number };
    const short = group.samples.every((sample) => sample.length <= SHORT);
    return el("section", { class: "group", "data-prompt": group.prompt_number, "data-step": group.step },
      el("div", { class: "group-head" },
        el("h3", {}, `Prompt ${group.prompt_number}`),
        el("span", { class: "quiet" }, `row ${group.row}, step ${group.step}`),
        ...samples.summaryBadges(group.summary),
        el("span", { class: "links" },
          el("a", { href: gw.link(run.id, "group", place) }, "one picture"),
          group.has_tokens ? el("a", { href: gw.link(run.id, "tokens", place) }, "tokens") : null,
          group.row === null ? null
            : el("a", { href: gw.link(run.id, "groups", { row: group.row }) }, "follow this prompt"))),
      el("div", { class: "prompt" }, samples.fold(group.prompt, {
        head: 500, tail: 200, length: group.prompt_length,
        load: group.prompt.length < group.prompt_length
          ? async () => (await gw.source.get(`run/${run.id}/group`, place)).prompt : null,
      })),
      el("div", { class: "answers" + (short ? " narrow" : "") },
        ...group.samples.map((sample) => answer(run, group, sample, largest, wanted))));
  }

  // One prompt through the run: the mean reward at each visit, and its answers then and now.
  function renderFollow(element, run, params) {
    const body = el("div", {});
    element.append(body);
    const asked = samples.latest();
    let chart = null;
    const load = () => samples.loading(body, asked,
      () => gw.source.get(`run/${run.id}/prompt`, { row: params.row, held_out: params.held_out || "" }), show);

    function show(history) {
      if (chart) chart.dispose();
      const place = el("div", { class: "chart small-chart" });
      const visits = history.visits;
      body.replaceChildren(
        el("p", {}, el("a", { href: gw.link(run.id, "groups", {}) }, "‹ all groups"), " ",
          el("a", { href: gw.link(run.id, "questions", params.held_out ? { part: "held_out" } : {}) }, "all questions")),
        el("div", { class: "group-head" },
          el("h2", {}, `${params.held_out ? "Held-out question" : "Row"} ${history.row}`),
          el("span", { class: "badge" }, history.status),
          el("span", { class: "quiet" },
            samples.plural(visits.length, params.held_out ? "evaluation" : "visit"))),
        el("div", { class: "prompt" }, samples.fold(history.prompt, { head: 800, tail: 300 })),
        place,
        el("div", { class: "then-and-now" }, ...[history.first, history.last].filter(Boolean).map((group, index) => {
          const largest = samples.largestAdvantage(group.samples);
          return el("section", { class: "group" },
            el("div", { class: "group-head" },
              el("h3", {}, index || !history.last ? `Step ${group.step}` : `Step ${group.step}, the first visit`),
              ...samples.summaryBadges(group.summary),
              params.held_out ? null : el("a", {
                href: gw.link(run.id, "group", { step: group.step, prompt: group.prompt_number }),
              }, "one picture")),
            el("div", { class: "answers" }, ...group.samples.map((sample) =>
              answer(run, group, sample, largest, ""))));
        })));
      const share = history.value_name !== "reward";
      chart = gw.charts.add(place, () => ({
        grid: { top: 30, bottom: 22 },
        tooltip: { trigger: "axis", formatter: ([point]) => gw.charts.tip(`step ${point.data[0]}`,
          [{ color: point.color, name: history.value_name, value: samples.number(point.data[1]) }]) },
        xAxis: { type: "value", name: "step", nameLocation: "middle", nameGap: 22, minInterval: 1, scale: true },
        yAxis: { type: "value", name: history.value_name, nameLocation: "end", ...(share ? { min: 0, max: 1 } : {}) },
        series: [{ type: "line", data: visits.map((visit) => [visit.step, visit.value]), symbol: "circle",
          symbolSize: 8, color: gw.charts.series(0) }],
      }), {
        lazy: false,
        label: `${history.value_name} of this prompt at each visit`,
        setup: (instance) => instance.on("click", ({ dataIndex }) => {
          const { step, prompt_number: prompt } = visits[dataIndex];
          if (!params.held_out) location.hash = gw.link(run.id, "group", { step, prompt });
        }),
      });
    }
    load();
    return { update: load, dispose: () => chart && chart.dispose() };
  }

  gw.views.add({
    name: "groups",
    title: "Groups",
    applies: (run) => samples.hasRollouts(run),
    render(element, run, params) {
      if (params.row !== undefined) return renderFollow(element, run, params);
      const asked = samples.latest();
      const toolbar = el("div", { class: "bar" });
      const filters = el("div", {});
      const body = el("div", { class: "groups" });
      element.append(toolbar, filters, body);
      const state = {
        step: samples.stepOf(run, params), filter: params.filter || "all", sort: params.sort || "prompt",
        search: params.search || "", everywhere: params.everywhere || "", page: Number(params.page) || 1,
      };
      let steps = run.rollout_steps;
      const picker = samples.stepPicker(steps, state.step, (step) => load({ step, page: 1 }));
      const sort = el("span", {});
      const search = el("input", { type: "search", placeholder: "search in prompts and answers", value: state.search,
        "aria-label": "search in prompts and answers" });
      const everywhere = el("input", { type: "checkbox", "aria-label": "search in all steps" });
      everywhere.checked = state.everywhere === "1";
      let timer = null;
      search.addEventListener("input", () => {
        clearTimeout(timer);
        timer = setTimeout(() => load({ search: search.value.trim(), page: 1 }), 250);
      });
      everywhere.addEventListener("change", () => load({ everywhere: everywhere.checked ? "1" : "", page: 1 }));
      toolbar.append(picker.element, sort, el("label", { class: "field" }, search),
        el("label", { class: "field" }, everywhere, "in all steps"));

      function show(answer) {
        const title = (item) => ({ ...item, title: item.title });
        filters.replaceChildren(answer.filters
          ? samples.chips(answer.filters.map(title), state.filter, (filter) => load({ filter, page: 1 }), "filter")
          : el("p", { class: "quiet" }, ""));
        sort.replaceChildren(samples.select("Sort", answer.sorts, state.sort, (by) => load({ sort: by, page: 1 })));
        const note = answer.note ? el("p", { class: "quiet", role: "status" }, answer.note) : "";
        const list = answer.groups.map((group) => card(run, group, state.search));
        const pages = () => samples.pager(answer.page, answer.pages, (page) => load({ page }));
        body.replaceChildren(...[
          el("p", { class: "quiet", role: "status" }, answer.summary), note,
          ...list, pages()].filter(Boolean));
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        const query = { step: state.step, filter: state.filter === "all" ? "" : state.filter,
          sort: state.sort === "prompt" ? "" : state.sort, search: state.search,
          everywhere: state.search ? state.everywhere : "", page: state.page > 1 ? state.page : "" };
        gw.setParams(query);
        return samples.loading(body, asked, () => gw.source.get(`run/${run.id}/groups`, query), show);
      }
      load();
      return {
        update(later) {
          if (!later || !later.rollout_steps || later.rollout_steps.length === steps.length) return;
          const follow = picker.atEnd && !params.step;
          picker.extend(steps = later.rollout_steps);
          if (follow) { picker.go(steps[steps.length - 1]); load({ step: picker.step }); }
        },
        dispose() { clearTimeout(timer); },
      };
    },
  });
})();
