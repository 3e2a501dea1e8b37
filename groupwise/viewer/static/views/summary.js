/* The run on one page: what was trained, before and after, findings, main curves, samples. A report opens with it. */
"use strict";

(function (gw) {
  const el = gw.el;
  const SHOWN = 1500; // characters of a text

  const section = (title, ...children) => el("section", {class: "card summary-part"}, el("h2", {}, title), ...children);
  const pValue = value => value < 0.001 ? "p < 0.001" : `p = ${value.toFixed(3)}`;
  const formatter = metric => value => metric.is_share ? gw.format.percent(value) : gw.format.number(value);

  function measured(metric, measurement) {
    if (!measurement) return "–";
    const show = formatter(metric);
    const bounds = measurement.low === null ? null
      : el("span", {class: "quiet interval"}, ` [${show(measurement.low)}, ${show(measurement.high)}]`);
    return el("span", {}, el("b", {}, show(measurement.value)), bounds);
  }

  function text(content) {
    if (!content) return el("div", {class: "sample-text quiet"}, "(empty)");
    const cut = content.length > SHOWN ? `${content.slice(0, SHOWN)} … (${gw.format.number(content.length - SHOWN)} more characters)` : content;
    return el("div", {class: "sample-text", dir: "auto"}, cut);
  }

  // ---------------------------------------------------------------- the parts

  function headline(summary) {
    const tile = (label, value, note) => el("div", {class: "tile"}, el("div", {class: "quiet small"}, label),
      el("div", {class: "tile-value"}, value), note ? el("div", {class: "quiet small"}, note) : null);
    const tiles = [];
    const main = summary.held_out[0];
    if (main) {
      const show = formatter(main);
      const value = main.first.step === main.last.step ? show(main.last.value)
        : [show(main.first.value), el("span", {class: "quiet"}, " → "), show(main.last.value)];
      const note = [`held out, step ${main.first.step} → ${main.last.step}`, summary.paired ? pValue(summary.paired.p_value) : null];
      tiles.push(tile(main.name, value, note.filter(Boolean).join(", ")));
    }
    const reward = summary.curves.find(curve => curve.name === "reward");
    if (reward) tiles.push(tile("reward in training", [gw.format.number(reward.start, 3), el("span", {class: "quiet"}, " → "),
      gw.format.number(reward.end, 3)], "first and last tenth of the steps"));
    tiles.push(tile("steps", gw.format.number(summary.step), summary.total_steps ? `of ${gw.format.number(summary.total_steps)}, ${summary.status}` : summary.status));
    if (summary.time) tiles.push(tile("time", gw.format.duration(summary.time.seconds),
      summary.time.tokens ? `${gw.format.short(summary.time.tokens)} tokens sampled` : "in steps"));
    const errors = summary.findings.filter(finding => finding.severity === "error").length;
    const warnings = summary.findings.length - errors;
    tiles.push(tile("findings", summary.findings.length ? gw.format.number(summary.findings.length) : "none",
      summary.findings.length ? [errors ? `${errors} error${errors > 1 ? "s" : ""}` : "", warnings ? `${warnings} warning${warnings > 1 ? "s" : ""}` : ""].filter(Boolean).join(", ") : "of groupwise doctor"));
    return el("div", {class: "tiles"}, tiles);
  }

  function findings(run, list) {
    if (!list.length) return null;
    return section("Findings", list.map(finding => gw.findingCard(run, finding)));
  }

  function heldOut(summary) {
    if (!summary.held_out.length) return null;
    const best = summary.held_out.some(metric => metric.best && metric.best.step !== metric.last.step);
    const step = measurement => measurement ? el("span", {class: "quiet small"}, ` step ${measurement.step}`) : null;
    const column = (title, key) => ({title, numeric: true, value: metric => el("span", {}, measured(metric, metric[key]), step(metric[key]))});
    return section("Before and after",
      gw.table([{title: "held out", value: metric => metric.name}, column("first evaluation", "first"),
        column("last evaluation", "last"), ...(best ? [column("exported model", "best")] : [])], summary.held_out, {label: "held-out metrics"}),
      el("p", {class: "quiet small"}, "In brackets: 95 % confidence intervals."), paired(summary.paired));
  }

  function paired(change) {
    if (!change) return null;
    const same = change.questions - change.gained - change.lost;
    const signed = value => gw.format.signed(value, 3);
    const parts = [["improved", change.gained, "gained"], ["as before", same, "same"], ["got worse", change.lost, "lost"]];
    return el("div", {},
      el("p", {}, `The same ${gw.format.number(change.questions)} questions after step ${change.first_step} and after step ${change.last_step}: `,
        `${change.metric} changed by ${signed(change.difference.estimate)} [${signed(change.difference.low)}, ${signed(change.difference.high)}]; `,
        `${change.test} gives ${pValue(change.p_value)}.`),
      el("div", {class: "share-bar", role: "img", "aria-label": parts.map(([label, count]) => `${count} ${label}`).join(", ")},
        parts.filter(([, count]) => count).map(([label, count, kind]) => el("span", {class: `share-${kind}`, style: {"flex-grow": count}, title: `${count} ${label}`},
          `${gw.format.number(count)} ${label}`))),
      [["Learnt", change.gained_examples], ["Lost", change.lost_examples]].map(([title, examples]) => examples.length
        ? el("details", {class: "examples", open: title === "Learnt"}, el("summary", {}, `${title}: ${examples.length === 1 ? "a question" : `${examples.length} questions`} before and after`),
          examples.map(example => el("div", {class: "before-after"},
            el("div", {class: "prompt"}, text(example.prompt)),
            el("div", {}, el("h3", {}, `Step ${change.first_step}`), text(example.before)),
            el("div", {}, el("h3", {}, `Step ${change.last_step}`), text(example.after))))) : null));
  }

  function samples(run, entries) {
    const card = (row, kind) => {
      const rewards = Object.entries(row).filter(([name]) => name.startsWith("reward/"));
      return el("article", {class: `summary-sample edge-${kind}`},
        el("div", {class: "sample-facts"},
          gw.badge(`reward ${gw.format.number(row.reward, 3)}`, kind === "best" ? "good" : "bad"),
          row.advantage === null || row.advantage === undefined ? null : gw.badge(`advantage ${gw.format.signed(row.advantage, 3)}`),
          rewards.length > 1 ? rewards.map(([name, value]) => el("span", {class: "quiet small"}, `${name.slice(7)} ${gw.format.number(value, 3)}`)) : null,
          row.stop_reason === "length" ? gw.badge("cut off", "warning") : null,
          el("a", {class: "small", href: gw.link(run.id, "group", {step: row.step, prompt: row.prompt_number})},
            `prompt ${row.prompt_number}, sample ${row.sample}`)),
        el("div", {class: "prompt"}, text(row.prompt)), text(row.completion));
    };
    return [...entries].reverse().map(entry => section(`Samples of step ${gw.format.number(entry.step)}`,
      el("div", {class: "best-and-worst"}, [["Highest reward", "best"], ["Lowest reward", "worst"]].map(([title, kind]) =>
        el("div", {}, el("h3", {}, title), entry[kind].map(row => card(row, kind)))))));
  }

  function curveNumbers(curves) {
    if (!curves.length) return null;
    const at = ([step, value]) => el("span", {}, gw.format.number(value), el("span", {class: "quiet small"}, ` step ${step}`));
    return section("Curves in numbers", gw.table([
      {title: "metric", value: curve => el("code", {title: curve.meaning}, curve.name)},
      {title: "at the start", numeric: true, value: curve => gw.format.number(curve.start), hint: "mean of the first tenth of the steps"},
      {title: "at the end", numeric: true, value: curve => gw.format.number(curve.end), hint: "mean of the last tenth of the steps"},
      {title: "lowest", numeric: true, value: curve => at(curve.lowest)},
      {title: "highest", numeric: true, value: curve => at(curve.highest)},
    ], curves, {label: "curves in numbers"}));
  }

  const STATUSES = {always: "always right", learnt: "learnt", between: "in between", forgotten: "forgotten", never: "never solved", unseen: "unseen"};

  function questions(counts) {
    if (!counts) return null;
    const list = (title, rows, total) => rows.length
      ? el("p", {class: "quiet small"}, `Rows that were ${title}: ${rows.join(", ")}${total > rows.length ? ", …" : ""}`) : null;
    return section("Training questions", el("p", {}, Object.entries(counts.counts).map(([status, count]) =>
      gw.badge(`${gw.format.number(count)} ${STATUSES[status] || status}`, {learnt: "good", forgotten: "bad"}[status]))),
      list("learnt", counts.learnt, counts.counts.learnt), list("forgotten", counts.forgotten, counts.counts.forgotten));
  }

  function details(summary) {
    const stages = summary.time ? Object.entries(summary.time.stages) : [];
    return [
      stages.length ? section("Time", gw.table([
        {title: "stage", value: ([name]) => name},
        {title: "time", numeric: true, value: ([, seconds]) => gw.format.duration(seconds)},
        {title: "share", numeric: true, value: ([, seconds]) => gw.format.percent(seconds / summary.time.seconds)},
      ], stages), summary.time.memory === null ? null : el("p", {class: "quiet small"}, `Peak memory: ${summary.time.memory.toFixed(2)} GiB`)) : null,
      section("What was trained", gw.table([{title: "", value: ([name]) => name}, {title: "", value: ([, value]) => value}], Object.entries(summary.facts), {label: "facts"})),
      summary.settings.length ? section("Settings that differ from the defaults", gw.table([
        {title: "setting", value: ([name]) => el("code", {}, name)},
        {title: "value", value: ([, , value]) => el("code", {}, gw.format.setting(value))},
        {title: "default", value: ([, value]) => el("code", {class: "quiet"}, gw.format.setting(value))},
      ], summary.settings, {label: "settings"})) : null,
    ];
  }

  // ---------------------------------------------------------------- the page

  function reportNote() {
    const report = gw.source.report;
    if (!report) return null;
    return el("footer", {class: "quiet small"}, `Written by groupwise ${report.version}, ${report.made}. This file holds all that it shows and requests nothing.`,
      report.left_out.length ? ` Left out: ${report.left_out.join("; ")}. \`groupwise view\` shows everything.` : "");
  }

  gw.views.add({
    name: "summary", title: "Summary", order: gw.source.live ? 25 : 0,
    async render(element, run) {
      const [above, charts, below] = [el("div"), el("div", {class: "summary-curves"}), el("div")];
      const load = async () => {
        const {sections} = await gw.source.get(`run/${run.id}/curves`);
        return {sections: sections.slice(0, 1)};
      };
      async function draw(current) {
        const summary = await gw.source.get(`run/${current.id}/summary`);
        gw.fill(above, headline(summary), findings(current, summary.findings));
        gw.fill(below, heldOut(summary), samples(current, summary.samples), questions(summary.questions),
          curveNumbers(summary.curves), details(summary), reportNote());
      }
      gw.fill(element, above, charts, below);
      await draw(run);
      const curves = await gw.curves.mount(charts, {runs: [run], load, params: {}, lazy: false});
      return {
        update: current => Promise.all([draw(current), curves.update([current])]),
        dispose: curves.dispose,
      };
    },
  });
})(window.gw);
