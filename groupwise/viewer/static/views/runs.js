/* The list of runs, of which several can be chosen to compare them. */
"use strict";

(function (gw) {
  const change = (range, format) => range === null ? "–" : gw.el("span", {class: "nowrap"},
    format(range.first), gw.el("span", {class: "quiet"}, " → "), gw.el("b", {}, format(range.last)));

  const held_out = run => run.held_out === null || run.held_out === undefined ? gw.el("span", {class: "quiet"}, "–")
    : gw.el("span", {}, change(run.held_out, gw.format.number3),
      run.held_out.best > run.held_out.last ? gw.el("span", {class: "quiet nowrap"}, ` best ${gw.format.number3(run.held_out.best)}`) : null,
      gw.el("div", {class: "quiet small"}, run.metric));

  gw.format.number3 = value => gw.format.number(value, 3);

  gw.views.add({
    name: "runs", title: "Runs", top: true,
    async render(element, _, params) {
      const chosen = new Set((params.chosen || "").split(",").filter(Boolean));
      const counts = new Map(); // findings by run and version, asked for one after the other once the list is shown
      let queue = Promise.resolve();
      let ended = false;
      let shown = null;
      let text = "";

      const compare = gw.el("button", {type: "button", class: "primary", onclick() {
        location.hash = gw.link(null, "compare", {runs: [...chosen].join(",")});
      }});
      const search = gw.el("input", {type: "search", placeholder: "Search runs", "aria-label": "Search runs", oninput() {
        text = search.value.toLowerCase();
        draw();
      }});
      const summary = gw.el("span", {class: "quiet"});
      const table = gw.el("div");
      const unreadable = gw.el("div");
      gw.fill(element, gw.el("div", {class: "bar"}, search, compare, summary), unreadable, gw.el("div", {class: "card"}, table));

      function showCompare() {
        compare.textContent = chosen.size ? `Compare ${chosen.size}` : "Compare";
        compare.disabled = chosen.size < 2;
        compare.title = chosen.size < 2 ? "Choose two or more runs" : "";
      }

      function choose(run) {
        const box = gw.el("input", {type: "checkbox", checked: chosen.has(run.id), "aria-label": `Choose ${run.name} to compare`, onchange() {
          if (box.checked) chosen.add(run.id);
          else chosen.delete(run.id);
          gw.setParams({chosen: [...chosen].join(",")});
          showCompare();
        }});
        return box;
      }

      const findings = run => {
        const place = gw.el("a", {href: gw.link(run.id, "findings"), class: "quiet"}, "…");
        const key = `${run.id} ${run.version}`;
        if (!counts.has(key)) {
          queue = queue.then(() => ended ? null : gw.source.get(`run/${run.id}/findings`)).then(answer => answer && answer.findings, () => null);
          counts.set(key, queue);
        }
        counts.get(key).then(list => {
          if (list === null) place.textContent = "?";
          else if (!list.length) place.textContent = "none";
          else gw.fill(place, gw.badge(String(list.length), list.some(one => one.severity === "error") ? "error" : "warning",
            list.map(one => one.title).join("\n")));
        });
        return place;
      };

      const columns = [
        {title: "", value: choose},
        {title: "run", sort: run => run.name, value: run => gw.el("div", {}, gw.el("a", {href: gw.link(run.id, "curves"), class: "run-name"}, run.name),
          gw.el("div", {class: "quiet small"}, gw.facts(run)),
          run.problems.length ? gw.badge("cannot be read completely", "warning", run.problems.join("\n")) : null)},
        {title: "status", sort: run => run.status, value: run => gw.statusBadge(run.status)},
        {title: "step", numeric: true, sort: run => run.step, value: run => [gw.format.number(run.step),
          run.total_steps ? gw.el("span", {class: "quiet"}, ` / ${gw.format.number(run.total_steps)}`) : null]},
        {title: "held out", sort: run => run.held_out ? run.held_out.last : null, value: held_out,
          hint: "The main metric on the held-out rows: first and last, and the best if it was better"},
        {title: "reward", sort: run => run.reward ? run.reward.last : null, value: run => change(run.reward, gw.format.number3),
          hint: "Mean reward of the first and of the last step"},
        {title: "findings", value: findings, hint: "What is wrong with the run: see the tab Findings"},
        {title: "time", numeric: true, sort: run => run.seconds, value: run => gw.format.duration(run.seconds),
          hint: "Seconds of all training steps, without evaluations"},
        {title: "started", sort: run => run.created, value: run => gw.el("span", {class: "nowrap"}, gw.format.when(run.created))},
      ];

      function draw() {
        const fits = shown.runs.filter(run => [run.name, run.task, run.model, run.algorithm, run.status].join(" ").toLowerCase().includes(text));
        summary.textContent = `${fits.length} of ${shown.runs.length} runs in ${shown.folders.join(", ")}`;
        gw.fill(table, fits.length ? gw.table(columns, fits, {label: "runs"}) : gw.el("p", {class: "quiet"}, "No run fits."));
        gw.fill(unreadable, Object.entries(shown.unreadable).map(([name, reason]) => gw.errorBox(`${name} cannot be read: ${reason}`)));
      }

      async function load() {
        const answer = await gw.source.get("runs");
        const changed = JSON.stringify(answer) !== JSON.stringify(shown);
        shown = answer;
        if (changed) draw();
      }

      await load();
      showCompare();
      return {
        update: () => load().then(() => document.body.classList.remove("offline"), () => document.body.classList.add("offline")),
        dispose() { ended = true; },
      };
    },
  });
})(window.gw);
