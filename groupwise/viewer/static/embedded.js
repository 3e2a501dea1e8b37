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

  gw.source = {
    live: false,
    report,
    start: report.start,
    has: (path, query) => keyOf(path, query) in report.answers,
    async get(path, query) {
      const answer = report.answers[keyOf(path, query)];
      if (answer === undefined) throw new Error("This report does not hold that part of the run; `groupwise view` shows all of it.");
      return resolve(answer);
    },
  };
})(window.gw);
