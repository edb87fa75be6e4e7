"use strict";
// Figures: their buttons, legends and charts, by mouse, touch and keyboard.

const page = JSON.parse(document.getElementById("data").textContent);
const live = document.getElementById("live");
const drawn = []; // all figures, to redraw after a change of width or color scheme

// mostPanels limits the charts of a view until the reader asks for all.
const mostPanels = 6;

function buttons(label, names, chosen, act) {
  const group = element("div", { class: "group", role: "group", "aria-label": label });
  names.forEach((name, i) => {
    const b = element("button", { type: "button", "aria-pressed": String(i === chosen) }, name);
    b.addEventListener("click", () => {
      group.querySelectorAll("button").forEach((o) => o.setAttribute("aria-pressed", String(o === b)));
      act(i);
    });
    group.append(b);
  });
  return group;
}

function toggle(name, on, act) {
  const b = element("button", { type: "button", "aria-pressed": String(on) }, name);
  b.addEventListener("click", () => {
    on = !on;
    b.setAttribute("aria-pressed", String(on));
    act(on);
  });
  return b;
}

function plain(name, act) {
  const b = element("button", { type: "button" }, name);
  b.addEventListener("click", act);
  return b;
}

class Figure {
  constructor(data) {
    this.data = data;
    this.root = document.getElementById(data.id);
    this.state = { view: 0, x: 0, smooth: false, hidden: new Set(), zoom: [0, 100], all: false };
    this.charts = [];
    this.bar = element("div", { class: "bar" });
    this.panels = element("div", { class: "panels" });
    this.legend = element("div", { class: "legend", role: "group", "aria-label": "Lines shown in " + data.title });
    this.root.querySelector(".draw").append(this.bar, this.panels, this.legend);
    this.controls();
    this.numbers();
    this.draw();
  }

  get view() { return this.data.views[this.state.view]; }

  controls() {
    const d = this.data, s = this.state, put = (...c) => this.bar.append(...c);
    if (d.views.length > 1) put(buttons("What is shown", d.views.map((v) => v.name), 0, (i) => { s.view = i; s.zoom = [0, 100]; this.draw(); }));
    if (d.by_steps) put(buttons("Against", ["tokens", "steps", "hours"], 0, (i) => { s.x = i; this.draw(); }));
    if (d.smooth) put(element("div", { class: "group" }, toggle("smooth", false, (on) => { s.smooth = on; this.draw(); })));
    if (d.kind === "rects") {
      const group = element("div", { class: "group", role: "group", "aria-label": "Zoom" });
      group.append(plain("zoom in", () => this.zoom(.5, 0)), plain("zoom out", () => this.zoom(2, 0)), plain("← earlier", () => this.zoom(1, -.5)), plain("later →", () => this.zoom(1, .5)));
      put(group);
    }
  }

  zoom(by, shift) {
    const [a, b] = this.state.zoom, width = Math.min(100, (b - a) * by), middle = (a + b) / 2 + shift * (b - a);
    const start = Math.max(0, Math.min(100 - width, middle - width / 2));
    this.state.zoom = [start, start + width];
    for (const c of this.charts) c.chart.dispatchAction({ type: "dataZoom", start, end: start + width });
  }

  numbers() {
    const details = this.root.querySelector("details.numbers"), fill = details.querySelector(".fill");
    this.fill = () => {
      if (!details.open) return;
      const group = element("div", { class: "group" });
      group.append(plain("CSV", () => save(fileName(this.data, this.view) + ".csv", "text/csv", csvOf(rowsOf(this.data, this.view, this.state)))), plain("SVG", () => this.svg()));
      const table = element("div");
      fillTable(table, this.data, this.view, this.state);
      fill.replaceChildren(group, table);
    };
    details.addEventListener("toggle", this.fill);
  }

  // svg saves each chart as shown, with a legend.
  svg() {
    this.view.panels.forEach((p, k) => {
      const c = echarts.init(null, null, { renderer: "svg", ssr: true, width: 720, height: 440 });
      const o = optionOf(this.data, this.view, k, this.state, 720);
      o.legend = { top: 20, type: "plain", itemWidth: 32, textStyle: { color: look().ink } };
      o.grid.top = 44 + 20 * Math.ceil(p.series.reduce((n, s) => n + s.name.length * 7 + 50, 0) / 700);
      c.setOption(o);
      save(fileName(this.data, this.view) + (this.view.panels.length > 1 ? "-" + (k + 1) : "") + ".svg", "image/svg+xml", c.renderToSVGString());
      c.dispose();
    });
  }

