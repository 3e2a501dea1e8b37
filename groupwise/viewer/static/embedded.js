/* The source of data in a report: the answers that its file holds. Parts that several answers have in common are stored
   once, as {"$": number}. It replaces the source of app.js. */
"use strict";

(function (gw) {
  const report = JSON.parse(document.getElementById("report").textContent);
  const resolved = new Map();

  function resolve(value) {
    if (value === null || typeof value !== "object") return value;
    if (Array.isArray(value)) return value.map(resolve);
    if ("$" in value) {
      if (!resolved.has(value.$)) resolved.set(value.$, resolve(report.shared[value.$]));
      return resolved.get(value.$);
    }
    return Object.fromEntries(Object.entries(value).map(([name, entry]) => [name, resolve(entry)]));
  }

  /** The key of an answer that holds what is asked for: all metrics are in one. */
  const keyOf = (path, query) => path.endsWith("/metrics") ? path : gw.answerKey(path, query);

  const has = (path, query) => keyOf(path, query) in report.answers;

  /** Choices that an answer offers, as far as the report holds what they lead to. */
  const offered = {
    groups: (answer, query, holds) => ({
      filters: answer.filters.filter(({name}) => name === query.filter || holds({filter: name, page: ""})),
      sorts: answer.sorts.filter(({name}) => name === "prompt" || name === query.sort || holds({sort: name, page: ""})),
      pages: answer.page === 1 && answer.pages > 1 && holds({page: 2}) ? 2 : answer.page,
    }),
    group: (answer, query, holds) => ({prompts: answer.prompts.filter(prompt => holds({prompt}))}),
    clusters: (answer, query, holds) => ({prompts: answer.prompts.filter(({prompt}) => holds({prompt}))}),
    pairs: (answer, query, holds) => ({pages: answer.page === answer.pages || holds({page: answer.page + 1}) ? answer.pages : answer.page}),
    questions: (answer, query, holds) => ({
      statuses: answer.statuses.filter(({name}) => name === "all" || holds({part: answer.part, status: name, page: ""})),
      sorts: answer.sorts.slice(0, 1), pages: answer.page,
    }),
    tokens: (answer, query, holds) => ({
      steps: answer.steps.filter(step => holds({step, prompt: "", sample: ""})),
      ...answer.siblings ? {siblings: answer.siblings.filter(({sample}) => sample === answer.sample || holds({step: answer.step, prompt: answer.prompt, sample}))} : {},
    }),
  };

  gw.source = {
    live: false,
    report,
    start: report.start,
    has,
    async get(path, query) {
      const packed = report.answers[keyOf(path, query)];
      if (packed === undefined) throw new Error("This report does not hold that part of the run; `groupwise view` shows all of it.");
      const answer = resolve(packed);
      const offers = offered[path.split("/")[2]];
      return offers ? {...answer, ...offers(answer, query || {}, other => has(path, {...query, ...other}))} : answer;
    },
  };
})(window.gw);
