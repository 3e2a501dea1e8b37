/* What is wrong with a run, as `groupwise doctor` says it. */
"use strict";

(function (gw) {
  const steps = ([first, last]) => first === last ? `step ${gw.format.number(first)}` : `steps ${gw.format.number(first)} to ${gw.format.number(last)}`;

  gw.findingCard = function (run, finding) {
    const evidence = Object.entries(finding.evidence);
    return gw.el("article", {class: `card finding ${finding.severity}`, dataset: {finding: finding.name}},
      gw.el("h2", {}, gw.badge(finding.severity, finding.severity), ` ${finding.title} `, gw.el("span", {class: "quiet small"}, steps(finding.steps))),
      gw.el("p", {}, finding.message),
      evidence.length ? gw.el("dl", {class: "evidence"}, evidence.map(([name, value]) =>
        gw.el("div", {}, gw.el("dt", {}, name), gw.el("dd", {}, typeof value === "number" ? gw.format.number(value) : String(value))))) : null,
      finding.remedy ? gw.el("p", {}, gw.el("b", {}, "What to change: "), finding.remedy) : null,
      finding.settings.length ? gw.el("p", {class: "quiet small"}, "Settings now: ", finding.settings.map((name, index) =>
        [index ? ", " : "", gw.el("code", {}, `${name} = ${gw.format.setting(run.settings[name])}`)])) : null,
      finding.examples.length ? gw.el("p", {class: "small"}, "Examples: ", finding.examples.map((example, index) => [index ? " · " : "",
        gw.el("a", {href: gw.link(run.id, "group", {step: example.step, prompt: example.prompt_number, sample: example.sample})},
          `step ${example.step}, prompt ${example.prompt_number}, sample ${example.sample}`)])) : null);
  };

  gw.views.add({
    name: "findings", title: "Findings", order: 30,
    async badge(run) {
      const {findings} = await gw.source.get(`run/${run.id}/findings`);
      return findings.length ? gw.badge(String(findings.length), findings.some(one => one.severity === "error") ? "error" : "warning") : null;
    },
    async render(element, run) {
      async function draw(shown) {
        const {findings} = await gw.source.get(`run/${shown.id}/findings`);
        gw.fill(element, findings.length ? findings.map(finding => gw.findingCard(shown, finding))
          : gw.noteBox(gw.el("b", {}, "No findings. "), "None of the checks of ", gw.el("code", {}, "groupwise doctor"), ` found anything wrong up to step ${shown.step}.`));
      }
      await draw(run);
      return {update: draw};
    },
  });
})(window.gw);
