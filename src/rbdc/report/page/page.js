// The page: sections made from the state, drawn again when something is chosen or has changed.
"use strict";

let state = JSON.parse(document.getElementById("state").textContent);
const chosen = { run: 0, tree: null, node: null, x: "flops", y: null, show: "all", trade: "flops", overlay: null, overlayX: "flops", weights: null, layer: 0, time: null, sheet: null, size: "fit" };
const parts = {}; // section name -> element

const run = () => state.runs[chosen.run];
const tree = () => run().trees[chosen.tree] || run().trees.reduce((most, next) => (next.keys.length > most.keys.length ? next : most));
const trainings = () => (run().transfer ? detectorsOf(run()) : tree().keys.map((key) => run().nodes[key]).filter((node) => node.kind === "train"));

const primary = (r) => r.metrics[0]; // undefined where run.json cannot be read
const primaryScore = (r, result = r.result) => (primary(r) ? (result.metrics || {})[primary(r).name] : null);
const shownMetrics = (r) => r.metrics.filter((metric) => metric.shown);

function set(changes, ...names) {
  Object.assign(chosen, changes);
  names.forEach(draw);
}

function draw(name) {
  const opened = new Set([...parts[name].querySelectorAll("details[open] > summary")].map((summary) => summary.textContent));
  parts[name].replaceChildren(...[SECTIONS[name]()].flat(2).filter((child) => child !== null && child !== undefined));
  for (const summary of parts[name].querySelectorAll("summary")) summary.parentElement.open = opened.has(summary.textContent);
  (AFTER[name] || (() => {}))(parts[name]);
}

function drawAll() {
  const main = document.querySelector("main");
  for (const name of Object.keys(SECTIONS)) {
    if (!parts[name]) main.append((parts[name] = h("section", { id: name })));
    draw(name);
  }
}

const chart = (id) => h("div", { class: "plot", "data-chart": id });
const charts = (section, id) => section.querySelector(`[data-chart=${id}]`);

