"use strict";
// The options of Apache ECharts for a panel of a view. Tooltips are drawn in the canvas, never as HTML.

function usable(view, state) {
  return view.panels.map((p) => p.series.filter((s) => !state.hidden.has(s.name)));
}

// bounds returns the ends of both axes over all panels of a view, so that panels are comparable.
function bounds(view, state) {
  const b = { x: [Infinity, -Infinity], y: [Infinity, -Infinity] };
  const grow = (range, v, log) => { if (v !== null && Number.isFinite(v) && (!log || v > 0)) { range[0] = Math.min(range[0], v); range[1] = Math.max(range[1], v); } };
  for (const list of usable(view, state)) {
    const stacks = {};
    for (const s of list) for (const [x, y, i] of pointsOf(s, state)) {
      grow(b.x, x, view.x.log);
      if (s.kind === "stack") { stacks[x] = (stacks[x] || 0) + y; grow(b.y, stacks[x]); } else grow(b.y, y, view.y.log);
      if (s.lo && s.hi && s.lo[i] !== null) { grow(b.y, s.lo[i], view.y.log); grow(b.y, s.hi[i], view.y.log); }
    }
  }
  return b;
}

const steps10 = [1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 6, 8, 10];

function niceUp(v) { const p = 10 ** Math.floor(Math.log10(v)); return steps10.find((s) => s * p >= v * (1 - 1e-9)) * p; }

function niceDown(v) { const p = 10 ** Math.floor(Math.log10(v)); return steps10.filter((s) => s * p <= v * (1 + 1e-9)).pop() * p; }

// ticksOf returns the ticks of a log axis: 1, 2, 5, 10, ... or only powers of ten; powers of two for tokens and ranks.
function ticksOf(a, lo, hi) {
  const out = [];
  if (a.kind === "tokens" || a.kind === "ranks" || a.kind === "bytes") {
    let every = 1;
    while (Math.log2(hi / lo) / every > 9) every++;
    for (let k = Math.ceil(Math.log2(lo) - 1e-9); 2 ** k <= hi * (1 + 1e-9); k += every) out.push(2 ** k);
    if (out.length > 1) return out;
    out.length = 0;
  }
  const decades = Math.log10(hi / lo), within = decades > 4 ? [1] : decades > 1.5 ? [1, 2, 5] : decades > .7 ? [1, 1.5, 2, 3, 4, 5, 7] : [1, 1.2, 1.5, 2, 2.5, 3, 3.5, 4, 5, 6, 7, 8, 9];
  for (let k = Math.floor(Math.log10(lo)); k <= Math.ceil(Math.log10(hi)); k++) for (const m of within) {
    const v = Number((m * 10 ** k).toPrecision(3));
    if (v >= lo * (1 - 1e-9) && v <= hi * (1 + 1e-9)) out.push(v);
  }
  return out;
}

function axisOption(a, range, small) {
  const l = look(), text = { color: l.soft, fontSize: small ? 11 : 12, hideOverlap: true };
  const o = { name: a.name || "", nameLocation: "middle", nameTextStyle: { color: l.ink, fontSize: small ? 11.5 : 12.5 },
    axisLine: { show: true, lineStyle: { color: l.soft } }, axisTick: { show: true, lineStyle: { color: l.soft } }, splitLine: { show: true, lineStyle: { color: l.rule } }, axisLabel: text };
  if (a.kind === "text") {
    return Object.assign(o, { type: "category", data: a.text, splitLine: { show: false }, axisTick: { show: false } });
  }
  o.axisLabel.formatter = writer(a.kind);
  let [lo, hi] = range;
  if (!(lo <= hi)) { lo = 0; hi = 1; }
  if (a.log && lo > 0) {
    const wide = a.kind === "tokens" || a.kind === "ranks";
    lo = wide ? lo / 1.12 : niceDown(lo / 1.03);
    hi = wide ? hi * 1.12 : niceUp(hi * 1.03);
    const ticks = ticksOf(a, lo, hi);
    o.axisLabel.customValues = ticks;
    o.axisTick.customValues = ticks;
    return Object.assign(o, { type: "log", min: lo, max: hi });
  }
  o.type = "value";
  if (!a.kind && hi > lo && hi - lo < Math.abs(hi) / 5 && Math.abs(hi) < 1e4) o.axisLabel.formatter = fine(lo, hi);
  if (a.zero) { o.min = 0; o.max = hi > 0 ? niceUp(hi * 1.04) : 1; } else { o.scale = true; }
  if (a.max) hi = Math.min(hi, a.max);
  if (a.kind === "bytes" && a.zero && hi > 0) { // powers of two between the lines
    let step = 2 ** Math.ceil(Math.log2(hi / 6));
    o.interval = step;
    o.max = Math.ceil(hi * 1.04 / step) * step;
  }
  return o;
}

function tip(lines) { return lines.filter(Boolean).join("\n"); }

