// One answer, token by token, coloured by one of four numbers.
(function () {
  "use strict";
  const el = gw.el;
  const samples = gw.samples;

  // `value` is what a token is coloured by; null where it was not recorded. Colours are strongest at
  // the largest value, or at `least`, so that rounding errors stay pale. A diverging scale has 0 in its middle.
  const MODES = [
    { name: "logp", title: "log-prob", hint: "log-probability under the policy before the update; a stronger colour is less likely",
      value: (token) => token.logp, low: "likely", high: "unlikely", least: 0.5 },
    { name: "ratio", title: "ratio to sampler", diverging: true,
      hint: "log of the policy's probability over the sampler's; 0 is equal, blue is more likely than when it was sampled",
      value: (token) => difference(token.logp, token.sampler_logp), least: 0.05 },
    { name: "entropy", title: "entropy", hint: "entropy of the next-token distribution, in nats; a stronger colour is less certain",
      value: (token) => token.entropy, low: "certain", high: "uncertain", least: 0.1 },
    { name: "kl", title: "KL to reference",
      hint: "estimate of the KL to the reference at this token (k3): exp(d) − d − 1 with d = log-prob of the reference − of the policy",
      value: (token) => kl(difference(token.ref_logp, token.logp)), low: "same", high: "far", least: 0.001 },
  ];

  function difference(one, other) {
    return one === null || one === undefined || other === null || other === undefined ? null : one - other;
  }

  function kl(d) {
    return d === null ? null : Math.expm1(Math.min(d, 50)) - d;
  }

  // The value at which colours are strongest: the 98th percentile, so that one extreme token does not pale the rest.
  function range(values, least) {
    const sizes = values.filter((value) => value !== null && Number.isFinite(value)).map(Math.abs).sort((a, b) => a - b);
    return sizes.length ? Math.max(least, sizes[Math.min(sizes.length - 1, Math.floor(sizes.length * 0.98))]) : 0;
  }

  function colour(node, value, mode, largest) {
    node.classList.remove("tone-up", "tone-down", "tone-level");
    const share = value === null || !largest ? 0 : Math.min(1, Math.abs(value) / largest);
    node.classList.add(mode.diverging ? (value > 0 ? "tone-up" : "tone-down") : "tone-level");
    node.style.setProperty("--tone", `${(75 * share).toFixed(1)}%`);
  }

  gw.views.add({
    name: "tokens",
    title: "Tokens",
    order: 50,
    applies: (run) => samples.hasRollouts(run),
    render(element, run, params) {
      const asked = samples.latest();
      const state = { step: params.step, prompt: params.prompt, sample: params.sample, mode: params.mode || "logp" };
      const body = el("div", { class: "tokens-view" });
      element.append(body);
      let chart = null;
      let shown = null;

      function details(tokens, index) {
        const token = tokens[index];
        const rows = [["token", token.text ? samples.visible(token.text) : "(no text)"], ["id", String(token.id)],
          ["position", `${index + 1} of ${tokens.length}`],
          ["log-prob", samples.number(token.logp, 4)], ["log-prob of the sampler", samples.number(token.sampler_logp, 4)],
          ["ratio to the sampler", ratio(token)], ["entropy", samples.number(token.entropy, 4)],
          ["KL to the reference", samples.number(MODES[3].value(token), 4)]];
        return el("dl", { class: "token-details" }, rows.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)]));
      }

      function ratio(token) {
        const d = difference(token.logp, token.sampler_logp);
        return d === null ? "–" : samples.number(Math.exp(d), 4);
      }

      // The answer's tokens as one element each; arrow keys move between them, and the details follow.
      function text(tokens, panel) {
        const box = el("div", { class: "tokens sample-text", tabindex: 0, role: "listbox", dir: "auto",
          "aria-label": "tokens of the answer; arrow keys move between them" });
        let current = -1;
        const nodes = tokens.map((token, index) => el("span", { class: "token", id: `token-${index}`, role: "option",
          dataset: { index } }, token.text || "∅"));
        const point = (index) => {
          if (index < 0 || index >= nodes.length) return;
          if (nodes[current]) nodes[current].classList.remove("current");
          current = index;
          nodes[index].classList.add("current");
          box.setAttribute("aria-activedescendant", `token-${index}`);
          gw.fill(panel, details(tokens, index));
          if (chart && chart.chart) chart.chart.dispatchAction({ type: "showTip", seriesIndex: 0, dataIndex: index });
        };
        box.addEventListener("pointerover", (event) => {
          const node = event.target.closest(".token");
          if (node) point(Number(node.dataset.index));
        });
        box.addEventListener("keydown", (event) => {
          const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
          if (!by) return;
          event.preventDefault();
          point(Math.max(0, Math.min(nodes.length - 1, current + by)));
          nodes[current].scrollIntoView({ block: "nearest" });
        });
        gw.append(box, nodes);
        if (!tokens.length) gw.append(box, el("span", { class: "quiet" }, "(no tokens)"));
        return { element: box, nodes, point };
      }

      function legend(mode, largest) {
        if (!largest) return el("p", { class: "quiet" }, "Not recorded for this answer" +
          (mode.name === "kl" ? ": the run has no reference model (loss.kl_coef is 0)." : "."));
        const ends = mode.diverging
          ? [`ratio ${samples.number(Math.exp(-largest), 3)}`, `ratio ${samples.number(Math.exp(largest), 3)}`]
          : mode.name === "logp" ? [`0 (${mode.low})`, `${samples.number(-largest, 3)} (${mode.high})`]
            : [`0 (${mode.low})`, `${samples.number(largest, 3)} (${mode.high})`];
        return el("div", { class: "scale-legend" }, el("span", { class: "label" }, mode.title), el("span", {}, ends[0]),
          el("span", { class: `scale ${mode.diverging ? "scale-advantage" : "scale-level"}` }), el("span", {}, ends[1]),
          el("span", { class: "quiet" }, mode.hint));
      }

      function paint() {
        const { answer, tokens, parts, key, place } = shown;
        const mode = MODES.find((one) => one.name === state.mode) || MODES[0];
        const values = tokens.map(mode.value);
        const largest = range(values, mode.least);
        parts.nodes.forEach((node, index) => colour(node, values[index], mode, largest));
        gw.fill(key, legend(mode, largest));
        for (const button of answer.querySelectorAll("[data-mode]")) {
          button.setAttribute("aria-pressed", String(button.dataset.mode === mode.name));
        }
        if (chart) chart.dispose();
        place.hidden = !largest || tokens.length < 2;
        chart = place.hidden ? null : gw.charts.add(place, () => ({
          grid: { top: 14, bottom: 22 },
          tooltip: { trigger: "axis", formatter: ([point]) => gw.charts.tip(`position ${point.dataIndex + 1}`,
            [{ name: samples.visible(tokens[point.dataIndex].text), value: samples.number(values[point.dataIndex], 4) }]) },
          xAxis: { type: "category", data: tokens.map((_, index) => index + 1), name: "position",
            nameLocation: "middle", nameGap: 22 },
          yAxis: { type: "value" },
          series: [{ type: "line", data: values, showSymbol: tokens.length < 60, symbolSize: 5, color: gw.charts.series(0) }],
        }), {
          lazy: false,
          label: `${mode.title} by position`,
          setup: (instance) => instance.on("click", ({ dataIndex }) => parts.point(dataIndex)),
        });
      }

      function show(result) {
        Object.assign(state, { step: result.step, prompt: result.prompt, sample: result.sample });
        gw.setParams({ step: state.step, prompt: state.prompt, sample: state.sample, mode: state.mode });
        const picker = samples.stepPicker(result.steps, result.step, (step) =>
          load({ step, prompt: undefined, sample: undefined }), "Step with tokens");
        const panel = el("aside", { class: "token-panel", "aria-live": "polite" },
          el("p", { class: "quiet" }, "Point at a token, or focus the text and use the arrow keys."));
        const parts = text(result.tokens, panel);
        const key = el("div", {});
        const place = el("div", { class: "chart small-chart" });
        const modes = el("div", { class: "choice", role: "group", "aria-label": "colour by" },
          MODES.map((mode) => el("button", { type: "button", class: "chip", title: mode.hint, dataset: { mode: mode.name },
            onclick: () => { state.mode = mode.name; gw.setParams({ mode: mode.name }); paint(); } }, mode.title)));
        const siblings = el("div", { class: "chips", role: "group", "aria-label": "answers" },
          result.siblings.map((one) => {
            const chip = el("button", { type: "button", class: "chip", "aria-pressed": String(one.sample === result.sample),
              dataset: { sample: one.sample }, onclick: () => load({ sample: one.sample }) },
            `#${one.sample}`, samples.tone(el("span", { class: "count" }, samples.signed(one.advantage)), one.advantage,
              samples.largestAdvantage(result.siblings)));
            return chip;
          }));
        const answer = el("div", {},
          el("div", { class: "bar" }, picker.element,
            samples.select("Prompt", result.prompts.map((one) => ({ name: one.prompt, title: `${one.prompt} (row ${one.row})` })),
              result.prompt, (prompt) => load({ prompt, sample: undefined }))),
          el("div", { class: "prompt" }, samples.fold(result.prompt_text, { head: 500, tail: 200 })),
          el("div", { class: "field-row" }, el("span", { class: "label" }, "Answer"), siblings),
          el("div", { class: "sample-facts" }, samples.facts(result.facts, samples.largestAdvantage(result.siblings))),
          el("div", { class: "field-row" }, el("span", { class: "label" }, "Colour by"), modes), key,
          el("div", { class: "tokens-and-panel" }, el("div", {}, parts.element, place), panel),
          el("p", {}, el("a", { href: gw.link(run.id, "group", { step: result.step, prompt: result.prompt }) },
            "this group as one picture")));
        shown = { answer, tokens: result.tokens, parts, key, place };
        gw.fill(body, answer);
        paint();
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        return samples.loading(body, asked, () => gw.source.get(`run/${run.id}/tokens`,
          { step: state.step, prompt: state.prompt, sample: state.sample }), (result) =>
          result.tokens ? show(result) : missing(result));
      }

      function missing(result) {
        if (chart) chart.dispose();
        chart = null;
        gw.fill(body, gw.noteBox(el("p", {}, result.missing), result.steps.length
          ? el("p", {}, "Steps with tokens: ", result.steps.slice(-40).map((step, index) => [index ? ", " : "",
            el("a", { href: gw.link(run.id, "tokens", { step }) }, String(step))]))
          : null));
      }

      load();
      return { dispose: () => chart && chart.dispose() };
    },
  });
})();
