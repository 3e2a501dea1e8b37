// Parts that the views on samples share: a step's slider, chips, folded texts, and colours for advantages.
(function () {
  "use strict";
  const el = gw.el;

  const STOPS = { eos: "end of text", stop_string: "stop string", length: "truncated" };

  function number(value, digits = 3) {
    if (!isNumber(value) || Number.isNaN(value)) return "–";
    if (Number.isInteger(value)) return value.toLocaleString("en");
    const size = Math.abs(value);
    if (size >= 1e5 || size < 1e-4) return value.toExponential(1);
    return String(Number(value.toPrecision(digits)));
  }

  function isNumber(value) {
    return value !== null && value !== undefined;
  }

  // A number with its sign, at a fixed width, so that columns of advantages line up.
  function signed(value, digits = 2) {
    if (!isNumber(value)) return "–";
    const text = Math.abs(value).toFixed(digits);
    return Number(text) === 0 ? text : (value > 0 ? "+" : "−") + text;
  }

  // Colour an element by an advantage: orange above 0, blue below, stronger the further from it.
  function tone(node, advantage, largest) {
    const share = advantage && largest ? Math.min(1, Math.abs(advantage) / largest) : 0;
    node.classList.add("tone", share < 0.01 ? "tone-none" : advantage > 0 ? "tone-up" : "tone-down");
    node.style.setProperty("--tone", (share < 0.01 ? 0 : 8 + 34 * share).toFixed(0) + "%");
    return node;
  }

  function largestAdvantage(samples) {
    return Math.max(1e-9, ...samples.map((sample) => Math.abs(sample.advantage || 0)));
  }

  // Spaces and line ends of a short piece of text, made visible.
  function visible(text) {
    return text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/^ | $/g, "␣") || "∅";
  }

  function plural(count, word, words = `${word}s`) {
    return `${count.toLocaleString("en")} ${count === 1 ? word : words}`;
  }

  // A text whose middle is left out until the button is pressed. If `unsent` characters
  // are missing, `load` fetches the full text.
  function fold(text, options = {}) {
    const { unsent = 0, load = null, brief = false, lines = 24 } = options;
    let { head = 280, tail = 120 } = options;
    const ends = [...text.matchAll(/\n/g)].map((match) => match.index);
    if (ends.length > lines) { // short lines fill the page as well
      head = Math.min(head, ends[Math.ceil(lines / 2)]);
      tail = Math.min(tail, text.length - ends[ends.length - Math.floor(lines / 4)]);
    }
    const box = el("div", { class: "sample-text", dir: "auto" });
    const full = (content) => box.replaceChildren(content || el("span", { class: "quiet" }, "(empty)"));
    if (!unsent && text.length <= head + tail + (brief ? 8 : 60)) {
      full(text);
      return box;
    }
    const cut = unsent ? [text, ""] : [text.slice(0, head), text.slice(text.length - tail)];
    const hidden = unsent || text.length - head - tail;
    const words = plural(hidden, "more character");
    const more = el("button", { class: "fold", type: "button", title: `show ${words}` }, brief ? "…" : `… ${words} …`);
    more.addEventListener("click", async (event) => {
      event.stopPropagation();
      more.disabled = true;
      try {
        full(load ? await load() : text);
      } catch (error) {
        box.append(gw.errorBox(error.message));
      }
    });
    box.append(cut[0], more, cut[1]);
    return box;
  }

  // A slider, a number and arrows over the recorded steps. `pick` is called with the chosen step.
  function stepPicker(steps, step, pick, label = "Step") {
    let place = Math.max(0, steps.indexOf(step));
    const slider = el("input", { type: "range", min: 0, max: Math.max(0, steps.length - 1), value: place,
      "aria-label": label, class: "step-slider" });
    const field = el("input", { type: "number", min: steps[0], max: steps[steps.length - 1], value: step,
      "aria-label": `${label} number`, class: "step-number" });
    const back = el("button", { type: "button", title: "previous step", "aria-label": "previous step" }, "‹");
    const forth = el("button", { type: "button", title: "next step", "aria-label": "next step" }, "›");
    const total = el("span", { class: "quiet" });
    const box = el("div", { class: "step-picker", role: "group", "aria-label": label },
      el("span", { class: "label" }, label), back, slider, forth, field, total);
    let timer = null;
    const show = () => {
      slider.value = place;
      field.value = steps[place];
      slider.setAttribute("aria-valuetext", `step ${steps[place]}`);
      back.disabled = place === 0;
      forth.disabled = place === steps.length - 1;
      total.textContent = `of ${steps[steps.length - 1]}`;
    };
    const move = (to, wait = 0) => {
      to = Math.min(steps.length - 1, Math.max(0, to));
      if (to === place) return show();
      place = to;
      show();
      clearTimeout(timer);
      timer = setTimeout(() => pick(steps[place]), wait);
    };
    const nearest = (wanted) =>
      steps.reduce((best, one, index) => (Math.abs(one - wanted) < Math.abs(steps[best] - wanted) ? index : best), 0);
    slider.addEventListener("input", () => move(Number(slider.value), 120));
    field.addEventListener("change", () => move(nearest(Number(field.value))));
    back.addEventListener("click", () => move(place - 1));
    forth.addEventListener("click", () => move(place + 1));
    show();
    return {
      element: box,
      get step() { return steps[place]; },
      get atEnd() { return place === steps.length - 1; },
      move: (by) => move(place + by),
      go: (wanted) => { place = nearest(wanted); show(); },
      extend(later) { // the steps of a run that has gone on, or was resumed at an earlier step
        const current = steps[place];
        if (!later.length) return;
        steps = later;
        slider.max = String(steps.length - 1);
        field.max = String(steps[steps.length - 1]);
        place = steps.includes(current) ? steps.indexOf(current) : steps.length - 1;
        show();
      },
    };
  }

  // Buttons of which one is chosen: [{name, title, count, hint}].
  function chips(items, chosen, pick, label) {
    const box = el("div", { class: "chips", role: "group", "aria-label": label });
    for (const item of items) {
      const chip = el("button", { type: "button", class: "chip", title: item.hint || "", "data-name": item.name,
        "aria-pressed": String(item.name === chosen) }, item.title,
      item.count === undefined ? null : el("span", { class: "count" }, item.count.toLocaleString("en")));
      chip.disabled = item.count === 0 && item.name !== chosen;
      chip.addEventListener("click", () => pick(item.name));
      box.append(chip);
    }
    return box;
  }

  function select(label, items, chosen, pick) {
    const field = el("select", { "aria-label": label });
    for (const item of items) {
      const option = el("option", { value: item.name }, item.title);
      option.selected = String(item.name) === String(chosen);
      field.append(option);
    }
    field.addEventListener("change", () => pick(field.value));
    return el("label", { class: "field" }, el("span", { class: "label" }, label), field);
  }

  // Right, wrong, or no answer found: in words and a sign, not in colour alone.
  function grade(name, value) {
    const [sign, kind, words] = value === true ? ["✓", "right", "right"]
      : value === false ? ["✗", "wrong", "wrong"] : ["?", "missing", "no answer found"];
    return el("span", { class: `badge grade-${kind}`, title: `${name}: ${words}` },
      `${sign} ${value === null ? words : name}`);
  }

  // Everything known about one answer except its text.
  function facts(sample, largest) {
    const { advantage, reward } = sample; // held-out answers have no advantage, and may have no reward
    const line = el("div", { class: "sample-facts" },
      isNumber(advantage)
        ? tone(el("span", { class: "advantage", title: "advantage" }, signed(advantage)), advantage, largest) : null,
      isNumber(reward) || isNumber(advantage)
        ? el("span", { class: "reward", title: "reward, the weighted sum" }, `reward ${number(reward)}`) : null);
    for (const [name, value] of Object.entries(sample.grades || {})) line.append(grade(name, value));
    if (sample.pair) line.append(el("span", { class: "badge" }, sample.pair));
    const details = el("div", { class: "sample-facts quiet" },
      el("span", { class: sample.stop_reason === "length" ? "badge cut" : "" },
        `${plural(sample.completion_tokens || 0, "token")}, ${STOPS[sample.stop_reason] || sample.stop_reason || ""}`));
    if (isNumber(sample.cluster)) {
      details.append(el("span", {}, `cluster ${sample.cluster}`));
    }
    const rewards = Object.entries(sample.rewards || {});
    const parts = rewards.length > 1 || (rewards.length && rewards[0][1] !== sample.reward)
      ? el("div", { class: "sample-facts quiet" }, ...rewards.map(([name, value]) =>
        el("span", { title: `reward function ${name}, unweighted` }, `${name} ${number(value)}`)))
      : null;
    const why = sample.why ? el("div", { class: "why" }, sample.why) : null;
    return [line, parts, details, why].filter(Boolean);
  }

  // Let an element be pressed by pointer and keyboard. Its text can still be selected, and what is in it pressed.
  function pressable(node, press) {
    node.tabIndex = 0;
    node.setAttribute("role", "button");
    node.addEventListener("click", (event) => {
      if (!event.target.closest("a, button") && getSelection().isCollapsed) press();
    });
    node.addEventListener("keydown", (event) => {
      if (event.target !== node || !["Enter", " "].includes(event.key)) return;
      event.preventDefault();
      press();
    });
  }

  // A page's place in a list: « 2 of 14 ».
  function pager(page, pages, pick) {
    if (pages <= 1) return null;
    const button = (text, to, label) => {
      const node = el("button", { type: "button", "aria-label": label, title: label }, text);
      node.disabled = to < 1 || to > pages;
      node.addEventListener("click", () => pick(to));
      return node;
    };
    return el("div", { class: "pager", role: "navigation", "aria-label": "pages" },
      button("«", page > 1 ? 1 : 0, "first page"), button("‹", page - 1, "previous page"),
      el("span", {}, `page ${page} of ${pages}`),
      button("›", page + 1, "next page"), button("»", page < pages ? pages : 0, "last page"));
  }

  // Answers may come back in another order than they were asked for; only the last question counts.
  function latest() {
    let turn = 0;
    return async (work, show) => {
      const mine = ++turn;
      const result = await work();
      if (mine === turn) show(result);
    };
  }

  function hasRollouts(run) {
    return run.rollout_steps.length > 0;
  }

  // The step that the address asks for, or the last one.
  function stepOf(run, params) {
    const step = Number(params.step);
    return params.step !== undefined && Number.isInteger(step) ? step : run.rollout_steps[run.rollout_steps.length - 1];
  }

  function summaryBadges(summary) {
    const badges = isNumber(summary.mean)
      ? [gw.badge(`mean reward ${number(summary.mean)}`, "", `standard deviation ${number(summary.spread)}`)] : [];
    if (isNumber(summary.right)) {
      badges.push(gw.badge(`${summary.right} of ${summary.samples} right`));
    }
    for (const [name, words] of [["no_answer", "without an answer"], ["truncated", "truncated"]]) {
      if (summary[name]) badges.push(gw.badge(`${summary[name]} ${words}`, "warning"));
    }
    if (isNumber(summary.contributing)) {
      badges.push(gw.badge(`${summary.contributing} of ${summary.samples} contribute`,
        summary.contributing ? "" : "warning", "answers with a learning signal"));
    }
    return badges;
  }

  // Ask for data and show it; what is on the page stays, paler, until the answer is there.
  async function loading(body, asked, work, show) {
    body.classList.add("waiting");
    if (!body.hasChildNodes()) gw.fill(body, gw.loading());
    try {
      await asked(work, (result) => {
        body.classList.remove("waiting");
        show(result);
      });
    } catch (error) {
      body.classList.remove("waiting");
      gw.fill(body, gw.errorBox(error.message));
    }
  }

  gw.samples = { number, signed, tone, largestAdvantage, visible, plural, fold, stepPicker, chips, select, grade, facts,
    pager, latest, loading, pressable, hasRollouts, stepOf, summaryBadges, STOPS };
})();
