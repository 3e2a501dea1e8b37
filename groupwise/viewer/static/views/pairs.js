// Preference pairs: what was preferred to what, side by side, with the words marked in which they differ.
(function () {
  "use strict";
  const el = gw.el;
  const samples = gw.samples;

  function hasPairs(run) {
    return Boolean(run.settings["preference.weight"]) && run.settings["preference.pairs"] !== "data" &&
      samples.hasRollouts(run);
  }

  function side(role, sample, largest) {
    return el("article", { class: `answer pair-${role}`, dataset: { sample: sample.sample } },
      el("div", { class: "answer-number quiet" }, role === "chosen" ? "✓ chosen" : "✗ rejected", ` #${sample.sample}`),
      samples.facts({ ...sample, pair: null }, largest),
      el("div", { class: "sample-text", dir: "auto" }, sample.segments.length
        ? sample.segments.map(([text, differs]) => differs
          ? el(role === "chosen" ? "ins" : "del", {}, text.trim() ? text : samples.visible(text)) : folded(text))
        : el("span", { class: "quiet" }, "(empty)")));
  }

  function folded(text) {
    return text.length > 400 ? samples.fold(text, { head: 120, tail: 120 }) : text;
  }

  gw.views.add({
    name: "pairs",
    title: "Pairs",
    order: 80,
    applies: hasPairs,
    render(element, run, params) {
      if (!hasPairs(run)) {
        gw.append(element, gw.noteBox(run.settings["preference.weight"]
          ? "This run learns from the pairs of a data set (preference.pairs = \"data\"), which it does not record."
          : "This run does not learn from preferences (preference.weight is 0)."));
        return {};
      }
      const asked = samples.latest();
      const state = { step: samples.stepOf(run, params), page: Number(params.page) || 1 };
      const picker = samples.stepPicker(run.rollout_steps, state.step, (step) => load({ step, page: 1 }));
      const body = el("div", {});
      gw.append(element, [el("div", { class: "bar" }, picker.element), body]);

      function show(result) {
        gw.fill(body,
          el("p", { class: "quiet", role: "status" }, result.summary),
          result.pairs.map((pair, index) => {
            const again = index > 0 && result.pairs[index - 1].prompt_number === pair.prompt_number;
            const largest = samples.largestAdvantage([pair.chosen, pair.rejected]);
            return el("section", { class: "group pair", dataset: { prompt: pair.prompt_number } },
              el("div", { class: "group-head" },
                el("h3", {}, `Prompt ${pair.prompt_number}`),
                el("span", { class: "quiet" }, `row ${pair.row}`),
                gw.badge(`margin ${samples.number(pair.margin)}`, "", "reward of the chosen less that of the rejected answer"),
                el("a", { href: gw.link(run.id, "group", { step: result.step, prompt: pair.prompt_number }) }, "one picture")),
              again ? null : el("div", { class: "prompt" }, samples.fold(pair.prompt, { head: 400, tail: 160 })),
              el("div", { class: "sides" }, side("chosen", pair.chosen, largest), side("rejected", pair.rejected, largest)));
          }),
          samples.pager(result.page, result.pages, (page) => load({ page })));
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        const query = { step: state.step, page: state.page > 1 ? state.page : "" };
        gw.setParams(query);
        return samples.loading(body, asked, () => gw.source.get(`run/${run.id}/pairs`, query), show);
      }
      load();
      return { update: (later) => picker.extend(later.rollout_steps) };
    },
  });
})();
