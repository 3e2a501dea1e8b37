/* The list of runs. */
"use strict";

gw.views.add({
  name: "runs", title: "Runs", top: true,
  async render(element) {
    const {runs} = await gw.source.get("runs");
    gw.fill(element, gw.el("div", {class: "card"}, gw.table([
      {title: "run", value: run => gw.el("a", {href: gw.link(run.id, "")}, run.name)},
      {title: "status", value: run => gw.statusBadge(run.status)},
      {title: "step", numeric: true, value: run => gw.format.number(run.step)},
    ], runs)));
  },
});
