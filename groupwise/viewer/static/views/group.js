// One group as one picture: each answer is a row, text that answers share is written once, and where they part each
// branch begins with the token that was chosen, coloured by the mean advantage of the answers that chose it.
(function () {
  "use strict";
  const el = gw.el;
  const { signed, number, tone, visible, plural, fold, grade, largestAdvantage, STOPS } = gw.samples;

  const MANY = 20; // rows from which each answer is one line until it is opened

  // The rows and columns of each node of the tree: a leaf takes one row, a branch those of its leaves. A root without
  // text, of answers that share nothing, has no place.
  function place(tree) {
    const cells = [];
    let rows = 0;
    let depth = 0;
    const visit = (node, level, parent) => {
      const cell = { node, level, parent, first: rows };
      depth = Math.max(depth, level);
      if (level >= 0) cells.push(cell);
      for (const child of node.children) visit(child, level + 1, node);
      if (!node.children.length) rows += 1;
      cell.last = rows;
    };
    visit(tree, tree.text || !tree.children.length ? 0 : -1, null);
    return { cells, rows, depth };
  }

  // The text of a branch: the chosen token, then what its answers still share, with the middle folded.
  function branchText(node, parent, compact) {
    const text = node.text;
    const choice = parent ? node.choice : "";
    const rest = text.slice(choice.length);
    const parts = [];
    if (parent) parts.push(el("b", { class: "token-choice", title: "where the answers part" }, visible(choice)));
    const side = compact ? 22 : 50; // characters on each side of what is folded
    if (rest) parts.push(fold(rest, { head: side, tail: side, brief: true }));
    return parts;
  }

  function leafText(node, parent) {
    const choice = parent ? node.choice : "";
    const rest = node.text.slice(choice.length);
    const parts = [];
    if (parent && !node.ends) parts.push(el("b", { class: "token-choice" }, visible(choice)));
    if (parent && node.ends) parts.push(el("b", { class: "token-choice end", title: "the answer ends here" }, "ends"));
    if (rest) parts.push(fold(rest, { head: 150, tail: 70, lines: 8 }));
    if (!parent && !node.text) parts.push(el("span", { class: "quiet" }, "(empty)"));
    return parts;
  }

  // The results of the answers of a leaf: identical answers are listed together.
  function verdict(node, samples, largest, open) {
    const members = node.samples.map((number) => samples[number]);
    const box = el("div", { class: "verdict" });
    const alike = new Map();
    for (const sample of members) {
      const key = JSON.stringify([sample.advantage, sample.reward, sample.grades, sample.why, sample.stop_reason]);
      alike.set(key, [...(alike.get(key) || []), sample]);
    }
    for (const same of alike.values()) {
      const sample = same[0];
      const line = el("div", { class: "verdict-line" },
        tone(el("span", { class: "advantage", title: "advantage" }, signed(sample.advantage)), sample.advantage,
          largest),
        same.length > 1 ? el("b", { class: "times", title: `${same.length} identical answers` }, `×${same.length}`)
          : null,
        el("span", { title: "reward" }, `r ${number(sample.reward)}`),
        ...Object.entries(sample.grades || {}).map(([name, value]) => grade(name, value)),
        sample.stop_reason === "length" ? el("span", { class: "badge cut" }, STOPS.length) : null,
        el("span", { class: "numbers quiet" }, ...same.flatMap((one, index) => [index ? " " : "", open(one)])));
      box.append(line);
      if (sample.why) box.append(el("div", { class: "why" }, sample.why));
    }
    return box;
  }

  function picture(group, open) {
    const samples = Object.fromEntries(group.samples.map((sample) => [sample.sample, sample]));
    const largest = largestAdvantage(group.samples);
    const { cells, rows, depth } = place(group.tree);
    const compact = rows > MANY;
    const grid = el("div", { class: `tree${compact ? " compact" : ""}`, role: "group",
      "aria-label": `${plural(group.samples.length, "answer")} as a tree` });
    grid.style.gridTemplateColumns = `repeat(${Math.max(1, depth)}, max-content) minmax(260px, 1fr) max-content`;
    const column = Math.max(1, depth) + 1; // of the last text cell
    for (const { node, level, parent, first, last } of cells) {
      const leaf = !node.children.length;
      const silent = node.samples.every((number) => samples[number].why);
      const cell = tone(el("div", { class: `node ${leaf ? "leaf" : "branch"}${silent ? " silent" : ""}`,
        dataset: { samples: node.samples.join(",") } }), node.advantage, largest);
      cell.style.gridRow = `${first + 1} / ${last + 1}`;
      cell.style.gridColumn = leaf ? `${level + 1} / ${column + 1}` : `${level + 1}`;
      const text = el("div", { class: "node-text" }, ...(leaf ? leafText(node, parent) : branchText(node, parent, compact)));
      cell.append(text);
      if (leaf) cell.style.minHeight = `${Math.min(96, 24 + 5 * node.samples.length)}px`; // taller for more answers
      if (leaf && compact) openOnClick(cell);
      if (!leaf) {
        cell.append(el("div", { class: "node-count" }, el("b", {}, `${node.samples.length}`),
          parent ? ` of ${parent.samples.length}` : " answers",
          el("span", { class: "node-mean", title: "mean advantage" }, `mean ${signed(node.advantage)}`)));
      }
      grid.append(cell);
      if (leaf) {
        const result = verdict(node, samples, largest, open);
        result.dataset.samples = cell.dataset.samples;
        result.style.gridRow = String(first + 1);
        result.style.gridColumn = String(column + 1);
        grid.append(result);
      }
    }
    grid.addEventListener("pointerover", (event) => point(grid, event.target.closest("[data-samples]")));
    grid.addEventListener("pointerleave", () => point(grid, null));
    return grid;
  }

  // A line that shows its complete text when it is pressed.
  function openOnClick(cell) {
    const toggle = () => cell.setAttribute("aria-expanded", String(cell.classList.toggle("open")));
    gw.samples.pressable(cell, toggle);
    cell.setAttribute("aria-expanded", "false");
  }

  // Pale what has no answer in common with what is pointed at: the path to it and its branches stand out.
  function point(grid, cell) {
    const wanted = new Set(cell ? cell.dataset.samples.split(",") : []);
    for (const one of grid.children) {
      one.classList.toggle("dim", wanted.size > 0 && !one.dataset.samples.split(",").some((name) => wanted.has(name)));
    }
  }

  // The choices that explain most of the advantages.
  function lesson(group) {
    const largest = largestAdvantage(group.samples);
    if (!group.forks.length) {
      return el("p", { class: "lesson" }, group.samples.every((sample) => !sample.advantage)
        ? "No answer has an advantage: no choice was reinforced here."
        : group.tree.children.length ? "No single choice explains much of the spread of advantages."
          : "All answers are identical.");
    }
    return el("ol", { class: "lesson" }, ...group.forks.map((fork) =>
      el("li", {},
        fork.before ? ["After ", el("q", {}, fork.before)] : "At the first token",
        `, ${Math.round(fork.share * 100)} % of the spread of advantages: `,
        ...fork.branches.flatMap((branch, index) => [
          index ? " · " : "",
          tone(el("b", { class: "token-choice" }, branch.ends ? "ends" : visible(branch.choice)), branch.advantage, largest),
          ` ${signed(branch.advantage)} (${branch.count})`,
        ]),
        fork.others ? ` · ${plural(fork.others, "more branch", "more branches")}` : "")));
  }

  function legend(largest) {
    return el("div", { class: "scale-legend" },
      el("span", { class: "label" }, "mean advantage"),
      el("span", {}, signed(-largest)), el("span", { class: "scale scale-advantage" }), el("span", {}, signed(largest)),
      el("span", { class: "scale-hatched silent" }), el("span", {}, "does not contribute"));
  }

  gw.views.add({
    name: "group",
    title: "One group",
    order: 40,
    applies: (run) => gw.samples.hasRollouts(run),
    render(element, run, params) {
      const asked = gw.samples.latest();
      const head = el("div", { class: "bar" });
      const body = el("div", { class: "group-view" });
      element.append(head, body);
      const state = { step: gw.samples.stepOf(run, params), prompt: Number(params.prompt) || 0 };
      let wanted = params.sample; // an answer that a link points at

      const picker = gw.samples.stepPicker(run.rollout_steps, state.step, (step) => load({ step }));
      const prompts = el("span", {});
      head.append(picker.element, prompts);

      function choosePrompt(by, group) {
        const place = group.prompts.indexOf(by);
        const button = (text, prompt, label) => el("button", { type: "button", title: label, "aria-label": label,
          disabled: prompt === undefined, onclick: () => load({ prompt }) }, text);
        gw.fill(prompts, el("span", { class: "step-picker", role: "group", "aria-label": "Prompt" },
          button("‹", group.prompts[place - 1], "previous prompt"),
          gw.samples.select("Prompt", group.prompts.map((name) => ({ name, title: String(name) })), by,
            (prompt) => load({ prompt: Number(prompt) })),
          button("›", group.prompts[place + 1], "next prompt")));
      }

      function show(group) {
        choosePrompt(state.prompt, group);
        const open = (sample) => group.token_samples.includes(sample.sample)
          ? el("a", { href: gw.link(run.id, "tokens", { step: state.step, prompt: state.prompt, sample: sample.sample }),
            title: `tokens of answer ${sample.sample}` }, `#${sample.sample}`)
          : el("span", {}, `#${sample.sample}`);
        gw.fill(body,
          el("div", { class: "group-head" },
            el("h2", {}, `Row ${group.row}`),
            ...gw.samples.summaryBadges(group.summary),
            el("a", { href: gw.link(run.id, "groups", { row: group.row }) }, "follow this prompt")),
          el("details", { class: "prompt", open: group.prompt.length < 400 ? "" : null },
            el("summary", {}, "Prompt"), fold(group.prompt, { head: 800, tail: 300 })),
          el("h3", {}, "Which choice paid"),
          lesson(group),
          legend(largestAdvantage(group.samples)),
          el("div", { class: "tree-scroll", tabindex: "0", role: "region", "aria-label": "answers as a tree" },
            picture(group, open)),
          el("p", { class: "quiet" }, group.by_tokens
            ? "Answers part at the token where they first differ."
            : "The tokens of these answers were not recorded; they part at the word where they first differ."));
        if (wanted === undefined) return;
        for (const leaf of body.querySelectorAll(".leaf")) {
          if (!leaf.dataset.samples.split(",").includes(wanted)) continue;
          leaf.classList.add("wanted");
          leaf.scrollIntoView({ block: "center" });
        }
      }

      function load(changes = {}) {
        if (changes.step !== undefined) state.prompt = 0;
        if (Object.keys(changes).length) wanted = undefined;
        Object.assign(state, changes);
        gw.setParams({ step: state.step, prompt: state.prompt, sample: wanted });
        return gw.samples.loading(body, asked, () =>
          gw.source.get(`run/${run.id}/group`, { step: state.step, prompt: state.prompt }), show);
      }
      load();
      return { update: (later) => picker.extend(later.rollout_steps) };
    },
  });
})();
