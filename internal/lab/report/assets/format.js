"use strict";
// Formats of numbers, by the kind of their axis.

function thousands(x) {
  if (!Number.isFinite(x)) return "";
  const a = Math.abs(x);
  if (a !== 0 && (a < 1e-4 || a >= 1e15)) return x.toExponential(2);
  return x.toLocaleString("en-US", { maximumSignificantDigits: a >= 1000 ? 15 : 3, maximumFractionDigits: a >= 100 ? 0 : 6 });
}

// fine returns a formatter for a short axis, with enough digits to distinguish its ticks.
function fine(lo, hi) {
  const digits = Math.max(0, Math.min(8, 1 - Math.floor(Math.log10((hi - lo) / 5))));
  return (x) => x.toLocaleString("en-US", { maximumFractionDigits: digits });
}

function short(x) { // 1.5k, 20M: for axes
  const a = Math.abs(x);
  for (const [size, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (a >= size) return thousands(x / (size === 1e4 ? 1e3 : size)) + unit;
  }
  return thousands(x);
}

function powers(x) { // 128K tokens are 131,072
  for (const [size, unit] of [[2 ** 30, "G"], [2 ** 20, "M"], [2 ** 10, "K"]]) {
    if (x >= size && x % (size / 4) === 0) return thousands(x / size) + unit;
  }
  return short(x);
}

function bytes(x) {
  for (const [size, unit] of [[2 ** 40, " TiB"], [2 ** 30, " GiB"], [2 ** 20, " MiB"], [2 ** 10, " KiB"]]) {
    if (Math.abs(x) >= size) return thousands(Number((x / size).toPrecision(3))) + unit;
  }
  return thousands(x) + " B";
}

function duration(x) {
  const a = Math.abs(x);
  if (a >= 3600) return thousands(x / 3600) + " h";
  if (a >= 120) return thousands(x / 60) + " min";
  if (a >= 1 || a === 0) return thousands(x) + " s";
  if (a >= 1e-3) return thousands(x * 1e3) + " ms";
  return thousands(x * 1e6) + " µs";
}

function share(x) { return thousands(Number((100 * x).toPrecision(4))) + " %"; }

const writers = { tokens: powers, bytes, seconds: duration, share, ranks: thousands };

function writer(kind) { return writers[kind] || short; }

// exact returns the formatter of tables and tooltips.
function exact(kind) { return kind && kind !== "tokens" && kind !== "ranks" && writers[kind] || thousands; }
