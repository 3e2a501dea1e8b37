/* The shell of the page: elements, formats, the source of data, the router, live updates. All names are in `gw`.

A view is a file in views/ that calls
  gw.views.add({name: "curves", title: "Curves", order: 20, applies: run => true, render(element, run, params) {…}})
`render` fills the element and returns (or promises) {update(run), navigate(params), dispose()}, each optional:
`badge(run)`, optional, promises an element for the view's tab. `update` is called when a live run has changed, `navigate` when the hash has other parameters (without it the view is
rendered again), `dispose` before the element is emptied. Views of a run have the route #/run/ID/NAME?step=3; with
`top: true` a view has the route #/NAME and gets null for the run. Data goes into elements as text, never as HTML. */
"use strict";

window.gw = {};

(function (gw) {
  // ---------------------------------------------------------------- elements

  /** An element. Attributes: class, text, title, any other; on… are listeners, style and dataset are objects.
      Children are elements, texts or lists of them; null and false are left out. */
  gw.el = function (tag, attributes, ...children) {
    const element = document.createElement(tag);
    for (const [name, value] of Object.entries(attributes || {})) {
      if (value === null || value === undefined || value === false) continue;
      if (name === "class") element.className = value;
      else if (name === "text") element.textContent = value;
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (name === "style") for (const [key, entry] of Object.entries(value)) element.style.setProperty(key, entry);
      else if (name === "dataset") Object.assign(element.dataset, value);
      else if (name === "value" || name === "checked") element[name] = value;
      else element.setAttribute(name, value === true ? "" : value);
    }
    gw.append(element, children);
    return element;
  };

  gw.append = function (element, children) {
    for (const child of [children].flat(Infinity)) {
      if (child === null || child === undefined || child === false) continue;
      element.append(child instanceof Node ? child : String(child));
    }
    return element;
  };

  /** Replaces all that is in an element. */
  gw.fill = function (element, ...children) {
    element.replaceChildren();
    return gw.append(element, children);
  };

  gw.errorBox = message => gw.el("div", {class: "box error", role: "alert"}, message);
  gw.noteBox = (...children) => gw.el("div", {class: "box"}, ...children);
  gw.badge = (text, kind, title) => gw.el("span", {class: `badge ${kind || ""}`, title}, text);
  /** Task, model and algorithm of a run; of a path, which may be long, its last part. */
  gw.facts = run => [run.task, run.model, run.algorithm].filter(Boolean)
    .map(text => /^(~|\.{0,2})[/\\]|^[a-z]:\\/i.test(text) ? text.split(/[/\\]/).filter(Boolean).pop() : text).join(" · ");
  gw.loading = () => gw.el("p", {class: "quiet loading", role: "status"}, "Loading…");

  /** A table. Columns: {title, value(row) → text or element, numeric, hint, sort(row) → number or text, class}. */
  gw.table = function (columns, rows, options = {}) {
    const body = gw.el("tbody");
    let sorted = options.sorted ?? null;
    let down = options.down ?? true;
    const heads = columns.map((column, index) => {
      const label = column.sort ? gw.el("button", {class: "sort", type: "button", onclick: () => sortBy(index)}, column.title)
        : column.title;
      return gw.el("th", {scope: "col", class: column.numeric ? "numeric" : null, title: column.hint}, label);
    });

    function sortBy(index) {
      down = sorted === index ? !down : true;
      sorted = index;
      draw();
    }

    function draw() {
      let shown = rows;
      if (sorted !== null) {
        const key = columns[sorted].sort;
        shown = [...rows].sort((one, other) => {
          const [a, b] = [key(one), key(other)];
          if (a === null || a === undefined) return 1;
          if (b === null || b === undefined) return -1;
          const order = a < b ? -1 : a > b ? 1 : 0;
          return down ? -order : order;
        });
      }
      heads.forEach((head, index) => {
        if (index === sorted) head.setAttribute("aria-sort", down ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      gw.fill(body, shown.map(row => gw.el("tr", {class: options.rowClass ? options.rowClass(row) : null},
        columns.map(column => gw.el("td", {class: [column.numeric ? "numeric" : "", column.class || ""].join(" ").trim() || null},
          column.value(row))))));
    }

    draw();
    return gw.el("div", {class: "scroll", tabindex: 0, role: "region", "aria-label": options.label || "table"},
      gw.el("table", {class: options.class}, gw.el("thead", {}, gw.el("tr", {}, heads)), body));
  };

  // ---------------------------------------------------------------- formats

  const NOT_FINITE = {NaN: NaN, Infinity: Infinity, "-Infinity": -Infinity};

  gw.format = {
    /** A number of JSON, in which NaN and infinities are strings; null if it is none. */
    parse: value => typeof value === "number" ? value : Object.hasOwn(NOT_FINITE, value) ? NOT_FINITE[value] : null,

    number(value, digits = 4) {
      const number = gw.format.parse(value);
      if (number === null) return "–";
      if (!Number.isFinite(number)) return String(number).replace("Infinity", "∞");
      const size = Math.abs(number);
      if (Number.isInteger(number) && size < 1e12) return number.toLocaleString("en-US");
      if (size < 1e-4 || size >= 1e9) return number.toExponential(Math.max(1, digits - 2));
      return number.toLocaleString("en-US", {maximumSignificantDigits: size >= 10 ** digits ? Math.ceil(Math.log10(size)) : digits});
    },
    signed: (value, digits = 3) => (gw.format.parse(value) > 0 ? "+" : "") + gw.format.number(value, digits).replace("-", "−"),
    percent: (value, digits = 1) => gw.format.parse(value) === null ? "–" : `${(100 * gw.format.parse(value)).toFixed(digits)} %`,
    /** Numbers of axes: 12k, 3.4M. */
    short(value) {
      const size = Math.abs(value);
      for (const [unit, factor] of [["G", 1e9], ["M", 1e6], ["k", 1e3]])
        if (size >= factor * 10 || (size >= factor && factor > 1e3)) return `${Number((value / factor).toPrecision(3))}${unit}`;
      if (size !== 0 && size < 1e-3) return Number(value.toPrecision(2)).toExponential();
      return String(Number(value.toPrecision(6)));
    },
    duration(seconds) {
      const value = gw.format.parse(seconds);
      if (value === null || !Number.isFinite(value)) return "–";
      if (value < 1) return `${Math.round(value * 1000)} ms`;
      if (value < 60) return `${value < 10 ? value.toFixed(1) : Math.round(value)} s`;
      if (value < 3600) return `${Math.floor(value / 60)} min ${String(Math.round(value % 60) % 60).padStart(2, "0")} s`;
      return `${Math.floor(value / 3600)} h ${String(Math.floor(value % 3600 / 60)).padStart(2, "0")} min`;
    },
    /** A time stamp of a run, in this browser's time zone. */
    when(stamp) {
      const time = new Date(String(stamp || "").replace(/([+-]\d\d)(\d\d)$/, "$1:$2"));
      if (Number.isNaN(time.getTime())) return stamp || "–";
      const two = number => String(number).padStart(2, "0");
      return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}`;
    },
    /** A setting's value as it would be written. */
    setting: value => value === null || value === undefined ? "none" : typeof value === "string" ? value : JSON.stringify(value),
  };

  // ---------------------------------------------------------------- data

  /** The name of an answer: a path, and its query in order; `answer_key` in api.py makes the same one. */
  gw.answerKey = function (path, query) {
    const pairs = Object.entries(query || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
    pairs.sort(([one], [other]) => one < other ? -1 : 1);
    const encoded = pairs.map(pair => pair.map(part => encodeURIComponent(String(part))).join("=")).join("&");
    return encoded ? `${path}?${encoded}` : path;
  };

  /** `get` promises the answer of the server to a path. An error has a sentence. In a report, embedded.js has another one. */
  gw.source = (function () {
    const get = async (path, query) => {
      let response;
      try {
        response = await fetch(`api/${gw.answerKey(path.split("/").map(encodeURIComponent).join("/"), query)}`, {credentials: "same-origin"});
      } catch {
        throw Object.assign(new Error("The server does not answer; is `groupwise view` still running?"), {offline: true});
      }
      const text = await response.text();
      let answer;
      try {
        answer = JSON.parse(text);
      } catch {
        throw new Error(text.slice(0, 300) || `The server answered with status ${response.status}.`);
      }
      if (!response.ok) throw Object.assign(new Error(answer.error || `status ${response.status}`), {status: response.status});
      return answer;
    };
    return {live: true, has: () => true, get};
  })();

  // ---------------------------------------------------------------- theme

  gw.theme = (function () {
    const order = ["auto", "light", "dark"];
    const names = {auto: "Theme: as the system", light: "Theme: light", dark: "Theme: dark"};
    const listeners = new Set();
    const system = window.matchMedia("(prefers-color-scheme: dark)");
    let chosen = "auto";
    try {
      chosen = order.includes(localStorage.getItem("groupwise-theme")) ? localStorage.getItem("groupwise-theme") : "auto";
    } catch { /* storage is off */ }
    const print = window.matchMedia("print"); // on paper always light
    const isDark = () => !print.matches && (chosen === "dark" || (chosen === "auto" && system.matches));
    const apply = () => {
      document.documentElement.dataset.theme = isDark() ? "dark" : "light";
      for (const listener of listeners) listener();
    };
    system.addEventListener("change", apply);
    print.addEventListener("change", apply);
    apply();
    return {
      isDark,
      /** Calls a function at each change; returns what ends that. */
      listen(listener) {
        listeners.add(listener);
        return () => listeners.delete(listener);
      },
      button() {
        const button = gw.el("button", {class: "icon", type: "button", id: "theme"});
        const show = () => {
          button.textContent = {auto: "◐", light: "☀", dark: "☾"}[chosen];
          button.title = names[chosen];
          button.setAttribute("aria-label", names[chosen]);
        };
        button.addEventListener("click", () => {
          chosen = order[(order.indexOf(chosen) + 1) % order.length];
          try {
            localStorage.setItem("groupwise-theme", chosen);
          } catch { /* storage is off */ }
          show();
          apply();
        });
        show();
        return button;
      },
    };
  })();

  /** The value of a CSS variable, such as gw.color("accent"). */
  gw.color = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();

  // ---------------------------------------------------------------- views and routes

  gw.views = (function () {
    const views = new Map();
    return {
      add: view => views.set(view.name, {order: 100, applies: () => true, ...view}),
      get: name => views.get(name),
      of: run => [...views.values()].filter(view => !view.top && view.applies(run)).sort((one, other) => one.order - other.order),
    };
  })();

  /** The hash of a view of a run (run is an id), or with run null of a view of all runs. */
  gw.link = function (run, view, params) {
    const pairs = Object.entries(params || {}).filter(([, value]) => value !== null && value !== undefined && value !== "");
    const query = new URLSearchParams(pairs.map(([name, value]) => [name, String(value)])).toString();
    const path = run === null ? view : `run/${encodeURIComponent(run)}/${view}`;
    return `#/${path}${query ? `?${query}` : ""}`;
  };

  gw.parseHash = function (hash) {
    const [path, query] = (hash.replace(/^#\/?/, "") + "?").split("?");
    const parts = path.split("/").filter(Boolean).map(part => {
      try {
        return decodeURIComponent(part);
      } catch {
        return part;
      }
    });
    const params = Object.fromEntries(new URLSearchParams(query));
    return parts[0] === "run" ? {run: parts[1] || "", view: parts[2] || "", params} : {run: null, view: parts[0] || "", params};
  };

  /** Changes parameters of the address (null removes one). The view that calls it has shown the change already. */
  gw.setParams = function (changes, {push = false} = {}) {
    const {run, view, params} = gw.parseHash(location.hash);
    const hash = gw.link(run, view, {...params, ...changes});
    if (hash === location.hash) return;
    history[push ? "pushState" : "replaceState"](null, "", hash);
    if (gw.page.shown) gw.page.shown.params = gw.parseHash(hash).params;
  };

  gw.page = (function () {
    const POLL = 2000;
    const POLL_ENDED = 20000;
    let shown = null; // {run, view, params, handle, state}
    let turn = 0; // counts navigations, so that a late answer of an earlier one is dropped
    let timer = null;
    const part = id => document.getElementById(id);

    async function navigate() {
      if (gw.source.start && !location.hash.replace(/^#\/?/, "")) history.replaceState(null, "", gw.source.start); // of a report
      const route = gw.parseHash(location.hash);
      if (shown && shown.handle && shown.route.run === route.run && shown.route.view === route.view && shown.handle.navigate) {
        page.shown.params = route.params;
        shown.handle.navigate(route.params);
        return;
      }
      const mine = ++turn;
      leave();
      const content = part("content");
      gw.fill(content, gw.loading());
      try {
        if (route.run === null) await showTop(route, mine, content);
        else await showRun(route, mine, content);
      } catch (error) {
        if (mine !== turn) return;
        if (route.run !== null && !shown) showHeader(null, null);
        gw.fill(content, gw.errorBox(error.message), gw.source.live ? gw.el("p", {}, gw.el("a", {href: "#/"}, "All runs")) : null);
        if (!error.status) console.error(error);
      }
    }

    function leave() {
      clearTimeout(timer);
      if (shown && shown.handle && shown.handle.dispose) shown.handle.dispose();
      shown = page.shown = null;
    }

    async function showTop(route, mine, content) {
      const view = gw.views.get(route.view || "runs");
      if (!view || !view.top) throw new Error(`There is no page “${route.view}”.`);
      showHeader(null, view);
      gw.fill(part("tabs"));
      document.title = `${view.title} · groupwise`;
      shown = page.shown = {route, view, run: null, params: route.params, handle: null};
      const element = gw.el("div", {class: `view view-${view.name}`});
      gw.fill(content, element);
      const handle = await view.render(element, null, route.params);
      if (mine !== turn) return handle && handle.dispose && handle.dispose();
      shown.handle = handle || {};
      if (gw.source.live && shown.handle.update) timer = setTimeout(() => pollTop(mine), POLL);
    }

    async function pollTop(mine) {
      if (mine !== turn) return;
      if (!document.hidden) await shown.handle.update(null);
      if (mine === turn) timer = setTimeout(() => pollTop(mine), 2 * POLL);
    }

    async function showRun(route, mine, content) {
      const run = await gw.source.get(`run/${route.run}`);
      if (mine !== turn) return;
      const views = gw.views.of(run);
      const view = route.view ? gw.views.get(route.view) : views[0];
      if (!view || view.top) throw new Error(`There is no view “${route.view}”.`);
      if (!route.view) history.replaceState(null, "", gw.link(run.id, view.name, route.params));
      shown = page.shown = {route: {...route, view: view.name}, view, run, params: route.params, handle: null};
      document.title = `${view.title} · ${run.name}`;
      showHeader(run, view);
      showTabs(run, view);
      revealTab();
      const element = gw.el("div", {class: `view view-${view.name}`});
      gw.fill(content, element);
      if (gw.source.live) timer = setTimeout(() => poll(mine), run.status === "running" ? POLL : POLL_ENDED);
      const handle = await view.render(element, run, route.params);
      if (mine !== turn) return handle && handle.dispose && handle.dispose();
      shown.handle = handle || {};
      showBadges(run);
    }

    async function poll(mine) {
      if (mine !== turn) return;
      let status = shown.run.status;
      if (!document.hidden) {
        try {
          const state = await gw.source.get(`run/${shown.run.id}/state`);
          if (mine !== turn) return;
          document.body.classList.remove("offline");
          status = state.status;
          if (state.version !== shown.run.version || state.status !== shown.run.status) await update(mine);
        } catch (error) {
          if (mine !== turn) return;
          document.body.classList.toggle("offline", Boolean(error.offline));
          if (!error.offline) console.error(error);
        }
      }
      if (mine === turn) timer = setTimeout(() => poll(mine), status === "running" ? POLL : POLL_ENDED);
    }

    async function update(mine) {
      const run = await gw.source.get(`run/${shown.run.id}`);
      if (mine !== turn) return;
      shown.run = run;
      showHeader(run, shown.view);
      showTabs(run, shown.view);
      if (shown.handle && shown.handle.update) await shown.handle.update(run);
      showBadges(run);
    }

    function showHeader(run, view) {
      const title = run
        ? gw.el("div", {class: "run-title"},
            gw.el("h1", {title: run.path}, run.name),
            gw.statusBadge(run.status),
            progress(run),
            gw.el("span", {class: "quiet facts"}, gw.facts(run)))
        : gw.el("div", {class: "run-title"}, view ? gw.el("h1", {}, view.title) : null);
      gw.fill(part("header"),
        gw.el("a", {class: "brand", href: gw.source.start || "#/", title: gw.source.live ? "All runs" : "groupwise"}, "groupwise"),
        title,
        gw.el("span", {class: "offline-note", role: "status"}, "The server does not answer"),
        gw.theme.button());
      const problems = run ? run.problems : [];
      let box = part("problems");
      if (box) box.remove();
      if (problems.length) {
        box = gw.el("details", {id: "problems", class: "box warning"},
          gw.el("summary", {}, problems.length === 1 ? "A part of this run cannot be read" : `${problems.length} parts of this run cannot be read`),
          gw.el("ul", {}, problems.map(problem => gw.el("li", {}, problem))));
        part("tabs").after(box);
      }
    }

    function progress(run) {
      if (!run.total_steps) return gw.el("span", {class: "progress-text"}, `step ${gw.format.number(run.step)}`);
      const share = Math.min(1, run.step / run.total_steps);
      return gw.el("span", {class: "progress-text"},
        gw.el("progress", {max: 1, value: share, "aria-label": "steps done"}),
        ` step ${gw.format.number(run.step)} of ${gw.format.number(run.total_steps)}`);
    }

    function showTabs(run, current) {
      const tabs = part("tabs");
      const names = gw.views.of(run).map(view => view.name);
      if (tabs.dataset.run === run.id && tabs.dataset.names === names.join() && tabs.childElementCount) {
        for (const link of tabs.children) mark(link, link.dataset.view === current.name);
        return;
      }
      tabs.dataset.run = run.id;
      tabs.dataset.names = names.join();
      gw.fill(tabs, gw.views.of(run).map(view => {
        const link = gw.el("a", {href: gw.link(run.id, view.name), dataset: {view: view.name}}, view.title);
        mark(link, view === current);
        return link;
      }));
    }

    /** On a narrow screen the tabs scroll sideways. Not when a live run is updated: the reader may have scrolled them. */
    function revealTab() {
      const tabs = part("tabs");
      const link = tabs.querySelector("[aria-current]");
      if (link) tabs.scrollLeft = link.offsetLeft - (tabs.clientWidth - link.offsetWidth) / 2;
    }

    /** After the view, which should not wait for them. */
    async function showBadges(run) {
      const tabs = part("tabs");
      for (const view of gw.views.of(run).filter(one => one.badge)) {
        const badge = await view.badge(run).catch(() => null);
        const link = tabs.querySelector(`[data-view="${view.name}"]`);
        if (!link || tabs.dataset.run !== run.id) return;
        for (const old of link.querySelectorAll(".badge")) old.remove();
        if (badge) link.append(badge);
      }
    }

    function mark(link, isCurrent) {
      if (isCurrent) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }

    const page = {
      shown: null,
      start() {
        window.addEventListener("hashchange", navigate);
        document.querySelector(".skip").addEventListener("click", event => {
          event.preventDefault(); // the hash is the route
          part("content").focus();
        });
        document.addEventListener("visibilitychange", () => {
          if (document.hidden || !shown || !gw.source.live) return;
          clearTimeout(timer);
          if (shown.run) poll(turn);
          else if (shown.handle && shown.handle.update) pollTop(turn);
        });
        navigate();
      },
    };
    return page;
  })();

  gw.statusBadge = status => gw.badge(status, `status ${status}`, {
    running: "A process is training this run",
    finished: "The run has come to its end",
    stopped: "The run was interrupted; it can be resumed",
    unknown: "Whether the run still goes on cannot be seen from here",
  }[status]);
})(window.gw);
