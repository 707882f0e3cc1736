// Detectors: what they found, how well, at what cost, and how far each of them is.
"use strict";

const detectorsOf = (r) => r.transfer.detectors.map((key) => r.nodes[key]);
const points = (value, sign) => (sign && value >= 0 ? "+" : "") + (100 * value).toFixed(1).replace("-", "−");
const cellText = (cell, sign = false) =>
  cell ? points(cell.mean, sign) + (isNumber(cell.spread) ? ` ± ${points(cell.spread)}` : "") : "–";
const count = (value) => (isNumber(value) ? value.toLocaleString("en") : "–");

function transferResult(r) {
  // the cells of the table of runs: result, FLOPs, and what standard training is no measure for
  const { precision, parts, columns } = r.transfer, [part, name] = parts[parts.length - 1], [title, score] = columns[0];
  const spent = detectorsOf(r).reduce((sum, node) => sum + (node.flops || 0), 0), [first] = precision[part];
  return [first ? `${name} ${title} ${cellText(first.cells[score])} %` : "–", flops(spent), "–"];
}

function transferVerdict({ precision, parts, columns }) {
  // by the first column of the tables, and the last part of them
  const [title, score] = columns[0], [part, name] = parts[parts.length - 1];
  const lines = precision[part].map((line, i) => {
    const more = line.more && line.more[score], first = precision[part][0];
    const start = `${line.backbone}: ${parts.map(([key, label]) => `${label} ${title} ${cellText(precision[key][i].cells[score])} %`).join(", ")}`;
    if (!more) return `${start}.`;
    const gap = Math.abs(100 * more.mean).toFixed(1);
    const than = Number(gap) === 0 ? `as ${first.backbone}` : `${gap} points ${more.mean > 0 ? "more" : "less"} ${name} ${title} than ${first.backbone}`;
    return `${start}; ${than}${isNumber(more.spread) ? `, ± ${points(more.spread)} over seeds` : "; one seed, so a hint, not a result"}.`;
  });
  return lines.length > 6 ? [...lines.slice(0, 6), "The others are in the tables."] : lines;
}

// Precision

function precisionSection({ precision, columns, parts }) {
  const title = h("h2", {}, "Precision");
  if (!precision.boxes.length) return [title, h("p", { class: "quiet" }, "No detector is trained yet.")];
  const many = precision.boxes.length > 1;
  return [
    title,
    h("p", { class: "quiet" }, "COCO's average precision on the validation images, in percent: over overlaps from 0.5 to 0.95 (mAP), at 0.5 and at 0.75, and of small, medium and large objects; – where there are none. ± is the standard deviation over seeds."
      + (many ? " Differences are between detectors of the same seed." : "")),
    precisionTable(precision, columns, parts),
    classTable(precision, parts),
  ];
}

function precisionTable(precision, columns, parts) {
  const [first, ...others] = precision.boxes;
  const titled = (title, rows) => [Object.assign([title], { title: true }), ...rows];
  const cells = (values, sign) => columns.map(([, score]) => cellText(values[score], sign));
  const rows = parts.flatMap(([part, name]) => [
    ...titled(name, precision[part].map((line) => [line.backbone, ...cells(line.cells, false), line.seeds])),
    ...(others.length ? titled(`${name}, difference from ${first.backbone}`, precision[part].slice(1).map((line) => Object.assign([line.backbone, ...cells(line.more, true), ""], { quiet: true }))) : []),
  ]);
  return table([["backbone"], ...columns.map(([title]) => [title, true]), ["seeds", true]], rows);
}

function classTable({ classes, boxes }, parts) {
  if (!classes.length) return null;
  const columns = boxes.flatMap((line) => parts.map(([, name]) => [boxes.length > 1 ? `${line.backbone} ${name}` : name, true]));
  const rows = classes.map((one) => [one.name, ...boxes.flatMap((_, i) => parts.map(([part]) => (isNumber(one[part][i]) ? points(one[part][i]) : "–")))]);
  return h("details", {}, h("summary", {}, `mAP by class (${classes.length})`), table([["class"], ...columns], rows));
}

// Pictures

function sheetSection(nodes, { sheet, size }, set) {
  const drawn = nodes.filter((node) => node.sheet !== undefined);
  if (!drawn.length) return [];
  const node = drawn.find(({ key }) => key === sheet) || drawn[0];
  return [
    h("h2", {}, "What they find"),
    h("p", { class: "quiet" }, "Some validation images, the same ones for every detector, with what it finds in them: masks, boxes, classes and scores in percent, of at least 50."),
    h("div", { class: "controls" },
      drawn.length > 1 ? choice("detector", drawn.map(({ key, name }) => [key, name]), node.key, (sheet) => set({ sheet })) : null,
      choice("size", [["fit", "fits the page"], ["full", "full"]], size, (size) => set({ size }))),
    h("figure", {},
      node.sheet ? h("div", { class: "scroll" }, h("img", { class: `sheet ${size}`, src: node.sheet, alt: `Predictions of ${node.name} on validation images: boxes, masks, classes and scores` })) : h("p", {}, "Too large for this page."),
      h("figcaption", { class: "quiet" }, `${node.name}; the file is ${node.folder}/sheet.png`)),
  ];
}