const SECTIONS = {
  runs() {
    if (state.runs.length < 2) return [];
    const overlaid = overlayMetrics(state.runs);
    return [
      h("h2", {}, "Runs"),
      table([["run"], ["model"], ["state"], ["result", true], ["FLOPs", true], ["of standard's", true]], state.runs.map((r, i) => [
        h("button", { type: "button", onclick: () => { Object.assign(chosen, { run: i, tree: null, node: null, show: "all", weights: null, time: null, sheet: null }); drawAll(); } }, r.name),
        modelText(r) || "–", runState(r), ...(r.transfer ? transferResult(r) : [isNumber(primaryScore(r)) ? `${primary(r).label} ${scoreText(primary(r), primaryScore(r))}` : "–", flops(r.result.training_flops), digits(r.result.normalized_flops, 3)]),
      ])),
      !overlaid.length ? null : h("div", { class: "controls" },
        choice("score", overlaid.map(({ name, title }) => [name, title]), overlayMetric().name, (overlay) => set({ overlay }, "runs")),
        choice("cost", OVERLAY_AXES, chosen.overlayX, (overlayX) => set({ overlayX }, "runs"))),
      overlaid.length ? chart("overlay") : null,
      h("p", { class: "quiet" }, `Below: ${run().name}`),
    ];
  },

  verdict() {
    const r = run(), result = r.result, metric = primary(r), score = primaryScore(r);
    const lines = [h("p", { class: "quiet" }, [modelText(r), dataText(r), runState(r), r.started ? `started ${new Date(r.started).toLocaleString()}` : null].filter(Boolean).join(" · "))];
    if (isNumber(score)) {
      lines.push(h("p", { class: "verdict" }, `RBDC: ${metric.label} ${scoreText(metric, score)} with ${flops(result.training_flops)} for all models of the tree${isNumber(result.normalized_flops) ? `, ${digits(result.normalized_flops, 3)} times what ${digits(r.about.baseline_epochs)} epochs of standard training cost` : ""}.`));
      if (result.standard) {
        const theirs = primaryScore(r, result.standard);
        lines.push(h("p", { class: "verdict" }, `Standard training beside it: ${metric.label} ${scoreText(metric, theirs)}; ${scoresCompared(metric, score, theirs)} for RBDC with ${isNumber(result.relative_flops) ? result.relative_flops.toFixed(2) : "1.00"} of its FLOPs${isNumber(result.relative_time) ? `, in ${result.relative_time.toFixed(2)} times the time` : ""}. One seed, so a hint, not a result.`));
      }
    }
    if (r.transfer) lines.push(...transferVerdict(r.transfer).map((text) => h("p", { class: "verdict" }, text)));
    if (r.missing.length) lines.push(h("div", { class: "missing" }, h("p", {}, "What is missing here:"), h("ul", {}, r.missing.map((text) => h("li", {}, text)))));
    return lines;
  },

  compare() {
    const summary = run().summary;
    if (!summary.lines) return [];
    return [
      h("h2", {}, "Protocols at equal FLOPs and equal time"),
      h("div", { class: "controls" }, choice("against", [["flops", "FLOPs"], ["time", "time"]].filter(([cost]) => isKnown(summary, cost)), tradeX(summary), (trade) => set({ trade }, "compare"))),
      chart("trade"), comparison(summary, compared()), reached(summary, compared()),
    ];
  },

  precision: () => (run().transfer ? precisionSection(run().transfer) : []),

  sheets: () => (run().transfer ? sheetSection(detectorsOf(run()), chosen, (changes) => set(changes, "sheets")) : []),

  detectors: () => (run().transfer ? detectorsSection(detectorsOf(run()), shownMetrics(run()), chosen.node, (key) => set({ node: key === chosen.node ? null : key }, "detectors", "node")) : []),

  tree() {
    const r = run();
    if (r.transfer) return [];
    if (!r.trees.length) return [h("h2", {}, "The tree"), h("p", { class: "quiet" }, "No models are known of this run.")];
    const pick = r.trees.length > 1
      ? h("div", { class: "controls" }, choice("trial", r.trees.map((t, i) => [i, t.title]), r.trees.indexOf(tree()), (i) => set({ tree: Number(i), node: null, show: "all", weights: null, time: null }, "tree", "node", "curves", "weights")))
      : null;
    return [
      h("h2", {}, "The tree"),
      h("p", { class: "quiet" }, `Leaves to the left. In a box, ${primary(r).label} before and after its own training; between boxes, ${primary(r).label} right after coupling, the proof's error, and how far joint normalisation moves the logits. Click for details.`),
      pick,
      drawTree(r.nodes, tree().keys, primary(r), chosen.node, (key) => set({ node: key === chosen.node ? null : key }, "tree", "node")),
    ];
  },

  node() {
    const node = run().nodes[chosen.node], metric = primary(run());
    if (!node) return [];
    const details = [
      ["state", stateText(node)], ["error", node.error], ["width", digits(node.width)], ["shape", shapeText(node)], ["epochs", isNumber(node.epochs) ? digits(node.epochs) : null],
      ["right after coupling", scoreText(metric, node.start[metric.name], null)],
      ...run().metrics.map((m) => [m.label, scoreText(m, node.metrics[m.name], null)]),
      [`best ${metric.label}`, node.best ? `${scoreText(metric, node.best[metric.name])} at epoch ${digits(node.best.epoch)}` : null],
      ["FLOPs", node.planned_flops ? `${flops(node.flops)} of ${flops(node.planned_flops)} planned` : null],
      ["parents", node.kind === "grow" ? node.parents.map((key) => shortName(run().nodes[key])).join(", ") : null], ["time", node.seconds ? duration(node.seconds) : null],
      speedOf(node),
      ["proof's error", isNumber(node.proof_error) ? node.proof_error.toExponential(1) : null], ["drift of the norms", isNumber(node.norm_drift) ? node.norm_drift.toExponential(1) : null],
      ["method", node.method], ["learning rate", isNumber(node.lr) ? digits(node.lr) : null],
      ...Object.entries(node.task).filter(([name]) => name !== "epochs").map(([name, value]) => [name.replaceAll("_", " "), plain(value)]),
      ["seed", node.seed], ["folder", node.folder], ["key", node.key],
    ];
    return [h("h3", {}, node.name), node.history.epoch ? h("div", { class: "two" }, h("div", {}, chart("node")), h("div", {}, facts(details))) : facts(details)];
  },

  budget() {
    const levels = run().levels;
    if (!levels.length) return [];
    const most = Math.max(...levels.map((level) => level.planned_flops)), own = levels.filter((level) => !level.standard);
    const bar = (level) => h("div", { class: "bar", title: `${flops(level.flops)} of ${flops(level.planned_flops)}`, style: `width:${Math.max(2, (160 * level.planned_flops) / most)}px` },
      h("span", { style: `width:${Math.min(100, (100 * level.flops) / (level.planned_flops || 1))}%;background:${level.standard ? "var(--quiet)" : `var(--level${level.level % 5})`}` }));
    const sum = (name) => own.reduce((total, level) => total + level[name], 0);
    const row = (name, level, picture) => [name, level.models, flops(level.planned_flops), flops(level.flops), picture, duration(level.seconds), digits(level.planned_passes, 3), digits(level.passes, 3)];
    const total = { models: sum("models"), planned_flops: sum("planned_flops"), flops: sum("flops"), seconds: sum("seconds"), planned_passes: sum("planned_passes"), passes: sum("passes") };
    return [
      h("h2", {}, "The budget by level"),
      table([["level"], ["models", true], ["planned", true], ["spent", true], [""], ["time", true], ["passes planned", true], ["passes", true]], [
        ...own.map((level) => row(`width ${digits(level.width)}`, level, bar(level))),
        Object.assign(row("the whole tree", total, ""), { first: true }),
        ...levels.filter((level) => level.standard).map((level) => Object.assign(row("standard training", level, bar(level)), { first: true })),
      ]),
      h("p", { class: "quiet" }, "Passes over the data, of all models of a level. Time of all models, one after the other."),
    ];
  },

  curves() {
    const r = run();
    if (!r.trees.length && !r.transfer) return [];
    const [xs, ys] = curveAxes(r), title = h("h2", {}, "Learning curves");
    if (!trainings().some((node) => node.history.epoch || node.steps.epoch)) return [title, h("p", { class: "quiet" }, "Nothing is measured yet.")];
    return [
      title,
      h("div", { class: "controls" },
        choice("show", shows(r), chosen.show, (show) => set({ show }, "curves")),
        choice("what", ys, curveY(r), (y) => set({ y }, "curves")),
        choice("against", xs, chosen.x, (x) => set({ x }, "curves"))),
      chart("curves"),
    ];
  },

  weights() {
    const nodes = run().trees.length ? trainings().filter(hasBlocks) : [];
    if (!nodes.length) return [];
    const node = weightNode(nodes), blocks = node.blocks, last = blocks.epoch.length - 1;
    const time = chosen.time === null ? last : Math.min(chosen.time, last), layer = Math.min(chosen.layer, blocks.names.length - 1);
    return [
      h("h2", {}, "What the halves learn from each other"),
      h("p", { class: "quiet" }, "A coupled weight starts block-diagonal: each half sees only itself. Shown is how large the off-diagonal blocks have grown, as root mean square relative to the diagonal ones. Standard training, where nothing was coupled, is near 1 all the time."),
      h("h3", {}, "Mean over layers"), chart("grown"),
      h("div", { class: "controls" }, choice("model", nodes.map((n) => [n.key, shortName(n)]), node.key, (weights) => set({ weights, time: null }, "weights"))),
      h("div", { class: "two" },
        h("div", {}, h("h3", {}, "Layer by layer (click one)"), chart("layers")),
        h("div", {}, h("h3", {}, "Blocks of one layer"),
          h("div", { class: "controls" }, choice("layer", blocks.names.map((name, i) => [i, name]), layer, (i) => set({ layer: Number(i) }, "weights")),
            h("label", {}, `epoch ${digits(blocks.epoch[time], 3)}`, h("input", { type: "range", min: 0, max: last, value: time, "aria-label": "epoch", oninput: (e) => { chosen.time = Number(e.target.value); e.target.previousSibling.textContent = `epoch ${digits(blocks.epoch[chosen.time], 3)}`; drawBlocks(charts(parts.weights, "blocks"), blocks.sizes[chosen.time][layer]); } }))),
          chart("blocks"))),
    ];
  },

  samples: () => (run().transfer || !run().trees.length ? [] : samplesSection(trainings())),

  cost: () => (run().transfer ? costSection(run().transfer) : []),

  data: () => (run().transfer ? dataSection(run().data) : []),

  repeat() {
    const r = run();
    const loads = isText(r) ? `transformers.AutoModelForCausalLM.from_pretrained("${r.folder}/model")` : r.result.timm_loads === false ? `rbdc.load("${r.folder}/model")` : `timm.create_model("local-dir:${r.folder}/model", pretrained=True)`;
    return [
      h("h2", {}, "How to repeat it"),
      r.command ? h("pre", {}, r.command) : null,
      h("p", { class: "quiet" }, r.command ? "The same command with the same folder continues a run that was stopped; with another folder it repeats the run." : "It was started from Python: the same call with the same folder continues it, with another folder it repeats it."),
      isNumber(primaryScore(r)) ? [h("h3", {}, "The model"), h("pre", {}, loads)] : null,
      r.transfer ? loadDetectors(r) : null,
      r.transfer ? null : facts([
        ["data", dataText(r)], ["fingerprint", r.data.fingerprint], ["classes", (r.data.class_names || []).join(", ")],
        ...Object.entries(r.asked).filter(([name]) => name !== "data_set").map(([name, value]) => [name.replaceAll("_", " "), plain(value)]),
      ]),
      ...[["recipe", r.recipe], ["plan", r.about], ["versions", r.environment], ["machine", { ...r.machine, ...r.engine }]].filter(([name]) => name !== "plan" || !r.transfer).map(([name, values]) =>
        h("details", {}, h("summary", {}, name), facts(Object.entries(values).map(([key, value]) => [key, plain(value)])))),
    ];
  },
};