// pointText returns the text of a point for the tooltip and for screen readers.
function pointText(view, s, x, y, i, state) {
  const xAxis = view.x.kind === "text" ? view.x.text[x] : exact(view.x.kind)(x) + " " + (view.x.name || "");
  const out = [s.name, xAxis, exact(view.y.kind)(y) + (view.y.kind ? "" : " " + view.y.name)];
  if (s.lo && s.lo[i] !== null && s.lo[i] !== undefined && s.kind !== "heat") out.push(exact(view.y.kind)(s.lo[i]) + " to " + exact(view.y.kind)(s.hi[i]));
  if (s.text && s.words) out.unshift(s.words[s.text[i]]);
  return tip(out);
}

function lineOption(view, s, state) {
  const color = colorOf(s), ideal = s.kind === "ideal", data = pointsOf(s, state).map(([x, y, i]) => ({ value: [x, y], i }));
  const shown = !ideal && s.symbol >= 0;
  return { type: s.kind === "points" ? "scatter" : "line", name: s.name, data, symbol: shown ? pick(symbols, s.symbol) : "circle", symbolSize: shown ? 8 : 5, showSymbol: shown || data.length === 1,
    sampling: data.length > 3000 ? "lttb" : undefined, connectNulls: true, itemStyle: { color }, silent: ideal, z: ideal && view.x.kind !== "text" ? 1 : 3, animation: false,
    lineStyle: { color, width: ideal ? 1.2 : 2, type: ideal && s.dash === 0 ? "solid" : pick(dashes, s.dash).length ? pick(dashes, s.dash) : "solid" }, emphasis: { scale: 1.4 } };
}

// spreadOption draws error bars from the lowest to the highest value.
function spreadOption(s, state) {
  const data = pointsOf(s, state).filter(([, , i]) => s.lo[i] !== null && s.hi[i] !== null).map(([x, , i]) => [x, s.lo[i], s.hi[i]]);
  const color = colorOf(s);
  return { type: "custom", name: s.name, data, silent: true, animation: false, z: 2, encode: { x: 0, y: [1, 2] }, renderItem(params, api) {
    const a = api.coord([api.value(0), api.value(1)]), b = api.coord([api.value(0), api.value(2)]);
    const style = { stroke: color, lineWidth: 1.2, fill: "none" };
    return { type: "group", children: [[a[0], a[1], b[0], b[1]], [a[0] - 4, a[1], a[0] + 4, a[1]], [b[0] - 4, b[1], b[0] + 4, b[1]]].map(([x1, y1, x2, y2]) => ({ type: "line", shape: { x1, y1, x2, y2 }, style })) };
  } };
}

function barOption(view, s, state) {
  const color = colorOf(s);
  return { type: "bar", name: s.name, stack: s.kind === "stack" ? "all" : undefined, data: view.x.text.map((_, k) => { const i = (s.xs || []).indexOf(k); return i < 0 ? null : s.ys[i]; }),
    itemStyle: { color, borderColor: look().paper, borderWidth: 1, decal: decalOf(s.color) || undefined }, barMaxWidth: 46, animation: false };
}

// wordsOf returns the short text in a rectangle: the hop, or the awaited rank.
function wordsOf(text) {
  const wait = /^waits for rank (\d+)/.exec(text), hop = /^attention.*\bhop (\d+)/.exec(text);
  return wait ? "← " + wait[1] : hop ? "hop " + hop[1] : "";
}

function rectOption(s, state) {
  const color = colorOf(s), decal = decalOf(s.color);
  const data = s.xs.map((x, i) => ({ value: [x, s.x2[i], s.ys[i]], i }));
  return { type: "custom", name: s.name, data, animation: false, progressive: 0, clip: true, encode: { x: [0, 1], y: 2 }, itemStyle: { color }, renderItem(params, api) {
    const a = api.coord([api.value(0), api.value(2)]), b = api.coord([api.value(1), api.value(2)]), high = api.size([0, 1])[1] * .82, area = params.coordSys;
    const shape = echarts.graphic.clipRectByRect({ x: a[0], y: a[1] - high / 2, width: Math.max(.8, b[0] - a[0]), height: high }, { x: area.x, y: area.y, width: area.width, height: area.height });
    if (!shape) return undefined;
    const item = { type: "rect", shape, style: { fill: color, decal: decal || undefined, stroke: look().paper, lineWidth: shape.width > 3 ? .6 : 0 } };
    const said = s.words && s.words.length > 1 && shape.width > 42 && shape.height > 9 ? wordsOf(s.words[s.text[params.dataIndex]]) : "";
    if (said) item.textContent = { style: { text: said, fill: dark.matches && !printing ? "#000" : "#fff", fontSize: Math.min(12, shape.height - 1), fontWeight: 600 } };
    if (said) item.textConfig = { position: "inside" };
    return item;
  } };
}

