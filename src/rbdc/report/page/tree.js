// The tree as a drawing: models as boxes, leaves to the left; couplings as pills between them.
"use strict";

const BOX = { width: 244, height: 84, gapX: 150, gapY: 14 };
const MARKS = { done: "✓", running: "▶", stopped: "‖", waiting: "·", failed: "✗", unreadable: "?" };

function placed(nodes, keys) {
  // x from how often a model was widened, y from its parents'; leaves one below the other
  const spots = new Map();
  let rows = 0;
  for (const key of keys) {
    const node = nodes[key];
    if (node.kind !== "train") continue;
    const grown = node.parents.filter((k) => nodes[k]).map((k) => nodes[k]);
    const before = grown.flatMap((g) => g.parents).map((k) => spots.get(k)).filter(Boolean);
    const column = before.length ? Math.max(...before.map((b) => b.column)) + 1 : 0;
    const row = before.length ? before.reduce((sum, b) => sum + b.row, 0) / before.length : rows++;
    spots.set(key, { column, row });
  }
  return { spots, rows };
}

function drawTree(nodes, keys, metric, chosen, choose) {
  const { spots, rows } = placed(nodes, keys);
  const columns = Math.max(...[...spots.values()].map((spot) => spot.column)) + 1;
  const x = (column) => 2 + column * (BOX.width + BOX.gapX);
  const y = (row) => 2 + row * (BOX.height + BOX.gapY);
  const width = x(columns - 1) + BOX.width + 4, height = y(rows - 1) + BOX.height + 4;
  const edges = [], boxes = [];
  for (const [key, spot] of spots) {
    const node = nodes[key];
    boxes.push(box(node, metric, x(spot.column), y(spot.row), chosen === key, choose));
    for (const grow of node.parents.map((k) => nodes[k]).filter(Boolean)) {
      const pillX = x(spot.column) - BOX.gapX / 2, middle = y(spot.row) + BOX.height / 2;
      edges.push(s("path", { class: "edge", d: `M${pillX} ${middle} H${x(spot.column)}` }));
      for (const parent of grow.parents.map((k) => spots.get(k)).filter(Boolean)) {
        const [fromX, fromY] = [x(parent.column) + BOX.width, y(parent.row) + BOX.height / 2];
        const bend = (fromX + pillX) / 2;
        edges.push(s("path", { class: "edge", d: `M${fromX} ${fromY} C${bend} ${fromY} ${bend} ${middle} ${pillX} ${middle}` }));
      }
      boxes.push(pill(grow, metric, pillX, middle, chosen === grow.key, choose));
    }
  }
  return h("div", { class: "scroll" }, s("svg",
    { class: "tree", width, height, viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": "tree of models" },
    edges, boxes));
}

function clickable(node, chosen, choose, label, ...children) {
  return s("g", {
    class: `node ${node.state}${chosen ? " chosen" : ""}`, role: "button", tabindex: 0,
    "data-key": node.key, "aria-label": label, onclick: () => choose(node.key),
    onkeydown: (e) => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); choose(node.key); } },
  }, s("title", {}, label), children);
}

const shortName = (node) => node.name.split(": ").pop();

function progressText(node, metric) {
  // the score before and after its own training
  const now = scoreText(metric, node.metrics[metric.name], null), start = scoreText(metric, node.start[metric.name], null);
  return start ? `${start} → ${now || "…"}` : now || stateText(node);
}

function stateText(node) {
  const p = node.progress;
  return p && node.state !== "done" ? `${node.state} ${Math.floor((100 * p.step) / p.steps)} %` : node.state;
}

function shapeText(node) {
  // what a stage may differ in beside its width
  const pixels = node.image && (node.image[0] === node.image[1] ? `${node.image[0]} px` : `${node.image.join(" × ")} px`);
  const tokens = node.sequence_length ? `${node.sequence_length} tokens` : null;
  return [node.depth ? `${node.depth} blocks` : null, pixels, tokens].filter(Boolean).join(", ");
}

function box(node, metric, x, y, chosen, choose) {
  const epochs = isNumber(node.epochs) ? digits(node.epochs, 3) + (node.epochs === 1 ? " epoch" : " epochs") : "";
  const line = [epochs, flops(node.flops || node.planned_flops), node.seconds ? duration(node.seconds) : null];
  const colour = node.name === "standard" ? "var(--quiet)" : `var(--level${node.level % 5})`;
  return clickable(node, chosen, choose, `${node.name}, ${stateText(node)}`,
    s("rect", { class: "box", x, y, width: BOX.width, height: BOX.height, rx: 6 }),
    s("rect", { x: x + 1, y: y + 6, width: 5, height: BOX.height - 12, fill: colour }),
    s("text", { x: x + 14, y: y + 19, "font-weight": 600 }, `${MARKS[node.state]} ${clipped(shortName(node), 16)}`),
    s("text", { class: "quiet", x: x + BOX.width - 8, y: y + 19, "text-anchor": "end" }, `width ${digits(node.width)}`),
    s("text", { x: x + 14, y: y + 38 }, progressText(node, metric)),
    s("text", { class: "quiet", x: x + 14, y: y + 56, "font-size": 12 }, line.filter(Boolean).join(" · ")),
    s("text", { class: "quiet", x: x + 14, y: y + 74, "font-size": 12 }, shapeText(node)));
}

function pill(node, metric, x, y, chosen, choose) {
  const small = (value) => (value === 0 ? "0" : value.toExponential(0));
  const lines = [scoreText(metric, node.metrics[metric.name], stateText(node))];
  if (isNumber(node.proof_error)) lines.push(`proof ${small(node.proof_error)}`);
  if (isNumber(node.norm_drift)) lines.push(`drift ${small(node.norm_drift)}`);
  const height = 8 + 15 * lines.length;
  return clickable(node, chosen, choose, `${node.name}, ${stateText(node)}`,
    s("rect", { class: "pill", x: x - 48, y: y - height / 2, width: 96, height, rx: 10 }),
    lines.map((text, i) => s("text", {
      x, y: y - height / 2 + 16 + 15 * i, "text-anchor": "middle", "font-size": 12, class: i ? "quiet" : null,
    }, text)));
}

const clipped = (text, most) => (text.length > most ? text.slice(0, most - 1) + "…" : text);