const AFTER = {
  runs: (section) => { const e = charts(section, "overlay"); if (e) drawOverlay(e, state.runs, overlayMetric(), chosen.overlayX); },
  compare: (section) => { const e = charts(section, "trade"); if (e) drawTrade(e, run().summary, compared(), tradeX(run().summary)); },
  node: (section) => { const e = charts(section, "node"), node = run().nodes[chosen.node]; if (e && node.history.epoch) drawNode(e, node, shownMetrics(run())); },
  curves: (section) => { const e = charts(section, "curves"); if (e) drawCurves(e, run(), shown(), chosen.x, curveY(run())); },
  weights: (section) => {
    const nodes = run().trees.length ? trainings().filter(hasBlocks) : [];
    if (!nodes.length) return;
    const blocks = weightNode(nodes).blocks, last = blocks.epoch.length - 1;
    drawGrown(charts(section, "grown"), nodes);
    drawLayers(charts(section, "layers"), blocks, (layer) => set({ layer }, "weights"));
    drawBlocks(charts(section, "blocks"), blocks.sizes[chosen.time === null ? last : Math.min(chosen.time, last)][Math.min(chosen.layer, blocks.names.length - 1)]);
  },
};

const overlayMetric = () => overlayMetrics(state.runs).find(({ name }) => name === chosen.overlay) || overlayMetrics(state.runs)[0];
const hasBlocks = (node) => node.blocks && (node.parents.length > 0 || node.name.startsWith("standard"));
const weightNode = (nodes) => nodes.find((node) => node.key === chosen.weights) || nodes.find((node) => shortName(node) === "target") || nodes[nodes.length - 1];

