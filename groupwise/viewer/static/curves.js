/* Metrics as charts, of one run or of several: used by the views Curves, Compare and Summary. */
"use strict";

(function (gw) {
  const AXES = {steps: "step", tokens: "tokens", seconds: "time"};

  /** The points of metrics, read when they are needed and in one request for all that are asked for together. */
  class Columns {
    constructor() {
      this.known = new Map(); // run id → Map(metric → promise of its column)
      this.waiting = new Map(); // run id → Map(metric → resolve)
    }

    get(run, name) {
      if (!this.known.has(run)) this.known.set(run, new Map());
      const columns = this.known.get(run);
      if (!columns.has(name)) columns.set(name, this.ask(run, name));
      return columns.get(name);
    }

    ask(run, name) {
      return new Promise((resolve, reject) => {
        if (!this.waiting.size) setTimeout(() => this.send(), 0);
        if (!this.waiting.has(run)) this.waiting.set(run, new Map());
        this.waiting.get(run).set(name, {resolve, reject});
      });
    }

    send() {
      const waiting = this.waiting;
      this.waiting = new Map();
      for (const [run, asked] of waiting) {
        // A report holds all metrics in one answer.
        const query = gw.source.live ? {names: [...asked.keys()].join(",")} : {};
        gw.source.get(`run/${run}/metrics`, query).then(
          answer => asked.forEach(({resolve}, name) => resolve(answer.columns[name] || null)),
          error => asked.forEach(({reject}) => reject(error)));
      }
    }

    forget() {
      this.known.clear();
    }
  }

  /** The exponential moving average, corrected for its start; gaps stay gaps. */
  function smooth(values, weight) {
    if (!weight) return values;
    let mean = 0;
    let sum = 0;
    return values.map(value => {
      if (value === null) return null;
      mean = weight * mean + (1 - weight) * value;
      sum = weight * sum + (1 - weight);
      return mean / sum;
    });
  }

  /** Where a step is on an axis, by the points of a metric. */
  function place(column, step, axis) {
    if (axis === "steps") return step;
    let index = -1;
    while (index + 1 < column.steps.length && column.steps[index + 1] <= step) index += 1;
    return index < 0 ? 0 : column[axis][index];
  }

  const label = (axis, value) => axis === "seconds" ? gw.format.duration(value)
    : `${AXES[axis]} ${gw.format.number(Math.round(value))}`;

  /** Fills an element with charts. `runs` are summaries, `load()` promises {sections}. Charts are drawn when they come
      into view, or, if they are not `lazy`, at once. */
  gw.curves = {};
  gw.curves.smooth = smooth;
  gw.curves.mount = async function (element, {runs, load, params, lazy = true}) {
    const single = runs.length === 1;
    const columns = new Columns();
    const state = {
      axis: params.x in AXES ? params.x : "steps",
      weight: Math.min(0.99, Math.max(0, Number(params.smooth ?? 0.6) || 0)),
      search: params.q || "",
      range: null,
      marks: params.marks !== "off",
      wide: params.wide || "",
    };
    let charts = [];
    let sections = [];
    let pointed = null; // the chart under the pointer; the others show their values at the same place beside their names

    const redraw = () => charts.forEach(chart => {
      if (chart.chart) chart.chart.dispatchAction({type: "hideTip"});
      chart.refresh();
    });

    // -- controls
    const shownWeight = gw.el("output", {}, state.weight.toFixed(2));
    const slider = gw.el("input", {type: "range", min: 0, max: 0.99, step: 0.01, id: "smoothing", oninput() {
      state.weight = Number(slider.value);
      shownWeight.textContent = state.weight.toFixed(2);
      gw.setParams({smooth: state.weight});
      redraw();
    }});
    slider.value = state.weight;
    const axisButtons = Object.entries(AXES).map(([axis, title]) => gw.el("button", {type: "button", dataset: {axis},
      onclick() { setAxis(axis); }}, title));
    function setAxis(axis) {
      state.axis = axis;
      state.range = null;
      gw.setParams({x: axis === "steps" ? null : axis});
      showControls();
      redraw();
    }
    const search = gw.el("input", {type: "search", placeholder: "Search metrics", "aria-label": "Search metrics", value: state.search,
      oninput() {
        state.search = search.value;
        gw.setParams({q: state.search});
        filter();
      }});
    const marks = gw.el("input", {type: "checkbox", checked: state.marks, onchange() {
      state.marks = marks.checked;
      gw.setParams({marks: state.marks ? null : "off"});
      redraw();
    }});
    const zoomed = gw.el("span", {class: "zoomed"});
    function showControls() {
      axisButtons.forEach(button => button.setAttribute("aria-pressed", String(button.dataset.axis === state.axis)));
      gw.fill(zoomed, state.range
        ? [`${label(state.axis, state.range[0])} to ${label(state.axis, state.range[1])} `,
           gw.el("button", {type: "button", onclick: () => zoom(null)}, "Show all")]
        : gw.el("span", {class: "quiet small hint"}, "drag in a chart to zoom"));
    }
    function zoom(range) {
      if (String(range) === String(state.range)) return;
      state.range = range;
      showControls();
      redraw();
    }

    const body = gw.el("div", {class: "curve-sections"});
    gw.fill(element,
      gw.el("div", {class: "bar"},
        gw.el("label", {}, "Smoothing", slider, shownWeight),
        gw.el("span", {}, "By", gw.el("span", {class: "choice", role: "group", "aria-label": "Horizontal axis"}, axisButtons)),
        search,
        single ? gw.el("label", {}, marks, "Phases and evaluations") : legend(),
        zoomed),
      body);
    showControls();

    function legend() {
      return gw.el("span", {class: "run-legend"}, runs.map((run, index) => gw.el("a", {class: "run-legend-entry", href: gw.link(run.id, "curves")},
        gw.el("i", {class: `run-dot series-${index % 8 + 1}`}), run.name)));
    }

    // -- charts
    function draw() {
      charts.forEach(chart => chart.dispose());
      charts = [];
      gw.fill(body, sections.map(section => gw.el("section", {class: "curves", dataset: {section: section.title}},
        gw.el("h2", {}, section.title),
        gw.el("div", {class: `chart-grid ${section.title === "Main" ? "main" : ""}`}, section.charts.map(chart => card(chart))),
        section.constant.length ? constants(section.constant) : null)));
      filter();
    }

    function constants(entries) {
      return gw.el("p", {class: "constants small quiet"}, "Constant: ", entries.map(([name, value, about], index) =>
        [index ? ", " : "", gw.el("span", {class: "nowrap", dataset: {metric: name}, title: about}, `${name} `, gw.el("b", {}, gw.format.number(value)))]));
    }

    function card(chart) {
      const about = gw.el("p", {class: "about small quiet", hidden: true}, chart.about || "no description");
      const title = gw.el("button", {type: "button", class: "metric", title: chart.about, "aria-expanded": "false", onclick() {
        about.hidden = !about.hidden;
        title.setAttribute("aria-expanded", String(!about.hidden));
      }}, chart.title);
      const last = gw.el("span", {class: "last"});
      const place = gw.el("div");
      const widen = gw.el("button", {type: "button", class: "widen", title: "Larger", "aria-label": `${chart.title} larger`,
        "aria-pressed": String(state.wide === chart.title), onclick() {
          const isWide = box.classList.toggle("wide");
          widen.setAttribute("aria-pressed", String(isWide));
          state.wide = isWide ? chart.title : "";
          gw.setParams({wide: state.wide});
        }}, "⤢");
      const box = gw.el("article", {class: `card curve ${state.wide === chart.title ? "wide" : ""}`, dataset: {metric: chart.title}},
        gw.el("h3", {}, title, last, widen), about, place);
      place.addEventListener("pointerenter", () => { pointed = place; });
      place.addEventListener("pointerleave", () => {
        pointed = null;
        charts.forEach(one => one.unpoint());
      });
      const unpoint = () => { last.textContent = last.dataset.value || ""; };
      const drawn = gw.charts.add(place, () => options(chart, last, place), {
        group: "curves", label: `${chart.title}: ${chart.about}`, setup: watchZoom, after: selectToZoom, lazy,
      });
      charts.push(Object.assign(drawn, {unpoint}));
      return box;
    }

    function watchZoom(chart) {
      chart.on("datazoom", event => {
        const [part] = event.batch || [];
        if (part && part.startValue !== undefined) zoom([part.startValue, part.endValue]);
      });
      chart.getZr().on("dblclick", () => zoom(null));
    }

    function selectToZoom(chart) {
      chart.dispatchAction({type: "takeGlobalCursor", key: "dataZoomSelect", dataZoomSelectActive: true, escapeConnect: true}); // of this chart alone
    }

    async function options(chart, last, place) {
      const {axis, range} = state;
      const wanted = runs.flatMap((run, index) => chart.lines.map((name, line) => ({run, index, name, line})));
      const read = await Promise.all(wanted.map(async want => {
        const names = [want.name, ...(chart.bands[want.name] || [])]; // asked for together
        const [column, ...band] = await Promise.all(names.map(name => columns.get(want.run.id, name)));
        return {...want, column, band};
      }));
      const series = [];
      const rows = new Map(); // index of a series → its row of the tooltip
      const inside = x => !range || (x !== undefined && x >= range[0] && x <= range[1]);
      for (const {run, index, name, line, column, band} of read) {
        if (!column) continue;
        const color = gw.charts.series(single ? line : index);
        const isEvaluation = name.startsWith("eval/");
        const x = column[axis];
        const values = column.values;
        const smoothed = isEvaluation ? values : smooth(values, state.weight);
        const near = x.map((value, at) => inside(value) || inside(x[at - 1]) || inside(x[at + 1])); // lines go on to the edge
        const pairs = ys => x.map((value, at) => [value, ys[at], values[at]]).filter((_, at) => near[at]);
        if (band.length === 2 && band[0] && band[1] && band[0].values.length === x.length && single) {
          const [low, high] = band.map(end => end.values);
          const shade = {type: "line", stack: `band ${name}`, stackStrategy: "all", symbol: "none", silent: true, lineStyle: {opacity: 0}, z: 1};
          series.push({...shade, data: pairs(low).map(([at, value]) => [at, value])});
          series.push({...shade, areaStyle: {color, opacity: 0.16},
            data: pairs(high.map((value, place) => value === null || low[place] === null ? null : value - low[place])).map(([at, value]) => [at, value])});
        }
        if (smoothed !== values) {
          series.push({type: "line", symbol: "none", silent: true, lineStyle: {color, width: 1, opacity: 0.28}, z: 2,
            data: pairs(values).map(([at, value]) => [at, value])});
        }
        rows.set(series.length, {color, name: single ? name : run.name, smooth: smoothed !== values});
        series.push({type: "line", data: pairs(smoothed), color, lineStyle: {color, width: isEvaluation ? 1.5 : 1.8}, z: 3,
          symbol: "circle", symbolSize: isEvaluation ? 6 : 4, showSymbol: isEvaluation || x.length < 3, emphasis: {disabled: true}});
        const final = values.findLast(value => value !== null);
        if (single && line === chart.lines.length - 1)
          last.textContent = last.dataset.value = final === undefined ? "" : gw.format.number(final, 3);
      }
      const first = read.find(({column}) => column);
      if (!first) return null;
      if (single && state.marks) addMarks(series, first, chart);
      return {
        xAxis: {type: "value", min: range ? range[0] : 0, max: range ? range[1] : "dataMax", splitLine: {show: false},
          axisLabel: {showMinLabel: !range, showMaxLabel: false, formatter: value => axis === "seconds" ? shortTime(value) : gw.format.short(value)}},
        yAxis: {type: "value", scale: true, splitNumber: 4, axisLabel: {formatter: gw.format.short}},
        grid: {top: 8},
        toolbox: {show: true, itemSize: 0, feature: {dataZoom: {yAxisIndex: "none", filterMode: "none", brushStyle: {color: gw.color("accent"), opacity: 0.15}}}},
        tooltip: {trigger: "axis", formatter: points => tip(points, rows, last, pointed === place)},
        series,
      };
    }

    function tip(points, rows, last, isPointed) {
      const [point] = points;
      const lines = points.filter(({seriesIndex}) => rows.has(seriesIndex)).map(({seriesIndex, value}) => {
        const row = rows.get(seriesIndex);
        const raw = row.smooth ? ` (${gw.format.number(value[2], 3)})` : "";
        return {color: row.color, name: row.name, value: `${gw.format.number(value[1], 4)}${raw}`};
      });
      if (!lines.length) return "";
      if (single) last.textContent = lines.at(-1).value;
      return isPointed ? gw.charts.tip(label(state.axis, point.axisValue ?? point.value[0]), lines) : "";
    }

    /** Phases as shaded areas, evaluations as dotted lines, resumed runs as dashed ones. */
    function addMarks(series, {run, column}, chart) {
      const {axis, range} = state;
      const target = series.find(one => one.z === 3);
      const within = x => !range || (x >= range[0] && x <= range[1]);
      const clamp = x => range ? Math.min(range[1], Math.max(range[0], x)) : x;
      if (run.phases.length > 1) {
        target.markArea = {silent: true, label: {color: gw.color("quiet"), fontSize: 10, position: "insideTop"},
          data: run.phases.map((phase, index) => [
            {name: phase.name, xAxis: clamp(place(column, phase.first - 1, axis)), itemStyle: {color: gw.color(`phase-${index % 2 + 1}`)}},
            {xAxis: clamp(place(column, phase.last, axis))},
          ]).filter(([from, to]) => from.xAxis < to.xAxis)};
      }
      const lines = [];
      if (!chart.lines.some(name => name.startsWith("eval/")) && run.evaluated_steps.length <= 60)
        for (const step of run.evaluated_steps)
          lines.push({xAxis: place(column, step, axis), lineStyle: {color: gw.color("faint"), type: "dotted", width: 1, opacity: 0.5}, label: {show: false}});
      for (const change of run.changes)
        lines.push({xAxis: place(column, change.step, axis), lineStyle: {color: gw.color("series-2"), type: "dashed", width: 1},
          label: {show: true, formatter: "resumed", fontSize: 10, color: gw.color("quiet"), position: "insideEndTop"}});
      target.markLine = {silent: true, symbol: "none", animation: false, data: lines.filter(line => within(line.xAxis))};
    }

    function shortTime(seconds) {
      if (seconds < 120) return `${gw.format.short(seconds)} s`;
      return seconds < 7200 ? `${gw.format.short(Math.round(seconds / 6) / 10)} min` : `${gw.format.short(Math.round(seconds / 360) / 10)} h`;
    }

    function filter() {
      const words = state.search.toLowerCase().split(/\s+/).filter(Boolean);
      const fits = metric => words.every(word => metric.toLowerCase().includes(word));
      for (const section of body.children) {
        let shown = 0;
        for (const part of section.querySelectorAll("[data-metric]")) {
          part.hidden = !fits(part.dataset.metric);
          shown += part.hidden ? 0 : 1;
        }
        section.hidden = !shown;
        const constantLine = section.querySelector(".constants");
        if (constantLine) constantLine.hidden = words.length > 0 && !constantLine.querySelector("[data-metric]:not([hidden])");
      }
    }

    const shape = list => JSON.stringify(list.map(section => [section.title, section.charts.map(chart => [chart.title, chart.lines])]));
    sections = (await load()).sections;
    if (!sections.length) gw.fill(body, gw.noteBox("No metrics yet: the first step has not ended."));
    else draw();
    return {
      /** New points have come; `changed` are the runs' new summaries. */
      async update(changed) {
        const before = shape(sections);
        runs = changed || runs;
        sections = (await load()).sections;
        columns.forget();
        if (shape(sections) !== before) draw();
        else {
          body.querySelectorAll(".constants").forEach(line => line.remove());
          sections.forEach((section, index) => section.constant.length && body.children[index].append(constants(section.constant)));
          filter();
          redraw();
        }
      },
      dispose() {
        charts.forEach(chart => chart.dispose());
      },
    };
  };
})(window.gw);
