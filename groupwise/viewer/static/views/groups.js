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

  // A conversation: who said what after the prompt.
  function conversation(run, group, sample) {
    const place = { step: group.step, prompt: group.prompt_number };
    return el("ol", { class: "turns" }, ...sample.turns.map((turn, number) =>
      el("li", { class: turn.role === "assistant" ? "turn" : "turn given" },
        el("span", { class: "turn-role quiet" }, turn.role === "assistant" ? "model" : turn.role),
        ...turn.calls.map((call) => el("div", { class: "sample-text turn-call" }, call)),
        turn.text || !turn.calls.length ? samples.fold(turn.text.replace(/^\n+/, ""), {
          unsent: turn.hidden,
          load: async () => {
            if (!turn.hidden) return turn.text;
            const full = await gw.source.get(`run/${run.id}/group`, place);
            return full.samples.find((one) => one.sample === sample.sample).turns[number].text;
          },
        }) : null)));
  }

  function answer(run, group, sample, largest, wanted) {
    const text = sample.turns && !wanted ? conversation(run, group, sample) : wanted && !sample.hidden
      ? el("div", { class: "sample-text", dir: "auto" }, ...marked(sample.completion, wanted))
      : samples.fold(sample.completion, {
        unsent: sample.hidden,
        load: async () => {
          if (!sample.hidden) return sample.completion;
          const full = await gw.source.get(`run/${run.id}/group`, { step: group.step, prompt: group.prompt_number });
          return full.samples.find((one) => one.sample === sample.sample).completion;
        },
      });
    const card = el("article", { class: "answer" + (sample.why ? " silent" : ""), "data-sample": sample.sample },
      el("div", { class: "answer-number quiet" }, `#${sample.sample}`),
      ...samples.facts(sample, largest), text);
    card.classList.add(sample.advantage > 0 ? "edge-up" : sample.advantage < 0 ? "edge-down" : "edge-none");
    const extra = Object.entries(sample.extra || {});
    if (extra.length) {
      card.append(el("details", { class: "extra" }, el("summary", {}, "more columns"),
        el("dl", {}, ...extra.flatMap(([name, value]) => [el("dt", {}, name), el("dd", {}, String(value))]))));
    }
    return card;
  }

  function card(run, group, wanted) {
    const largest = samples.largestAdvantage(group.samples);
    const place = { step: group.step, prompt: group.prompt_number };
    const short = group.samples.every((sample) => sample.completion.length <= SHORT);
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
        head: 500, tail: 200, unsent: group.prompt_hidden,
        load: async () => group.prompt_hidden ? (await gw.source.get(`run/${run.id}/group`, place)).prompt : group.prompt,
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
    const query = { row: params.row, held_out: params.held_out, at: params.at };
    const load = () => samples.loading(body, asked, () => gw.source.get(`run/${run.id}/prompt`, query), show);
    const compare = (step) => {
      query.at = step;
      gw.setParams({ at: step });
      load();
    };

    function show(history) {
      if (chart) chart.dispose();
      const place = el("div", { class: "chart small-chart" });
      const visits = history.visits;
      const shown = history.ends[history.ends.length - 1];
      gw.fill(body,
        el("p", {}, el("a", { href: gw.link(run.id, "groups", {}) }, "‹ all groups"), " · ",
          el("a", { href: gw.link(run.id, "questions", params.held_out ? { part: "held_out" } : {}) }, "all questions")),
        el("div", { class: "group-head" },
          el("h2", {}, `${params.held_out ? "Held-out question" : "Row"} ${history.row}`),
          el("span", { class: "badge" }, history.status),
          el("span", { class: "quiet" },
            samples.plural(visits.length, params.held_out ? "evaluation" : "visit"))),
        el("div", { class: "prompt" }, samples.fold(history.prompt, { head: 800, tail: 300 })),
        place,
        visits.length > 2 && gw.source.live ? el("p", {}, samples.select("The first answers beside those of step",
          visits.slice(1).map(({ step }) => ({ name: step, title: String(step) })), shown.step, compare)) : null,
        el("div", { class: "then-and-now" }, ...history.ends.map((group, index) => {
          const largest = samples.largestAdvantage(group.samples);
          return el("section", { class: "group" },
            el("div", { class: "group-head" },
              el("h3", {}, `Step ${group.step}${index ? "" : ", the first time"}`),
              ...samples.summaryBadges(group.summary),
              params.held_out ? null : el("a", {
                href: gw.link(run.id, "group", { step: group.step, prompt: group.prompt_number }),
              }, "one picture")),
            el("div", { class: "answers" }, ...group.samples.map((sample) =>
              answer(run, group, sample, largest, ""))));
        })));
      const share = !history.value_name.startsWith("mean reward");
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
        setup: (instance) => instance.on("click", ({ dataIndex }) => gw.source.live && compare(visits[dataIndex].step)),
      });
    }
    load();
    return { update: load, dispose: () => chart && chart.dispose() };
  }

  gw.views.add({
    name: "groups",
    title: "Groups",
    order: 30,
    applies: (run) => samples.hasRollouts(run),
    render(element, run, params) {
      if (params.row !== undefined) return renderFollow(element, run, params);
      const asked = samples.latest();
      const toolbar = el("div", { class: "bar" });
      const filters = el("div", {});
      const body = el("div", { class: "groups" });
      element.append(toolbar, filters, body);
      const state = {
        step: samples.stepOf(run, params), filter: params.filter || "", sort: params.sort || "prompt",
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
      toolbar.append(picker.element, sort);
      if (gw.source.live) { // a report holds some groups only
        toolbar.append(el("label", { class: "field" }, search), el("label", { class: "field" }, everywhere, "in all steps"));
      }

      // Several filters may be on; each keeps fewer prompts.
      function filterChips(items) {
        const on = new Set(state.filter.split(",").filter(Boolean));
        const toggle = (name) => {
          if (name === "all") on.clear();
          else if (!on.delete(name)) on.add(name);
          load({ filter: [...on].join(","), page: 1 });
        };
        const box = samples.chips([{ name: "all", title: "All prompts" }, ...items], on.size ? "" : "all", toggle, "filter");
        for (const chip of box.children) {
          if (on.has(chip.dataset.name)) chip.setAttribute("aria-pressed", "true");
          if (on.has(chip.dataset.name)) chip.disabled = false;
        }
        return box;
      }

      function show(answer) {
        gw.fill(sort, samples.select("Sort", answer.sorts, state.sort, (by) => load({ sort: by, page: 1 })));
        if (answer.matches) return showMatches(answer);
        gw.fill(filters, filterChips(answer.filters));
        gw.fill(body, el("p", { class: "quiet", role: "status" }, answer.summary),
          answer.groups.map((group) => card(run, group, state.search)),
          answer.groups.length ? null : gw.noteBox("No prompt of this step is left by the filters and the search."),
          samples.pager(answer.page, answer.pages, (page) => load({ page })));
      }

      // Where a text occurs in the run, newest step first; older steps are searched on demand.
      function showMatches(answer) {
        gw.fill(filters);
        const list = el("ul", { class: "matches card" });
        const more = el("p", {});
        gw.fill(body, el("p", { class: "quiet", role: "status" }), list, more);
        const add = (part) => {
          gw.append(list, part.matches.map((match) => el("li", {},
            el("a", { href: gw.link(run.id, "group", { step: match.step, prompt: match.prompt_number }) },
              `step ${match.step}, prompt ${match.prompt_number}${match.sample === null ? "" : `, answer #${match.sample}`}`),
            el("span", { class: "sample-text" }, match.before, el("mark", {}, match.text), match.after))));
          const count = list.childElementCount;
          body.firstChild.textContent = `${samples.plural(count, "match", "matches")} in steps ${part.first} and later`;
          list.hidden = !count;
          gw.fill(more, part.older ? el("button", { type: "button", onclick: async (event) => {
            event.target.disabled = true;
            try {
              add(await gw.source.get(`run/${run.id}/groups`, { search: state.search, everywhere: "1", before: part.first }));
            } catch (error) {
              gw.fill(more, gw.errorBox(error.message));
            }
          } }, `search ${samples.plural(part.older, "older step")}`) : null);
        };
        add(answer);
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        const everywhere = state.search ? state.everywhere : "";
        const query = everywhere ? { search: state.search, everywhere } : { step: state.step, filter: state.filter,
          sort: state.sort === "prompt" ? "" : state.sort, search: state.search, page: state.page > 1 ? state.page : "" };
        gw.setParams({ step: state.step, filter: "", sort: "", search: "", everywhere: "", page: "", ...query });
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
