/* All metrics of a run as curves. */
"use strict";

gw.views.add({
  name: "curves", title: "Curves", order: 20,
  async render(element, run, params) {
    const curves = await gw.curves.mount(element, {runs: [run], load: () => gw.source.get(`run/${run.id}/curves`), params});
    return {update: changed => curves.update([changed]), dispose: curves.dispose};
  },
});
