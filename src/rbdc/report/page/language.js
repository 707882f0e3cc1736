// What a page says of language models: tokens in place of images, and texts that they have written.
"use strict";

const isText = (r) => isNumber(r.data.train_tokens);

const textData = (data) => `${data.name}, ${data.train_tokens.toLocaleString("en")} training and ${data.test_tokens.toLocaleString("en")} test tokens${data.tokenizer ? ` by ${data.tokenizer}` : ""}, in sequences of ${data.sequence_length}`;

const speedOf = (node) => {
  if (!node.images || !node.seconds) return ["images a second", null];
  const each = node.sequence_length || 1;
  return [node.sequence_length ? "tokens a second" : "images a second", digits((each * node.images) / node.seconds, 3)];
};

const hasSamples = (nodes) => nodes.filter((node) => (node.samples || []).length);

function samplesSection(nodes) {
  // of the target and of standard training beside it; every text goes in as text
  const shown = hasSamples(nodes).filter((node) => node.level === 0);
  if (!shown.length) return [];
  return [
    h("h2", {}, "Texts that the models write"),
    h("p", { class: "quiet" }, "Each continues the first tokens of a test text, drawn at temperature 0.8 by the seed. What is given is grey."),
    ...shown.map((node) => [h("h3", {}, shortName(node)), ...node.samples.map((sample) => h("pre", { class: "sample" }, h("span", { class: "quiet" }, sample.prompt), sample.text))]),
  ];
}