  draw() {
    for (const c of this.charts) c.chart.dispose();
    this.charts = [];
    const all = this.view.panels, shown = this.state.all ? all : all.slice(0, mostPanels);
    this.panels.replaceChildren();
    this.panels.classList.toggle("many", all.length > 1);
    const boxes = shown.map((p) => {
      const box = element("div", { class: "chart", tabindex: "0", role: "group", "aria-roledescription": "chart", "aria-label": this.label(p) });
      const named = p.title && p.title !== "seconds" && p.title !== "bytes";
      this.panels.append(element("div", { class: "panel" }, ...(named ? [element("h4", null, p.title)] : []), box));
      if (this.data.kind === "rects" || this.data.kind === "heat") box.style.height = Math.max(120, 64 + this.view.y.text.length * Math.max(11, Math.min(this.data.kind === "heat" ? 30 : 26, 1000 / this.view.y.text.length))) + "px";
      return box;
    });
    boxes.forEach((box, k) => { // after the grid has all its columns
      const chart = echarts.init(box, null, { renderer: "canvas" });
      chart.setOption(optionOf(this.data, this.view, k, this.state, box.clientWidth));
      const c = { chart, box, k, series: 0, point: -1 };
      box.addEventListener("keydown", (e) => this.key(e, c));
      box.addEventListener("blur", () => chart.dispatchAction({ type: "hideTip" }));
      this.charts.push(c);
    });
    if (shown.length < all.length) {
      this.panels.append(plain("Show all " + all.length + " charts", () => { this.state.all = true; this.draw(); }));
    }
    this.legendOf();
    this.fill();
  }

  label(p) {
    const names = p.series.filter((s) => s.kind !== "ideal").map((s) => s.name);
    return [this.data.title, p.title, this.view.name, names.length + (names.length === 1 ? " series" : " series: " + names.join("; "))].filter(Boolean).join(". ") + ". Arrow keys read the points.";
  }

  legendOf() {
    const seen = new Map();
    for (const p of this.view.panels) for (const s of p.series) if (!seen.has(s.name)) seen.set(s.name, s);
    this.legend.replaceChildren();
    if (this.data.kind === "heat" || seen.size < 2) return;
    const place = (s) => (s.kind === "ideal" ? 1e6 : s.kind === "stack" ? 0 : s.color * 1000) + s.dash;
    for (const s of [...seen.values()].sort((a, b) => place(a) - place(b))) {
      const b = element("button", { type: "button", "aria-pressed": String(!this.state.hidden.has(s.name)) }, swatch(s), s.name);
      b.addEventListener("click", () => {
        const on = this.state.hidden.delete(s.name);
        if (!on) this.state.hidden.add(s.name);
        b.setAttribute("aria-pressed", String(on));
        this.update();
      });
      this.legend.append(b);
    }
  }

  update() {
    for (const c of this.charts) c.chart.setOption(optionOf(this.data, this.view, c.k, this.state, c.box.clientWidth), true);
  }

  // key reads the next point of a chart aloud.
  key(e, c) {
    const list = usable(this.view, this.state)[c.k].filter((s) => s.kind !== "ideal" && s.ys.length);
    if (!list.length || e.ctrlKey || e.metaKey || e.altKey) return;
    const step = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[e.key];
    if (e.key === "Escape") {
      c.chart.dispatchAction({ type: "hideTip" });
      live.textContent = "";
      return;
    }
    if (!step) return;
    e.preventDefault();
    c.series = (c.series + step[0] + list.length) % list.length;
    const s = list[c.series], flat = ["rects", "heat", "bar", "stack"].includes(s.kind), places = flat ? s.ys.map((_, i) => i) : pointsOf(s, this.state).map((p) => p[2]);
    c.point = Math.max(0, Math.min(places.length - 1, c.point + step[1]));
    const i = s.kind === "bar" || s.kind === "stack" ? s.xs[c.point] : places[c.point], option = c.chart.getOption();
    const view = this.data.by_steps ? Object.assign({}, this.view, { x: abscissae[this.state.x] }) : this.view;
    live.textContent = reading(view, s, i, this.state);
    c.chart.dispatchAction({ type: "showTip", seriesIndex: option.series.findIndex((o) => o.name === s.name), dataIndex: s.kind === "bar" || s.kind === "stack" ? i : c.point });
  }

  resize() { for (const c of this.charts) c.chart.resize(); this.update(); }
}

for (const f of page.figures) if (f.views && f.views.length) drawn.push(new Figure(f));
let width = innerWidth;
addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; for (const f of drawn) f.resize(); } });
const redraw = () => { for (const f of drawn) f.draw(); };
dark.addEventListener("change", redraw);
addEventListener("beforeprint", () => { printing = true; redraw(); });
addEventListener("afterprint", () => { printing = false; redraw(); });
document.documentElement.dataset.drawn = String(drawn.length);
