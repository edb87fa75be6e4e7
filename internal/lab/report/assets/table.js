"use strict";
// The numbers of a view as rows, for the table below a chart and for its CSV.

const mostRows = 500;

function rowsOf(figure, view, state) {
  const many = view.panels.length > 1;
  if (figure.kind === "rects") {
    const rows = view.panels.flatMap((p) => p.series.flatMap((s) => s.xs.map((x, i) => [view.y.text[s.ys[i]], s.name, s.words ? s.words[s.text[i]] : "", x, s.x2[i]])));
    return { columns: ["row", "kind", "what", "from (" + (view.x.kind || "") + ")", "to"], rows: rows.sort((a, b) => a[3] - b[3]) };
  }
  if (figure.kind === "heat") {
    const s = view.panels[0].series[0];
    return { columns: ["rank", view.x.name, s.name + (view.panels[0].title ? " (" + view.panels[0].title + ")" : "")], rows: s.lo.map((v, i) => [view.y.text[s.ys[i]], view.x.text[s.xs[i]], v]) };
  }
  const columns = (many ? ["panel"] : []).concat(figure.by_steps ? abscissae[state.x].name : view.x.name), rows = [], spread = view.panels.some((p) => p.series.some((s) => s.lo));
  const names = [...new Set(view.panels.flatMap((p) => p.series.filter((s) => s.kind !== "ideal").map((s) => s.name)))];
  for (const n of names) columns.push(...(spread ? [n, n + ", least", n + ", most"] : [n]));
  const raw = Object.assign({}, state, { smooth: false });
  for (const p of view.panels) {
    const at = new Map();
    for (const s of p.series) {
      if (s.kind === "ideal") continue;
      for (const [x, y, i] of pointsOf(s, raw)) {
        const key = s.text ? x + " " + i + s.name : x;
        if (!at.has(key)) at.set(key, { x, cells: {} });
        at.get(key).cells[s.name] = [y, s.lo ? s.lo[i] : null, s.hi ? s.hi[i] : null];
      }
    }
    for (const { x, cells } of [...at.values()].sort((a, b) => a.x - b.x)) {
      const row = (many ? [p.title] : []).concat(view.x.kind === "text" ? view.x.text[x] : x);
      for (const n of names) row.push(...(cells[n] || [null, null, null]).slice(0, spread ? 3 : 1));
      rows.push(row);
    }
  }
  return { columns, rows };
}

function csvOf({ columns, rows }) {
  const field = (v) => { const t = v === null || v === undefined ? "" : String(v); return /[",\n]/.test(t) ? '"' + t.replace(/"/g, '""') + '"' : t; };
  return [columns, ...rows].map((r) => r.map(field).join(",")).join("\n") + "\n";
}

function element(name, attrs, ...children) {
  const e = document.createElement(name);
  for (const k in attrs || {}) e.setAttribute(k, attrs[k]);
  e.append(...children);
  return e;
}

function save(name, type, text) {
  const a = element("a", { download: name, href: URL.createObjectURL(new Blob([text], { type })) });
  a.click();
  setTimeout(() => URL.revokeObjectURL(a.href), 10000);
}

function fileName(figure, view) { return (figure.title + " " + view.name).toLowerCase().replace(/[^a-z0-9]+/g, "-").replace(/^-|-$/g, "").slice(0, 80); }

// fillTable writes the first rows of a view; the CSV has all.
function fillTable(into, figure, view, state) {
  const data = rowsOf(figure, view, state), shown = data.rows.slice(0, mostRows);
  const cell = (v) => typeof v === "number" ? element("td", { class: "number" }, v.toLocaleString("en-US", { maximumSignificantDigits: 7 })) : element("td", null, v === null || v === undefined ? "" : v);
  const table = element("table", null, element("caption", null, view.name + (shown.length < data.rows.length ? ": the first " + mostRows + " of " + data.rows.length + " rows; the CSV has all" : "")),
    element("thead", null, element("tr", null, ...data.columns.map((c) => element("th", { scope: "col" }, c)))), element("tbody", null, ...shown.map((r) => element("tr", null, ...r.map(cell)))));
  into.replaceChildren(element("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": "Numbers of " + figure.title }, table));
}
