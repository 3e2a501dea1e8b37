/* Charts: ECharts with the page's colours, tooltips made of elements (texts of a run are never HTML), drawn when they
   come into view and redrawn when the theme changes. */
"use strict";

(function (gw) {
  gw.charts = {};

  gw.charts.series = index => gw.color(`series-${index % 8 + 1}`);

  /** The content of a tooltip: a title and rows of {color, name, value}. */
  gw.charts.tip = (title, rows) => gw.el("div", {class: "chart-tip"},
    title ? gw.el("div", {class: "tip-title"}, title) : null,
    rows.map(row => gw.el("div", {class: "tip-row"},
      row.color ? gw.el("i", {style: {background: row.color}}) : null, gw.el("span", {}, row.name), gw.el("span", {}, row.value))));

  /** What all charts share; a chart's own options are laid over it, one level deep. */
  function base() {
    const axis = {
      axisLine: {lineStyle: {color: gw.color("line")}},
      axisTick: {show: false},
      axisLabel: {color: gw.color("quiet"), fontSize: 11, hideOverlap: true},
      splitLine: {lineStyle: {color: gw.color("line"), opacity: 0.6}},
      nameTextStyle: {color: gw.color("quiet"), fontSize: 11},
    };
    return {
      axis,
      options: {
        animation: false,
        textStyle: {fontFamily: gw.color("font") || "sans-serif", color: gw.color("text")},
        grid: {left: 8, right: 14, top: 12, bottom: 4, containLabel: true},
        tooltip: {
          backgroundColor: gw.color("surface"),
          borderColor: gw.color("line"),
          borderWidth: 1,
          padding: [6, 9],
          textStyle: {color: gw.color("text"), fontSize: 12},
          confine: true,
          transitionDuration: 0,
          axisPointer: {lineStyle: {color: gw.color("faint")}, crossStyle: {color: gw.color("faint")}, label: {show: false}},
        },
      },
    };
  }

  /** Axes get the page's look under what they say themselves. */
  function merged(options) {
    const {axis, options: common} = base();
    const result = {...common, ...options};
    for (const name of ["tooltip", "grid", "textStyle"])
      if (options[name] && !Array.isArray(options[name])) result[name] = {...common[name], ...options[name]};
    for (const name of ["xAxis", "yAxis"]) {
      if (!options[name]) continue;
      const styled = one => {
        const own = {...axis, ...one};
        for (const key of Object.keys(axis)) if (one[key]) own[key] = {...axis[key], ...one[key]};
        return own;
      };
      result[name] = Array.isArray(options[name]) ? options[name].map(styled) : styled(options[name]);
    }
    return result;
  }

  // One chart after the other, and the page is shown in between: a dozen at once would block it for seconds.
  let queue = Promise.resolve();
  const turnToDraw = () => queue = queue.then(() => new Promise(resolve => setTimeout(resolve)));

  const pending = new Map();
  const watcher = new IntersectionObserver(entries => {
    for (const entry of entries) {
      if (!entry.isIntersecting || !pending.has(entry.target)) continue;
      const draw = pending.get(entry.target);
      pending.delete(entry.target);
      watcher.unobserve(entry.target);
      draw();
    }
  }, {rootMargin: "200px"});

  /** A chart in an element. `options()` returns ECharts' options, or promises them; it is called when the chart comes
      into view, by `refresh()` and when the theme changes. `setup(instance)` is called once, for listeners, `after(instance)`
      whenever options were set.
      The element's attribute data-drawn says that the chart is there. */
  gw.charts.add = function (element, options, {group = null, label = null, setup = null, after = null, lazy = true} = {}) {
    let chart = null;
    let ended = false;
    let turn = 0;
    element.classList.add("chart");
    element.setAttribute("role", "img");
    if (label) element.setAttribute("aria-label", label);

    async function draw() {
      const mine = ++turn;
      const own = await options();
      if (lazy) await turnToDraw();
      if (ended || mine !== turn || !own) return;
      if (!chart) {
        chart = echarts.init(element, null, {renderer: "canvas"});
        if (group) {
          chart.group = group;
          echarts.connect(group);
        }
        if (setup) setup(chart);
      }
      chart.setOption(merged(own), {notMerge: true});
      if (after) after(chart);
      element.dataset.drawn = "true";
    }

    const sizes = new ResizeObserver(() => chart && chart.resize());
    sizes.observe(element);
    const unlisten = gw.theme.listen(() => chart && draw());
    if (lazy) {
      pending.set(element, draw);
      watcher.observe(element);
    } else {
      draw();
    }
    return {
      element,
      get chart() { return chart; },
      /** Draws again, if the chart has been drawn. */
      refresh: () => chart || !pending.has(element) ? draw() : Promise.resolve(),
      dispose() {
        ended = true;
        pending.delete(element);
        watcher.unobserve(element);
        sizes.disconnect();
        unlisten();
        if (chart) chart.dispose();
      },
    };
  };
})(window.gw);
