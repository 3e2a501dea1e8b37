/* The settings of a run: those that differ from the defaults of its algorithm first. */
"use strict";

gw.views.add({
  name: "settings", title: "Settings", order: 90,
  async render(element, run, params) {
    const answer = await gw.source.get(`run/${run.id}/settings`);
    const only = gw.el("input", {type: "checkbox", checked: params.all !== "on", onchange() {
      gw.setParams({all: only.checked ? null : "on"});
      draw();
    }});
    const search = gw.el("input", {type: "search", placeholder: "Search settings", "aria-label": "Search settings", value: params.q || "", oninput() {
      gw.setParams({q: search.value});
      draw();
    }});
    const tables = gw.el("div");
    const code = value => gw.el("code", {}, gw.format.setting(value));

    function draw() {
      const words = search.value.toLowerCase();
      const identity = ["task", "algorithm", "model.source"];
      const shown = answer.settings.filter(one => words ? `${one.name} ${one.about}`.toLowerCase().includes(words)
        : !only.checked || one.changed || identity.includes(one.name));
      gw.fill(tables, shown.length ? gw.table([
        {title: "setting", value: one => gw.el("code", {class: "nowrap"}, one.name)},
        {title: "value", value: one => code(one.value)},
        {title: `default of ${run.algorithm}`, value: one => identity.includes(one.name) ? "" : gw.el("span", {class: "quiet"}, code(one.default))},
        {title: "meaning", class: "meaning", value: one => gw.el("span", {class: "quiet"}, one.about)},
      ], shown, {label: "settings", rowClass: one => one.changed && (words || !only.checked) ? "differs" : null})
        : gw.el("p", {class: "quiet"}, answer.settings.length ? "No setting fits." : "The settings cannot be read."));
    }

    const entries = table => gw.table([
      {title: "", value: ([name]) => gw.el("span", {class: "nowrap"}, name)},
      {title: "", value: ([, value]) => code(value)},
    ], Object.entries(table), {class: "plain"});

    gw.fill(element,
      gw.el("div", {class: "bar"}, gw.el("label", {}, only, "Only those that differ from the defaults"), search),
      gw.el("section", {class: "card"}, tables),
      answer.changes.length ? gw.el("section", {class: "card"}, gw.el("h2", {}, "Changed when the run was resumed"), gw.table([
        {title: "step", numeric: true, value: one => gw.format.number(one.step)},
        {title: "setting", value: one => code(one.name)},
        {title: "before", value: one => code(one.before)},
        {title: "after", value: one => code(one.after)},
      ], answer.changes.flatMap(({step, changed}) => Object.entries(changed).map(([name, [before, after]]) => ({step, name, before, after}))))) : null,
      gw.el("div", {class: "columns"},
        gw.el("section", {class: "card"}, gw.el("h2", {}, "Inputs"), entries(answer.inputs)),
        gw.el("section", {class: "card"}, gw.el("h2", {}, "Versions"), entries(answer.versions))));
    draw();
  },
});