function shown() {
  const nodes = trainings();
  if (chosen.show === "all") return nodes;
  if (run().transfer) return nodes.filter((node) => `backbone ${node.backbone}` === chosen.show);
  if (chosen.show === "path") {
    const path = [], all = run().nodes;
    for (let node = nodes.find((n) => shortName(n) === "target") || nodes[nodes.length - 1]; node; ) {
      path.unshift(node);
      const grown = all[node.parents[0]];
      node = grown && all[grown.parents[0]];
    }
    return path.concat(nodes.filter((node) => node.name === "standard"));
  }
  return nodes.filter((node) => String(node.level) === String(chosen.show));
}

function shows(r) {
  if (r.transfer) return [["all", "all detectors"], ...r.transfer.backbones.map(({ name }) => [`backbone ${name}`, name])];
  const levels = [...new Set(trainings().map((node) => node.level))];
  return [["all", "all models"], ["path", "one way from leaf to target"], ...levels.map((level) => [level, level === 0 ? "target" : `level ${level}`])];
}

// what is chosen may be of another run
const curveY = (r) => (curveAxes(r)[1].find(([name]) => name === chosen.y) || curveAxes(r)[1][0])[0];

function modelText(r) {
  if (r.transfer) return `Mask R-CNN on ${r.transfer.backbones.map(({ name }) => name).join(", ")}`;
  return r.about.model ? modelName(r.about.model) : null;
}