// States

function detectorsSection(nodes, metrics, chosen, choose) {
  const name = (node) => h("button", { type: "button", "aria-pressed": String(node.key === chosen), onclick: () => choose(node.key) }, node.name);
  const failed = nodes.filter((node) => node.error);
  return [
    h("h2", {}, "The detectors"),
    nodes.length ? table([["detector"], ["state"], ["epochs", true], ...metrics.map(({ label }) => [label, true]), ["FLOPs", true], ["planned", true], ["time", true]], nodes.map((node) => [
      name(node), h("span", { class: `state ${node.state}` }, `${MARKS[node.state]} ${stateText(node)}`), digits(node.epochs), ...metrics.map((metric) => scoreText(metric, node.metrics[metric.name], "")),
      flops(node.flops), flops(node.planned_flops), node.seconds ? duration(node.seconds) : "–",
    ])) : h("p", { class: "quiet" }, "No detectors are known of this run."),
    failed.map((node) => h("p", { class: "missing" }, `${node.name}: ${node.error}`)),
  ];
}

// Cost and data

function costSection({ costs }) {
  const title = h("h2", {}, "What a detector costs");
  if (!costs.length) return [title, h("p", { class: "quiet" }, "Written down when all detectors are trained.")];
  const size = (value) => (value >= 1e6 ? `${digits(value / 1e6)} M` : count(value));
  const rows = costs.flatMap((cost) => [
    Object.assign([cost.backbones.join(", ")], { title: true }),
    ...cost.parts.map((part) => [part.name, size(part.parameters), flops(part.flops)]),
    Object.assign(["all", size(cost.total_parameters), flops(cost.total_flops)], { first: true }),
  ]);
  const [{ height, width, proposals, detections }] = costs;
  return [
    title,
    table([["part"], ["parameters", true], ["FLOPs an image", true]], rows),
    h("p", { class: "quiet" }, `An image of ${height} x ${width} px, ${proposals} proposals, ${detections} masks. Matrix products, convolutions and attention are counted.`),
  ];
}

const SPLITS = [["train", "training"], ["val", "validation"]];

function splitsText(data) {
  const known = SPLITS.filter(([split]) => data[split]).map(([split, name]) => `${count(data[split].images)} ${name} images with ${count(data[split].objects)} objects`);
  return known.length ? known.join(", ") : null;
}

function dataSection(data) {
  const known = SPLITS.filter(([split]) => data[split]);
  if (!known.length) return [];
  const dropped = (split) => Object.entries(split.dropped || {}).map(([why, number]) => `${count(number)} x ${why}`).join(", ") || "none";
  const names = (split) => split.class_names || [];
  return [
    h("h2", {}, "The data"),
    table([["split"], ["images", true], ["without objects", true], ["objects", true], ["crowds", true], ["classes", true]], known.map(([split, name]) => {
      const s = data[split];
      return [name, count(s.images), count(s.without_objects), count(s.objects), count(s.crowds), names(s).length];
    })),
    facts(known.flatMap(([split, name]) => [[`${name} annotations`, data[split].annotations], ["dropped of them", dropped(data[split])], ["their fingerprint", data[split].fingerprint]])),
    h("details", {}, h("summary", {}, `classes (${names(data[known[0][0]]).length})`), h("p", {}, names(data[known[0][0]]).join(", "))),
  ];
}

function loadDetectors(r) {
  const trained = detectorsOf(r).filter((node) => node.state === "done"), kind = r.recipe.model_ema ? "ema" : "model";
  if (!trained.length) return null;
  const place = JSON.stringify(`${r.folder}/${trained[0].folder}/${kind}`);
  return [
    h("h3", {}, "The detectors"),
    h("pre", {}, `from rbdc.transfer import load_detector\n\ndetector, class_names = load_detector(${place})\nfound = detector([image])[0]  # floats (3, H, W) in [0, 1]: boxes, labels from 1, scores, masks`),
    h("p", { class: "quiet" }, `${trained[0].name}, after its last epoch; best/ beside it has the best ${r.metrics[0].label}.${trained.length > 1 ? " The other detectors' folders are among their details, above." : ""}`),
  ];
}
