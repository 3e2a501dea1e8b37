// The answers to a prompt as a map: similar answers lie close together, one colour and shape per cluster.
(function () {
  "use strict";
  const el = gw.el;
  const samples = gw.samples;

  const SHAPES = ["circle", "rect", "triangle", "diamond", "roundRect", "pin", "arrow"];
  const PAUSE = 1200; // milliseconds between steps while it plays

  function clustered(run) {
    return samples.hasRollouts(run) && (run.settings["advantages.grouping"] === "similarity" ||
      run.settings.algorithm === "similarity_group_grpo");
  }

  gw.views.add({
    name: "clusters",
    title: "Clusters",
    order: 70,
    applies: clustered,
    render(element, run, params) {
      if (!clustered(run)) {
        gw.append(element, gw.noteBox("This run compares all answers to a prompt with each other; it has no clusters. ",
          "With algorithm = \"similarity_group_grpo\" only similar answers are compared."));
        return {};
      }
      const asked = samples.latest();
      const state = { step: samples.stepOf(run, params), prompt: Number(params.prompt) || 0 };
      const picker = samples.stepPicker(run.rollout_steps, state.step, (step) => load({ step }));
      const play = el("button", { type: "button", "aria-pressed": "false", onclick: () => toggle(timer === null) }, "▶ play");
      const prompts = el("span", {});
      const body = el("div", {});
      gw.append(element, [el("div", { class: "bar" }, picker.element, play, prompts), body]);
      let chart = null;
      let timer = null;

      function toggle(on) {
        clearInterval(timer);
        timer = on ? setInterval(() => picker.atEnd ? toggle(false) : picker.move(1), PAUSE) : null;
        if (on && picker.atEnd) { picker.go(run.rollout_steps[0]); load({ step: picker.step }); }
        play.textContent = on ? "❚❚ pause" : "▶ play";
        play.setAttribute("aria-pressed", String(on));
      }

      function draw(place, result, choose) {
        const rewards = result.points.map((point) => point.reward ?? 0);
        const [low, high] = [Math.min(...rewards), Math.max(...rewards)];
        const size = (reward) => 10 + 16 * (high > low ? ((reward ?? low) - low) / (high - low) : 0.5);
        const reach = 1.15 * Math.max(0.05, ...result.points.flatMap((point) => [Math.abs(point.x), Math.abs(point.y)]));
        return gw.charts.add(place, () => ({
          grid: { left: 8, right: 8, top: 34, bottom: 8, containLabel: false },
          legend: { top: 4, type: "scroll", itemWidth: 12, itemHeight: 12, textStyle: { color: gw.color("text") } },
          tooltip: { formatter: ({ data }) => {
            const point = data.point;
            return el("div", { class: "chart-tip map-tip" },
              el("div", { class: "tip-title" }, `#${point.sample} · cluster ${point.cluster}`),
              el("div", {}, `reward ${samples.number(point.reward)}, advantage ${samples.signed(point.advantage)}`),
              el("div", { class: "sample-text" }, point.completion.slice(0, 240)));
          } },
          xAxis: { type: "value", min: -reach, max: reach, axisLabel: { show: false }, splitNumber: 4 },
          yAxis: { type: "value", min: -reach, max: reach, axisLabel: { show: false }, splitNumber: 4 },
          series: result.clusters.map((cluster, index) => ({
            type: "scatter",
            name: `cluster ${cluster}`,
            symbol: SHAPES[index % SHAPES.length],
            color: gw.charts.series(index),
            itemStyle: { opacity: 0.8, borderColor: gw.color("surface"), borderWidth: 1 },
            data: result.points.filter((point) => point.cluster === cluster).map((point) => ({
              value: [point.x, point.y], symbolSize: size(point.reward), point })),
          })),
        }), {
          lazy: false,
          label: `map of ${samples.plural(result.points.length, "answer")} in ${samples.plural(result.clusters.length, "cluster")}`,
          setup: (instance) => instance.on("click", ({ data }) => choose(data.point)),
        });
      }

      function show(result) {
        gw.fill(prompts, samples.select("Prompt", result.prompts.map((one) => ({ name: one.prompt,
          title: `${one.prompt} (row ${one.row}): ${samples.plural(one.clusters, "cluster")}` })), result.prompt,
        (prompt) => load({ prompt: Number(prompt) })));
        const place = el("div", { class: "map" });
        const largest = samples.largestAdvantage(result.points);
        const lists = result.clusters.map((cluster, index) => {
          const members = result.points.filter((point) => point.cluster === cluster);
          return el("section", { class: "cluster", style: { "--cluster": gw.charts.series(index) } },
            el("h3", {}, `Cluster ${cluster}`, el("span", { class: "quiet" },
              ` ${samples.plural(members.length, "answer")}, mean reward ${samples.number(mean(members))}`)),
            members.map((point) => el("article", { class: "cluster-answer", dataset: { sample: point.sample } },
              el("div", { class: "sample-facts" },
                el("span", { class: "quiet" }, `#${point.sample}`),
                samples.tone(el("span", { class: "advantage" }, samples.signed(point.advantage)), point.advantage, largest),
                el("span", {}, `reward ${samples.number(point.reward)}`),
                point.why ? el("span", { class: "why" }, point.why) : null),
              samples.fold(point.completion, { head: 160, tail: 60 }))));
        });
        const list = el("div", { class: "cluster-list" }, lists);
        const choose = (point) => {
          for (const node of list.querySelectorAll(".chosen")) node.classList.remove("chosen");
          const node = list.querySelector(`[data-sample="${point.sample}"]`);
          node.classList.add("chosen");
          node.scrollIntoView({ block: "nearest" });
        };
        if (chart) chart.dispose();
        chart = null;
        gw.fill(body,
          el("div", { class: "prompt" }, samples.fold(result.prompt_text, { head: 400, tail: 160 })),
          el("div", { class: "map-and-list" },
            el("div", { class: "card" }, result.mapped ? place : el("p", { class: "quiet" },
              "This run recorded no positions of its answers; runs of this version of groupwise do."),
            result.mapped ? el("p", { class: "quiet small" },
              "Close answers are similar; the larger the mark, the higher the reward.") : null),
            list));
        if (result.mapped) chart = draw(place, result, choose);
      }

      function mean(points) {
        const rewards = points.map((point) => point.reward).filter((reward) => reward !== null);
        return rewards.length ? rewards.reduce((sum, reward) => sum + reward, 0) / rewards.length : null;
      }

      function load(changes = {}) {
        Object.assign(state, changes);
        gw.setParams({ step: state.step, prompt: state.prompt || "" });
        return samples.loading(body, asked, () =>
          gw.source.get(`run/${run.id}/clusters`, { step: state.step, prompt: state.prompt }), show);
      }
      load();
      return {
        update: (later) => picker.extend(later.rollout_steps),
        dispose() { toggle(false); if (chart) chart.dispose(); },
      };
    },
  });
})();