function modelName(model) {
  return typeof model === "string" ? model : `${model.name}${model.width === 1 ? "" : ` at width ${digits(model.width)}`}`;
}

function dataText(r) {
  if (r.transfer) return splitsText(r.data);
  if (isText(r)) return textData(r.data);
  return r.data.name ? `${r.data.name}, ${r.data.train_images} training and ${r.data.test_images} test images` : null;
}

function runState(r) {
  const states = Object.values(r.nodes).map((node) => node.state), count = (name) => states.filter((state) => state === name).length;
  if (states.length && count("done") === states.length) return "finished";
  return ["done", "running", "stopped", "waiting", "failed", "unreadable"].filter(count).map((name) => `${count(name)} ${name}`).join(", ");
}

const isKnown = (summary, cost) => summary.lines.some((line) => isNumber(line[cost])); // times need standard training
const tradeX = (summary) => (isKnown(summary, chosen.trade) ? chosen.trade : "flops");
const compared = () => run().metrics.find(({ name }) => name === run().summary.metric);

function gapText(metric, gap, interval, ends) {
  const certain = isNumber(interval) && Math.abs(gap) > interval; // the interval excludes 0
  const colour = !certain ? null : isBetter(metric, gap, 0) ? "better" : "worse";
  return h("span", { class: colour }, scoreGap(metric, gap) + scoreSpread(metric, interval, ends, scoreGap));
}

function comparison(summary, metric) {
  const published = summary.published || {}, papers = Object.keys(published).length > 0;
  const lines = [...summary.lines].sort((a, b) => a.budget - b.budget);
  const columns = [["protocol"], ["FLOPs", true], [metric.label, true], ["from standard", true], ["time", true], ["at equal time", true], ["best", true], ["epochs, leaves first"], ["passes", true], ["seeds", true], ...(papers ? [["the paper", true]] : [])];
  return table(columns, lines.map((line, i) => {
    const paper = published[`${line.protocol} ${digits(line.budget, 6)}`];
    const row = [
      line.protocol, line.flops.toFixed(3), scoreText(metric, line.score, line.unfinished ? "not yet" : "failed") + scoreSpread(metric, line.score_interval, line.score_range), gapText(metric, line.gap, line.gap_interval, line.gap_range),
      isNumber(line.relative_time) ? line.relative_time.toFixed(2) : "–", gapText(metric, line.time_gap, line.time_gap_interval, line.time_gap_range),
      scoreText(metric, line.best_score), epochsOf(line), digits(line.data_passes, 3), line.missing ? `${line.seeds} of ${line.seeds + line.missing}` : line.seeds,
      ...(papers ? [scoreText(metric, paper, "")] : []),
    ];
    row.first = i > 0 && lines[i - 1].budget !== line.budget;
    return row;
  }));
}

