"use strict";
// Looks of series. Series differ in color, dash and symbol, so that they can be distinguished in black and white. The
// palette is by Okabe and Ito (Color Universal Design, 2008).

const looks = {
  light: { ink: "#1a1d21", soft: "#5a626c", muted: "#c3c9d0", rule: "#e3e6ea", paper: "#ffffff", colors: ["#0072b2", "#d55e00", "#009e73", "#8f4e86", "#c98a00", "#3b9fd8", "#444444", "#111111"], heat: ["#f3f6f9", "#1d5f9e"] },
  dark: { ink: "#e7e9ec", soft: "#a2abb6", muted: "#56606b", rule: "#30363d", paper: "#14171a", colors: ["#4fb0ea", "#ff8a3d", "#33c79a", "#d890cd", "#f0b53a", "#8bcdf5", "#bbbbbb", "#ffffff"], heat: ["#1d2126", "#9ccbff"] },
};

const dark = matchMedia("(prefers-color-scheme: dark)");
let printing = false;

function look() { return dark.matches && !printing ? looks.dark : looks.light; }

const symbols = ["circle", "rect", "triangle", "diamond", "path://M0 4 L4 0 L8 4 L12 0 L16 4 L12 8 L16 12 L12 16 L8 12 L4 16 L0 12 L4 8 Z", "pin", "arrow", "roundRect"];
const dashes = [[], [7, 4], [2, 3], [11, 3, 2, 3], [14, 5], [4, 2, 1, 2], [1, 5], [9, 2]];
const decals = [
  null,
  { symbol: "line", rotation: Math.PI / 4, dashArrayX: [1, 0], dashArrayY: [2, 6] },
  { symbol: "line", rotation: -Math.PI / 4, dashArrayX: [1, 0], dashArrayY: [2, 4] },
  { symbol: "circle", symbolSize: .7, dashArrayX: [[6, 6], [0, 6, 6, 0]], dashArrayY: [5, 0] },
  { symbol: "line", rotation: 0, dashArrayX: [1, 0], dashArrayY: [2, 4] },
  { symbol: "line", rotation: Math.PI / 2, dashArrayX: [1, 0], dashArrayY: [2, 5] },
  { symbol: "rect", symbolSize: .8, dashArrayX: [[5, 5], [0, 5, 5, 0]], dashArrayY: [5, 0] },
  { symbol: "line", rotation: Math.PI / 4, dashArrayX: [1, 0], dashArrayY: [1, 2] },
];

function pick(list, i) { return list[((i % list.length) + list.length) % list.length]; }

function colorOf(s) { return s.color < 0 ? look().muted : s.kind === "ideal" ? look().soft : pick(look().colors, s.color); }

// decalOf returns the pattern of a bar or rectangle.
function decalOf(i) {
  const d = i < 0 ? null : pick(decals, i);
  return d && Object.assign({ color: dark.matches && !printing ? "rgba(0,0,0,.45)" : "rgba(255,255,255,.55)" }, d);
}

// xsOf returns the x values of a series: its own, or its run's on the chosen axis.
function xsOf(s, state) { return s.run ? page.steps[s.run - 1][state.x] : s.xs || []; }

// pointsOf returns [x, y, index] of the points that have values.
function pointsOf(s, state) {
  const xs = xsOf(s, state), out = [];
  for (let i = 0; i < s.ys.length; i++) if (xs[i] !== null && s.ys[i] !== null) out.push([xs[i], s.ys[i], i]);
  return state.smooth && s.symbol < 0 ? smoothed(out) : out;
}

// smoothed returns the exponential moving mean with a span of a fiftieth of the points, at least 10, corrected for the
// bias at its beginning.
function smoothed(points) {
  const keep = 1 - 2 / (Math.max(10, points.length / 50) + 1);
  let sum = 0, weight = 0;
  return points.map(([x, y, i]) => {
    sum = keep * sum + (1 - keep) * y;
    weight = keep * weight + 1 - keep;
    return [x, sum / weight, i];
  });
}

// swatch returns the sample of a series in the legend.
function swatch(s) {
  const svg = (name, attrs, parent) => {
    const e = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const k in attrs) e.setAttribute(k, attrs[k]);
    if (parent) parent.append(e);
    return e;
  };
  const root = svg("svg", { width: 34, height: 14, viewBox: "0 0 34 14", "aria-hidden": "true" }), color = colorOf(s);
  if (["bar", "stack", "rects"].includes(s.kind)) {
    svg("rect", { x: 4, y: 1, width: 26, height: 12, fill: color }, root);
    const ink = dark.matches && !printing ? "#000" : "#fff";
    const d = decalOf(s.color);
    if (d && d.symbol === "line") {
      const lines = Math.abs(d.rotation) < 1e-9 ? ["M4 5H30M4 9H30"] : Math.abs(d.rotation) > 1.5 ? ["M10 1V13M17 1V13M24 1V13"] : d.rotation > 0 ? ["M8 13L18 1M16 13L26 1"] : ["M8 1L18 13M16 1L26 13"];
      svg("path", { d: lines[0], stroke: ink, "stroke-width": 1.6, opacity: .8 }, root);
    } else if (d) {
      for (const x of [9, 17, 25]) svg("circle", { cx: x, cy: 7, r: 1.8, fill: ink, opacity: .8 }, root);
    }
    return root;
  }
  if (s.kind !== "points") svg("line", { x1: 1, x2: 33, y1: 7, y2: 7, stroke: color, "stroke-width": s.kind === "ideal" ? 1.2 : 2.2, "stroke-dasharray": pick(dashes, s.dash).join(" ") || "none" }, root);
  if (s.kind === "ideal" || s.symbol < 0) return root;
  const shapes = [["circle", { cx: 17, cy: 7, r: 4 }], ["rect", { x: 13, y: 3, width: 8, height: 8 }], ["path", { d: "M17 2L22 11H12Z" }], ["path", { d: "M17 1.5L22 7L17 12.5L12 7Z" }],
    ["path", { d: "M12 4L14 2L17 5L20 2L22 4L19 7L22 10L20 12L17 9L14 12L12 10L15 7Z" }], ["path", { d: "M17 13L13 5A4 4 0 1 1 21 5Z" }], ["path", { d: "M17 2L21 12L17 9L13 12Z" }], ["rect", { x: 13, y: 3, width: 8, height: 8, rx: 2 }]];
  const [name, attrs] = pick(shapes, s.symbol);
  svg(name, Object.assign({ fill: color }, attrs), root);
  return root;
}