function heatOption(view, s) {
  const top = Math.max(...s.lo), dense = view.x.text.length > 14 || view.y.text.length > 24, l = look();
  const seconds = view.panels[0].title === "seconds", write = seconds ? duration : view.panels[0].title === "bytes" ? bytes : short;
  const light = dark.matches && !printing ? ["#e7e9ec", "#14171a"] : ["#1a1d21", "#ffffff"];
  return { type: "heatmap", progressive: 0, name: s.name, animation: false, data: s.lo.map((v, i) => ({ value: [s.xs[i], s.ys[i], v], i, label: { color: light[v > top * .6 ? 1 : 0] } })),
    label: { show: !dense, fontSize: 11, formatter: (p) => (p.value[2] === 0 ? "" : write(p.value[2])) }, itemStyle: { borderColor: l.paper, borderWidth: 1 } };
}

function tooltipOption(view, list, state) {
  const l = look();
  return { renderMode: "richText", confine: true, backgroundColor: l.paper, borderColor: l.soft, borderWidth: 1, textStyle: { color: l.ink, fontSize: 12, lineHeight: 17 }, formatter(p) {
    const s = list.find((x) => x.name === p.seriesName);
    if (!s) return "";
    const i = p.data && p.data.i !== undefined ? p.data.i : p.dataIndex;
    return reading(view, s, i, state);
  } };
}

// reading returns the whole text of point i of a series.
function reading(view, s, i, state) {
  if (s.kind === "rects") return tip([s.words ? s.words[s.text[i]] : "", s.name, view.y.text[s.ys[i]], exact(view.x.kind)(s.xs[i]) + " to " + exact(view.x.kind)(s.x2[i])]);
  if (s.kind === "heat") {
    const kind = view.panels[0].title;
    return tip([view.y.text[s.ys[i]] + ", " + view.x.text[s.xs[i]], s.name + ": " + exact(kind === "seconds" || kind === "bytes" ? kind : "")(s.lo[i])]);
  }
  if (s.kind === "bar" || s.kind === "stack") { const k = (s.xs || []).indexOf(i); return pointText(view, s, i, s.ys[k], k, state); }
  const at = pointsOf(s, state).find((p) => p[2] === i);
  return at ? pointText(view, s, at[0], at[1], i, state) : "";
}

function optionOf(figure, view, k, state, width) {
  const l = look(), small = width < 480, list = usable(view, state)[k], b = bounds(view, state), xAxis = figure.by_steps ? abscissae[state.x] : view.x;
  const v = Object.assign({}, view, { x: xAxis });
  const x = axisOption(v.x, b.x, small), y = axisOption(v.y, b.y, small), flat = figure.kind === "rects" || figure.kind === "heat";
  x.nameGap = 30;
  if (flat) {
    y.inverse = true;
    y.name = "";
    if (figure.kind === "rects") { x.min = 0; x.max = Math.max(...list.flatMap((s) => s.x2 || [])); x.splitLine = { show: false }; x.axisLabel.showMaxLabel = false; delete x.scale; }
  } else if (figure.by_steps) {
    x.splitLine = { show: false };
    x.min = "dataMin"; x.max = "dataMax"; x.axisLabel.showMaxLabel = false;
  }
  if (v.x.kind === "text" && !flat) x.axisLabel.interval = 0, x.axisLabel.rotate = v.x.text.length > (small ? 5 : 12) ? 45 : 0, x.axisLabel.hideOverlap = true;
  const turned = x.axisLabel.rotate ? 16 : 0;
  x.nameGap += turned;
  y.name = "";
  const series = [];
  for (const s of list) {
    if (s.kind === "rects") series.push(rectOption(s, state));
    else if (s.kind === "heat") series.push(heatOption(v, s));
    else if (s.kind === "bar" || s.kind === "stack") series.push(barOption(v, s, state));
    else {
      series.push(lineOption(v, s, state));
      if (s.lo) series.push(spreadOption(s, state));
    }
  }
  // ECharts writes the font into an SVG attribute unescaped, so it must have no quotes.
  const o = { backgroundColor: "transparent", animation: false, textStyle: { fontFamily: getComputedStyle(document.body).fontFamily.replace(/"/g, ""), color: l.ink }, aria: { enabled: false },
    grid: { left: small ? 8 : 14, right: small ? 14 : 24, top: flat ? 8 : 38, bottom: 32 + turned, outerBoundsMode: "same", outerBoundsContain: "axisLabel", containLabel: true }, xAxis: x, yAxis: y, series, tooltip: tooltipOption(v, list, state) };
  if (!flat && v.y.name) o.title = { text: v.y.name, left: 0, top: 6, padding: 2, textStyle: { color: l.ink, fontSize: small ? 11.5 : 12.5, fontWeight: "normal" } };
  if (figure.kind === "heat") o.visualMap = { show: false, min: 0, max: Math.max(1e-12, ...list.flatMap((s) => s.lo)), dimension: 2, inRange: { color: l.heat } };
  if (figure.kind === "rects") o.dataZoom = [{ type: "inside", zoomOnMouseWheel: "ctrl", moveOnMouseWheel: false, start: state.zoom[0], end: state.zoom[1], filterMode: "none" }];
  return o;
}

const abscissae = [{ name: "tokens", kind: "number" }, { name: "steps", kind: "number" }, { name: "hours since the first logged line", kind: "number" }];
