/* The report of a comparison of control runs: text, tables and curves in order. */
"use strict";

(function (gw) {
  const el = gw.el;

  function chart(place, spec) {
    return gw.charts.add(place, () => ({
      grid: {left: 8, right: 16, top: 30, bottom: 26, containLabel: true},
      legend: {type: "scroll", top: 0, textStyle: {color: gw.color("text"), fontSize: 11}, data: spec.series.map(series => series.name)},
      tooltip: {trigger: "axis", formatter: items => gw.charts.tip(`${gw.format.number(items[0].data[0])} ${spec.x_label}`,
        items.filter(item => !item.seriesName.startsWith("\u0000")).map(item => ({color: item.color, name: item.seriesName, value: gw.format.number(item.data[1])})))},
      xAxis: {type: spec.log ? "log" : "value", name: spec.x_label, nameLocation: "middle", nameGap: 24, splitLine: {show: false},
        min: spec.log ? "dataMin" : undefined, axisLabel: {formatter: gw.format.short}},
      yAxis: {type: "value", scale: true, axisLabel: {formatter: gw.format.short}},
      series: spec.series.flatMap((series, index) => {
        const color = gw.charts.series(index);
        const usable = series.x.map((x, place) => place).filter(place => !spec.log || series.x[place] > 0);
        const points = values => usable.map(place => [series.x[place], values[place]]);
        const line = {name: series.name, type: "line", step: "end", data: points(series.mean), color, symbol: "none", lineStyle: {width: 2}, z: 3,
          markLine: index === 0 && spec.threshold !== null ? {silent: true, symbol: "none", data: [{yAxis: spec.threshold}],
            lineStyle: {color: gw.color("faint"), type: "dashed"}, label: {formatter: `solved: ${gw.format.number(spec.threshold)}`, color: gw.color("quiet"), position: "insideEndTop"}} : undefined};
        if (!series.low) return [line];
        const hidden = {type: "line", step: "end", symbol: "none", lineStyle: {opacity: 0}, stack: series.name, stackStrategy: "all", silent: true, color};
        return [{...hidden, name: `\u0000${series.name} low`, data: points(series.low)},
          {...hidden, name: `\u0000${series.name} high`, data: points(series.high.map((high, place) => high - series.low[place])), areaStyle: {color, opacity: 0.16}}, line];
      }),
    }), {lazy: false, label: `${spec.y_label} by ${spec.x_label}`});
  }

  gw.views.add({
    name: "comparison", title: "Comparison", top: true,
    async render(element) {
      const {title, blocks, curves} = await gw.source.get("comparison");
      const handles = [];
      const block = part => {
        if (part.heading !== undefined) return el("h2", {}, part.heading);
        if (part.text !== undefined) return el("p", {}, part.text);
        if (part.list) return el("div", {class: "card"}, el("ul", {}, part.list.map(entry => el("li", {}, entry))));
        if (part.table) return el("div", {class: "card"}, gw.table(part.table.header.map((name, index) =>
          ({title: name, numeric: !part.table.left.includes(index), value: row => row[index]})), part.table.rows));
        return el("div", {class: "card"}, el("div", {class: "comparison-charts"}, curves[part.curves].map(spec => {
          const place = el("div", {class: "tall"});
          handles.push(chart(place, spec));
          return el("figure", {}, el("figcaption", {}, `${spec.y_label} by ${spec.x_label}`), place);
        })));
      };
      document.title = `${title} · groupwise`;
      const report = gw.source.report;
      gw.fill(element, el("h2", {}, title), blocks.map(block),
        report ? el("footer", {class: "quiet small"}, `Written by groupwise ${report.version}, ${report.made}. This file holds all that it shows and requests nothing.`) : null);
      return {dispose() { for (const handle of handles) handle.dispose(); }};
    },
  });
})(window.gw);
