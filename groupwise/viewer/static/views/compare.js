/* Several runs: their curves in one plot per metric, and settings, inputs and versions side by side. */
"use strict";

gw.views.add({
  name: "compare", title: "Compare runs", top: true,
  async render(element, _, params) {
    let answer = await gw.source.get("compare", {runs: params.runs});
    const curves = gw.el("div");
    const tables = gw.el("div");
    const only = gw.el("input", {type: "checkbox", id: "only-differences", checked: params.all !== "on", onchange() {
      gw.setParams({all: only.checked ? null : "on"});
      draw();
    }});

    function draw() {
      const same = [];
      const titles = {settings: "Settings", inputs: "Inputs", versions: "Versions"};
      gw.fill(tables, Object.entries(titles).map(([name, title]) => {
        const rows = answer.tables[name];
        const shown = only.checked ? rows.filter(row => row.differs) : rows;
        if (!shown.length) {
          same.push(name);
          return null;
        }
        return gw.el("section", {class: "card compared", dataset: {table: name}}, gw.el("h2", {}, title), gw.table([
          {title: "", value: row => gw.el("code", {}, row.name)},
          ...answer.runs.map((run, index) => ({
            title: gw.el("span", {class: "run-head"}, gw.el("i", {class: `run-dot series-${index % 8 + 1}`}), gw.el("a", {href: gw.link(run.id, "settings")}, run.name)),
            value: row => gw.el("code", {class: row.values[index] === null ? "quiet" : null}, gw.format.setting(row.values[index])),
          })),
        ], shown, {label: title, rowClass: row => row.differs && !only.checked ? "differs" : null}));
      }), same.length ? gw.el("p", {class: "quiet same"}, `No differences: ${same.join(", ")}.`) : null);
    }

    gw.fill(element,
      gw.el("div", {class: "bar"}, gw.el("label", {}, only, "Only differences"), gw.el("a", {href: gw.link(null, "", {chosen: params.runs})}, "Choose other runs")),
      curves, tables);
    draw();
    const mounted = await gw.curves.mount(curves, {runs: answer.runs, load: async () => answer, params});
    return {
      async update() {
        if (!answer.runs.some(run => run.status === "running")) return;
        const versions = runs => runs.map(run => run.version).join();
        const later = await gw.source.get("compare", {runs: params.runs});
        const changed = versions(later.runs) !== versions(answer.runs);
        answer = later;
        if (changed) await mounted.update(answer.runs);
      },
      dispose: mounted.dispose,
    };
  },
});