function reached(summary, metric) {
  const unfinished = (protocol) => summary.lines.some((line) => [protocol, "standard"].includes(line.protocol) && line.unfinished);
  const end = (value) => (value === "inf" ? "never" : value === "-inf" ? "below the smallest budget" : isNumber(value) ? value.toFixed(2) : "–");
  const budgets = (protocol) => summary.lines.filter((line) => line.protocol === protocol).length; // two make a curve
  const cells = (cost, found) => (found ? [end(found[cost]), found.low === found.high ? "" : `${end(found.low)} to ${end(found.high)}`] : ["–", ""]);
  const found = (cost, protocol) => (summary[`${cost}_to_reach`] || {})[protocol];
  const rows = [...new Set(summary.lines.map((line) => line.protocol))].filter((protocol) => protocol !== "standard" && budgets(protocol) > 1 && found("flops", protocol))
    .map((protocol) => [protocol, ...["flops", "time"].flatMap((cost) => (unfinished(protocol) ? ["not yet", ""] : cells(cost, found(cost, protocol))))]);
  const notes = [!isKnown(summary, "time") ? null : h("p", { class: "quiet" }, "Time is that of all models involved, one after the other: 1 is standard training with the same FLOPs. At equal time is the difference from it in the time that it took.")];
  if ((summary.tuning || []).length) notes.push(h("p", { class: "quiet" }, `Tuned on held-out data, which cost ${digits(summary.tuning_flops, 3)} times standard training; learning rate, and the share of the training at which it begins to fall: ${[...new Set(summary.rows.map((row) => `${row.protocol} ${digits(row.lr)}, ${digits(row.decay_start)}`))].join("; ")}.`));
  if (!rows.length) return notes;
  return [...notes, h("h3", {}, `FLOPs and time to reach standard training's best ${metric.label}`), table([["protocol"], ["FLOPs", true], ["95 %", true], ["time", true], ["95 %", true]], rows)];
}

// Light and dark, printing, and life

function theme(name) {
  if (name === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = name;
  document.getElementById("theme").textContent = `theme: ${name}`;
}

function remember(name) {
  try { if (name) localStorage.setItem("rbdc-theme", name); return localStorage.getItem("rbdc-theme") || "auto"; } catch { return name || "auto"; }
}

let current = remember();
theme(current);
document.getElementById("theme").addEventListener("click", () => {
  current = { auto: "light", light: "dark", dark: "auto" }[current];
  remember(current);
  theme(current);
  drawAll();
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawAll);
addEventListener("beforeprint", () => { theme("light"); drawAll(); });
addEventListener("afterprint", () => { theme(current); drawAll(); });

async function loadCharts() {
  if (!("DecompressionStream" in window)) throw new Error("this browser is too old for the charts");
  const packed = Uint8Array.from(atob(document.getElementById("plotly").textContent), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("gzip"));
  const script = document.createElement("script");
  script.textContent = await new Response(stream).text();
  document.head.append(script);
}

async function follow(seconds) {
  try {
    const text = await (await fetch("state.json")).text();
    if (text !== follow.last) {
      if (follow.last) { state = JSON.parse(text); chosen.run = Math.min(chosen.run, state.runs.length - 1); drawAll(); }
      follow.last = text;
    }
  } catch { /* the server has gone; what was seen stays */ }
  setTimeout(follow, 1000 * seconds, seconds);
}

drawAll();
loadCharts().then(drawAll, (error) => document.querySelector("main").prepend(h("p", { class: "missing" }, error.message)))
  .finally(() => { document.body.dataset.ready = "yes"; });
if (document.body.dataset.live) follow(Number(document.body.dataset.live));
