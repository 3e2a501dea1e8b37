/* Where the seconds and the memory of each step went. */
"use strict";

(function (gw) {
  const ABOUT = {
    generate: "sampling completions", group: "embedding and clustering", reward: "reward functions",
    wait: "waiting for rewards or completions", train: "updates", other: "writing files, metrics, all else",
  };

  gw.views.add({
    name: "time", title: "Time", order: 80,
    async render(element, run) {
      let answer = null;
      const charts = [];
      const totals = gw.el("section", {class: "card"});
      const steps = part => part.first === part.last ? `step ${gw.format.number(part.first)}`
        : `steps ${gw.format.number(part.first)} to ${gw.format.number(part.last)}`;

      async function load() {
        answer = await gw.source.get(`run/${run.id}/time`);
      }

      function showTotals() {
        const facts = [
          [gw.format.duration(answer.seconds), `in ${gw.format.number(answer.steps)} steps, without evaluations`],
          [gw.format.duration(answer.seconds / answer.steps), "a step"],
          [gw.format.number(Math.round(answer.tokens / answer.seconds)), "sampled tokens per second"],
          answer.remaining !== null ? [gw.format.duration(answer.remaining), "left, by the last steps"] : null,
          answer.sampler_idle ? [gw.format.duration(answer.sampler_idle), "in which the sampler had nothing to do"] : null,
        ].filter(Boolean);
        const memory = stage => answer.peak_memory[stage];
        gw.fill(totals,
          gw.el("div", {class: "facts-row"}, facts.map(([value, about]) => gw.el("div", {class: "fact"}, gw.el("b", {}, value), gw.el("span", {class: "quiet"}, about)))),
          gw.table([
            {title: "stage", value: stage => [gw.el("i", {class: `run-dot series-${answer.stages.indexOf(stage) % 8 + 1}`}), stage, gw.el("span", {class: "quiet"}, ` ${ABOUT[stage] || ""}`)]},
            {title: "in all", numeric: true, value: stage => gw.format.duration(answer.totals[stage])},
            {title: "a step", numeric: true, value: stage => gw.format.duration(answer.totals[stage] / answer.steps)},
            {title: "share", numeric: true, value: stage => gw.format.percent(answer.totals[stage] / answer.seconds)},
            {title: "peak memory", numeric: true, value: stage => memory(stage) === undefined ? "" : `${memory(stage).toFixed(2)} GiB`},
          ], answer.stages, {label: "time by stage"}));
      }

      function chart(title, about, options) {
        const place = gw.el("div", {class: "tall"});
        charts.push(gw.charts.add(place, options, {group: "time", label: title}));
        return gw.el("section", {class: "card"}, gw.el("h2", {}, title, gw.el("span", {class: "quiet small"}, ` ${about}`)), place);
      }

      const categories = () => answer.stretches.map(part => part.first === part.last ? String(part.first) : `${part.first}–${part.last}`);
      const axes = format => ({
        xAxis: {type: "category", data: categories(), axisLabel: {hideOverlap: true}},
        yAxis: {type: "value", axisLabel: {formatter: format}},
        legend: {top: 0, left: 0, itemWidth: 10, itemHeight: 10, icon: "roundRect", textStyle: {color: gw.color("quiet")}},
        grid: {top: 34},
      });
      const tooltip = format => ({trigger: "axis", axisPointer: {type: "shadow"}, formatter: points => gw.charts.tip(steps(answer.stretches[points[0].dataIndex]),
        points.filter(point => point.value !== null && point.value !== undefined).map(point => ({color: point.color, name: point.seriesName, value: format(point.value)})))});

      const seconds = () => ({
        ...axes(value => gw.format.short(value)),
        tooltip: tooltip(gw.format.duration),
        series: answer.stages.map((stage, index) => ({type: "bar", stack: "time", name: stage, barCategoryGap: answer.stretches.length > 60 ? 0 : "20%",
          color: gw.charts.series(index), data: answer.stretches.map(part => part.seconds[stage])})),
      });
      const memory = () => ({
        ...axes(value => gw.format.short(value)),
        tooltip: tooltip(value => `${value.toFixed(2)} GiB`),
        series: answer.stages.filter(stage => stage in answer.peak_memory).map(stage => ({type: "line", name: stage, symbol: "none", step: "middle",
          color: gw.charts.series(answer.stages.indexOf(stage)), data: answer.stretches.map(part => part.memory[stage] ?? null)})),
      });
      const speed = () => ({
        ...axes(gw.format.short),
        legend: {show: false},
        grid: {top: 12},
        tooltip: tooltip(value => gw.format.number(Math.round(value))),
        series: [{type: "line", name: "tokens per second", symbol: "none", color: gw.charts.series(0), areaStyle: {opacity: 0.12},
          data: answer.stretches.map(part => part.tokens_per_second)}],
      });

      function draw() {
        if (!answer.steps) return gw.fill(element, gw.noteBox("No step has ended yet, or times were not recorded."));
        showTotals();
        if (charts.length) return charts.forEach(one => one.refresh());
        return gw.fill(element, totals,
          chart("Seconds of a step", "by stage", seconds),
          gw.el("div", {class: "columns"},
            chart("Memory", "peak of each stage in GiB; on a CPU the resident memory at its end", memory),
            chart("Speed", "sampled tokens per second", speed)));
      }

      await load();
      draw();
      return {
        async update() {
          await load();
          draw();
        },
        dispose: () => charts.forEach(one => one.dispose()),
      };
    },
  });
})(window.gw);
