// Elements, and numbers as people read them. Text goes in as text: nothing from data becomes HTML.
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function fill(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else if (value !== null && value !== undefined && value !== false)
      element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

const h = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const s = (tag, attributes, ...children) =>
  fill(document.createElementNS(SVG, tag), attributes, children);

const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
const digits = (value, count = 4) =>
  isNumber(value) ? String(Number(value.toPrecision(count))) : "–";

// Scores: a metric is data (see metrics.py), and no metric is known by name here

const scoreNumber = (metric, value) => Math.abs(metric.scale * value).toFixed(metric.decimals);
const minus = (value) => (value < 0 ? "−" : "");
const isBetter = (metric, value, than) => (metric.higher_is_better ? value > than : value < than);
function scoreSpread(metric, interval, ends, text = (m, value) => minus(value) + scoreNumber(m, value)) {
  // the interval of a mean over seeds; of two seeds, their range
  if (isNumber(interval)) return ` ± ${scoreNumber(metric, interval)}`;
  return ends ? ` (${ends.map((end) => text(metric, end)).join(" to ")})` : "";
}
const scoreText = (metric, value, absent = "–") =>
  isNumber(value) ? minus(value) + scoreNumber(metric, value) + (metric.unit ? ` ${metric.unit}` : "") : absent;
const scoreGap = (metric, value) => (isNumber(value) ? (minus(value) || "+") + scoreNumber(metric, value) : "");

function scoresCompared(metric, ours, theirs) {
  // '0.55 points more', '1.20 less (better)'
  if (ours === theirs) return "no difference";
  const verdict = metric.higher_is_better ? "" : isBetter(metric, ours, theirs) ? " (better)" : " (worse)";
  return `${scoreNumber(metric, ours - theirs)}${metric.unit === "%" ? " points" : ""} ${ours > theirs ? "more" : "less"}${verdict}`;
}

function flops(value) {
  if (!isNumber(value)) return "–";
  for (const [size, prefix] of [[1e21, "Z"], [1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"]])
    if (value >= size) return digits(value / size) + " " + prefix + "FLOPs";
  return digits(value) + " FLOPs";
}

function duration(seconds) {
  if (!isNumber(seconds)) return "–";
  const whole = Math.round(seconds), pad = (n) => String(n).padStart(2, "0");
  const [hours, minutes] = [Math.floor(whole / 3600), Math.floor(whole / 60) % 60];
  return hours ? `${hours}:${pad(minutes)}:${pad(whole % 60)}` : `${minutes}:${pad(whole % 60)}`;
}

function table(columns, rows) {
  // columns: [title, is it a number]; rows: arrays of text, numbers as text, or elements
  const kind = (number) => ({ class: columns[number][1] ? "number" : "text" });
  const line = (row) => h("tr", { class: ["first", "quiet"].filter((name) => row[name]).join(" ") || null }, row.map((cell, i) => h("td", kind(i), cell)));
  const title = (row) => h("tr", { class: "title" }, h("th", { colspan: columns.length, scope: "rowgroup" }, row[0])); // of the rows below it
  return h("div", { class: "scroll" }, h("table", {},
    h("thead", {}, h("tr", {}, columns.map(([title], i) => h("th", kind(i), title)))),
    h("tbody", {}, rows.map((row) => (row.title ? title(row) : line(row))))));
}

function facts(pairs) {
  return h("div", { class: "scroll" }, h("table", {}, h("tbody", {},
    pairs.filter(([, value]) => value !== null && value !== undefined && value !== "")
      .map(([name, value]) => h("tr", {}, h("td", { class: "quiet" }, name), h("td", { class: "text" }, value))))));
}

function choice(label, options, chosen, change) {
  // options: [value, text]
  return h("label", {}, label, h("select", { "data-choice": label, onchange: (e) => change(e.target.value) },
    options.map(([value, text]) => h("option", { value, selected: String(value) === String(chosen) }, text))));
}

const plain = (value) =>
  value === null || value === undefined ? "none" : typeof value === "object" ? JSON.stringify(value) : String(value);
