// The charts: what is plotted, and in which colours. Plotly draws.
"use strict";

const PALETTE = ["#7f7f7f", "#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6bb1", "#b2182b", "#66a61e", "#1b9e9e", "#a6761d"];
const SHAPES = ["circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "x", "star", "triangle-left", "triangle-right"];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const levelColour = (level) => style(`--level${level % 5}`);

function plot(element, traces, layout, click) {
  if (!window.Plotly) return;
  const axis = { gridcolor: style("--grid"), zerolinecolor: style("--grid"), linecolor: style("--line"), automargin: true };
  const { xaxis, yaxis, ...rest } = layout;
  Plotly.react(element, traces.map((trace) => ({ ...(trace.type ? {} : { cliponaxis: false }), ...trace })), {
    paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", hovermode: "closest",
    font: { family: "system-ui, sans-serif", size: 13, color: style("--text") },
    margin: { l: 60, r: 40, t: 16, b: 56 }, height: 400, // the toolbar has the margin on the right
    modebar: { orientation: "v", bgcolor: "rgba(0,0,0,0)" },
    legend: { orientation: "h", y: 1.02, x: 0, yanchor: "bottom" },
    hoverlabel: { namelength: -1 },
    xaxis: { ...axis, ...xaxis }, yaxis: { ...axis, ...yaxis }, ...rest,
  }, { responsive: true, displaylogo: false, modeBarButtons: [["zoom2d", "pan2d", "resetScale2d", "toImage"]] });
  element.removeAllListeners("plotly_click");
  if (click) element.on("plotly_click", (event) => click(event.points[0]));
}

// Learning curves

const X_AXES = [["flops", "FLOPs, parents' included"], ["time", "time, parents' included"], ["epochs", "epochs, parents' before"]];
const DETECTOR_X_AXES = [["flops", "FLOPs"], ["time", "time"], ["epochs", "epochs"]]; // it has no parents
const OVERLAY_AXES = X_AXES.slice(0, 2);
const LOGGED = { train: { title: "training loss", column: "loss" }, lr: { title: "learning rate", column: "lr" } }; // of every few steps
const measured = (run) => run.metrics.filter(({ name }) => Object.values(run.nodes).some(({ history }) => history[name]));
const curveAxes = (run) => [
  run.transfer ? DETECTOR_X_AXES : X_AXES,
  [...measured(run).map(({ name, title }) => [name, title]), ...Object.entries(LOGGED).map(([name, { title }]) => [name, title])],
];
const scored = (columns, name) => columns[`ema_${name}`] || columns[name]; // of the EMA weights where there are any
const scoreAxis = (metric) => {
  // of an axis that Plotly chooses: no more than the metric can be
  const [clipmin, clipmax] = metric.limits.map((end) => (isNumber(end) ? metric.scale * end : undefined));
  return { title: { text: metric.axis }, autorangeoptions: { clipmin, clipmax } };
};
const scaled = (metric, values) => values.map((value) => (isNumber(value) ? metric.scale * value : value));

function curveX(node, columns, axis, unit) {
  if (axis === "flops") return columns.flops.map((value) => value / unit);
  if (axis === "time") return columns.seconds.map((value) => (node.seconds_before + value) / 60);
  return columns.epoch.map((value) => node.epochs_before + value);
}

function curve(node, x, y, metric, unit) {
  const columns = metric ? node.history : node.steps, values = metric ? scored(columns, y) : columns[LOGGED[y].column];
  if (!values || !values.length) return null;
  const xs = curveX(node, columns, x, unit);
  if (!metric) return { xs, ys: values };
  if (!isNumber(node.start[y])) return { xs, ys: scaled(metric, values) };
  const coupled = { epoch: [0], flops: [node.flops_before], seconds: [0] }; // right after the coupling
  return { xs: [curveX(node, coupled, x, unit)[0], ...xs], ys: scaled(metric, [node.start[y], ...values]) };
}

function curveLook(run, node) {
  // a line's entry in the legend: a level of the tree, or a backbone
  if (run.transfer) {
    const number = run.transfer.backbones.findIndex(({ name }) => name === node.backbone);
    return { group: node.backbone, colour: levelColour(number), dash: ["solid", "dash", "dot"][Math.floor(number / 5) % 3], symbol: SHAPES[number % SHAPES.length] };
  }
  const standard = node.name.startsWith("standard");
  return { group: standard ? "standard" : `width ${digits(node.width)}`, colour: standard ? style("--quiet") : levelColour(node.level), dash: standard ? "dash" : "solid", symbol: "circle" };
}

function drawCurves(element, run, nodes, x, y) {
  const unit = run.about.baseline_flops || 1, seen = new Set(), metric = run.metrics.find(({ name }) => name === y);
  const traces = nodes.map((node) => {
    const found = curve(node, x, y, metric, unit);
    if (!found) return null;
    const { group, colour, dash, symbol } = curveLook(run, node), first = !seen.has(group);
    seen.add(group);
    const few = found.xs.length < 60 && metric;
    return {
      x: found.xs, y: found.ys, name: group, legendgroup: group, showlegend: first, mode: few ? "lines+markers" : "lines",
      line: { color: colour, width: 1.5, dash }, marker: { size: 5, symbol },
      text: found.xs.map(() => node.name), hovertemplate: "%{text}<br>%{y:.4~g} at %{x:.4~g}<extra></extra>",
    };
  }).filter(Boolean);
  const titles = { epochs: "epochs", flops: run.about.baseline_flops ? "FLOPs, standard training is 1" : "FLOPs", time: "minutes" };
  plot(element, traces, { xaxis: { title: { text: titles[x] }, rangemode: "tozero" }, yaxis: metric ? scoreAxis(metric) : { title: { text: LOGGED[y].title } } });
}

// Several runs in one chart: the target of each, and standard training beside it

const isEnd = (node) => node.kind === "train" && node.level === 0;
const overlayMetrics = (runs) => {
  const known = runs.filter((r) => !r.transfer).map((r) => measured(r).filter(({ shown }) => shown));
  return known.flat().filter((metric, i, all) => all.findIndex(({ name }) => name === metric.name) === i);
};

function drawOverlay(element, runs, metric, x) {
  const traces = runs.flatMap((r, number) => Object.values(r.nodes).filter((node) => !r.transfer && isEnd(node)).map((node, i) => {
    const found = curve(node, x, metric.name, metric, 1), standard = shortName(node) === "standard" || node.name.startsWith("standard");
    return found && {
      x: found.xs, y: found.ys, name: standard && !r.summary.lines ? `${r.name}, standard` : r.name, legendgroup: `${number}${standard}`, showlegend: i === 0 || (standard && !r.summary.lines), mode: "lines+markers",
      line: { color: PALETTE[(number + 1) % PALETTE.length], width: 1.5, dash: standard ? "dash" : "solid" }, marker: { size: 5, symbol: SHAPES[number % SHAPES.length] },
      text: found.xs.map(() => `${r.name}: ${node.name}`), hovertemplate: "%{text}<br>%{y:.4~g} at %{x:.4~s}<extra></extra>",
    };
  })).filter(Boolean);
  const title = x === "flops" ? "FLOPs of a model and all its ancestors" : "minutes of a model and all its ancestors";
  plot(element, traces, { xaxis: { title: { text: title }, rangemode: "tozero" }, yaxis: scoreAxis(metric) });
}

function drawNode(element, node, metrics) {
  const line = (metric, number) => {
    const coupled = isNumber(node.start[metric.name]) ? [node.start[metric.name]] : [];
    return {
      x: [...coupled.map(() => 0), ...(node.history.epoch || [])], y: scaled(metric, [...coupled, ...(scored(node.history, metric.name) || [])]),
      name: metric.axis, mode: "lines+markers", line: { color: levelColour(node.level + number) },
    };
  };
  const traces = [
    { x: node.steps.epoch, y: node.steps.loss, name: "training loss", mode: "lines", line: { color: style("--quiet"), width: 1 }, yaxis: "y2" },
    ...metrics.map(line),
  ].filter((trace) => trace.x && trace.y);
  plot(element, traces, {
    height: 280, xaxis: { title: { text: "epochs" }, rangemode: "tozero" }, yaxis: { ...(metrics.length ? scoreAxis(metrics[0]) : {}), title: { text: metrics.map(({ axis }) => axis).join(", ") } },
    yaxis2: { overlaying: "y", side: "right", title: { text: "training loss" }, showgrid: false, automargin: true, tickmode: "auto" },
  });
}

// Comparisons

function drawTrade(element, summary, metric, x) {
  const lines = summary.lines.filter((line) => isNumber(line.score) && isNumber(line[x]));
  const protocols = [...new Set(lines.map((line) => line.protocol))];
  const budgets = new Set(lines.filter((line) => line.protocol !== "standard").map((line) => line.budget));
  if (budgets.size === 1 && x === "flops") return drawForest(element, lines, metric);
  const place = (line) => line[x];
  const places = lines.map(place), apart = (Math.max(...places) - Math.min(...places)) * 0.004;
  const traces = protocols.flatMap((protocol, number) => {
    const own = lines.filter((line) => line.protocol === protocol).sort((a, b) => place(a) - place(b));
    const aside = x === "flops" ? apart * (number - (protocols.length - 1) / 2) : 0;
    return [{
      x: own.map((line) => place(line) + aside), y: own.map((line) => metric.scale * line.score), name: protocol, mode: "lines+markers",
      legendgroup: protocol, error_y: { type: "data", ...spread(metric, own), thickness: 1, width: 3 },
      line: { color: PALETTE[number % PALETTE.length], width: 1.5, dash: number < PALETTE.length ? "solid" : "dot" },
      marker: { symbol: SHAPES[number % SHAPES.length], size: 7 },
      customdata: own.map((line) => [epochsOf(line), line.seeds, scoreText(metric, line.score)]),
      hovertemplate: "%{customdata[2]} at %{x:.3~g}<br>epochs %{customdata[0]}, %{customdata[1]} seeds<extra>%{fullData.name}</extra>",
    }, ...seedPoints(own, (line) => place(line) + aside, metric, { name: `${protocol}, seeds`, legendgroup: protocol, marker: { color: PALETTE[number % PALETTE.length], size: 4 } })];
  });
  const title = `${x === "flops" ? "FLOPs" : "time"} of all models, standard training is 1`;
  plot(element, traces, { height: 460, xaxis: { title: { text: title } }, yaxis: scoreAxis(metric) });
}

function spread(metric, lines) {
  // bars of a mean: its interval, else the range of two seeds
  const [down, up] = [0, 1].map((side) => lines.map((line) => metric.scale * (isNumber(line.score_interval) ? line.score_interval : line.score_range ? Math.abs(line.score_range[side] - line.score) : 0)));
  return { symmetric: false, array: up, arrayminus: down };
}

function seedPoints(lines, place, metric, look) {
  // every seed where there are too few for an interval
  const few = lines.filter((line) => !isNumber(line.score_interval) && (line.scores || []).length > 1);
  if (!few.length) return [];
  return [{ x: few.flatMap((line) => line.scores.map(() => place(line))), y: few.flatMap((line) => scaled(metric, line.scores)), mode: "markers", showlegend: false, hoverinfo: "y", ...look }];
}

function drawForest(element, lines, metric) {
  // one budget: protocols below each other, the best on top, are easier to read than points on one spot
  const sorted = [...lines].sort((a, b) => (metric.higher_is_better ? 1 : -1) * (a.score - b.score));
  const name = (line) => `${line.protocol} (${digits(line.flops, 3)})`;
  const trace = {
    x: sorted.map((line) => metric.scale * line.score), y: sorted.map(name), mode: "markers", showlegend: false,
    error_x: { type: "data", ...spread(metric, sorted), color: style("--quiet"), thickness: 1.2, width: 4 },
    marker: { size: 9, color: sorted.map((line) => (line.protocol.startsWith("rbdc") ? style("--level1") : line.protocol === "standard" ? style("--text") : style("--accent"))) },
    customdata: sorted.map((line) => [epochsOf(line), line.seeds, scoreText(metric, line.score)]),
    hovertemplate: "%{customdata[2]}<br>epochs %{customdata[0]}, %{customdata[1]} seeds<extra></extra>",
  };
  const axis = scoreAxis(metric), how = sorted.every((line) => isNumber(line.score_interval)) ? "mean and 95 % interval" : "mean and interval, or range of two seeds";
  axis.title.text = `${metric.axis}, ${how}; in brackets FLOPs`;
  plot(element, [trace], { height: 100 + 26 * sorted.length, xaxis: axis });
}

function epochsOf(line) {
  const levels = Object.keys(line.epochs).map(Number).sort((a, b) => b - a).map((level) => line.epochs[level]);
  return levels.map((counts) => [...new Set(counts.map((count) => digits(count, 3)))].join("+")).join(" / ");
}

// Weights

function halves(sizes) {
  // of n x n blocks: off-diagonal over diagonal of the 2 x 2 split
  const n = Math.sqrt(sizes.length), sums = [0, 0];
  sizes.forEach((size, i) => { sums[Math.floor(i / n) < n / 2 === i % n < n / 2 ? 0 : 1] += size * size; });
  return sums[0] > 0 ? Math.sqrt(sums[1] / sums[0]) : null;
}

const relative = (blocks) => blocks.sizes.map((layers) => layers.map(halves)); // [time][layer]
const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;

function drawGrown(element, nodes) {
  const traces = nodes.map((node, number) => {
    const standard = node.name.startsWith("standard"), values = relative(node.blocks).map((layers) => mean(layers.filter(isNumber)));
    return {
      x: node.blocks.epoch, y: values, name: shortName(node), mode: "lines+markers", marker: { size: 6, symbol: SHAPES[number % SHAPES.length] },
      line: { color: standard ? style("--quiet") : levelColour(node.level), dash: standard ? "dash" : "solid", width: 1.5 },
    };
  });
  plot(element, traces, { height: 320, xaxis: { title: { text: "epochs since the coupling" }, rangemode: "tozero" }, yaxis: { title: { text: "off-diagonal / diagonal" }, rangemode: "tozero" } });
}

function drawLayers(element, blocks, choose) {
  const values = relative(blocks), count = blocks.names.length;
  const z = blocks.names.map((_, layer) => values.map((layers) => layers[layer]));
  const trace = {
    type: "heatmap", x: blocks.epoch.map((epoch) => digits(epoch, 3)), y: blocks.names, z, colorscale: "Cividis", zmin: 0, zmax: Math.max(...z.flat()),
    colorbar: { title: { text: "off / on", side: "right" }, thickness: 12 }, hovertemplate: "%{y}<br>epoch %{x}: %{z:.3f}<extra></extra>",
  };
  plot(element, [trace], {
    height: 110 + 15 * count, xaxis: { title: { text: "epochs" }, type: "category", nticks: 12 },
    yaxis: { autorange: "reversed", tickfont: { size: 11 }, dtick: 1, showgrid: false }, margin: { l: 60, r: 8, t: 10, b: 48 },
  }, (point) => choose(blocks.names.indexOf(point.y)));
}

function drawBlocks(element, sizes) {
  const n = Math.sqrt(sizes.length), names = [...Array(n).keys()].map((i) => `leaf ${i + 1}`);
  const z = names.map((_, row) => sizes.slice(row * n, (row + 1) * n));
  const trace = {
    type: "heatmap", x: names, y: names, z, colorscale: "Cividis", zmin: 0, zmax: Math.max(...sizes), showscale: true, colorbar: { thickness: 12 },
    texttemplate: n <= 4 ? "%{z:.3~g}" : "", hovertemplate: "out of %{x}, into %{y}: %{z:.4~g}<extra></extra>", xgap: 2, ygap: 2,
  };
  plot(element, [trace], {
    height: 340, xaxis: { title: { text: "input" }, constrain: "domain" },
    yaxis: { title: { text: "output" }, autorange: "reversed", scaleanchor: "x", constrain: "domain" }, margin: { l: 60, r: 8, t: 10, b: 48 },
  });
}
