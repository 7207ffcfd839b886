// Links, words and the numbers of charts.
import assert from "node:assert/strict";
import { test } from "node:test";
import { powers, ticks } from "../../../clients/python/camserve/page/lib/charts.js";
import { readLink, writeLink } from "../../../clients/python/camserve/page/lib/link.js";
import * as words from "../../../clients/python/camserve/page/lib/words.js";

const STATE = {
  request: {
    model: "resnet50",
    methods: [{ name: "gradcam" }, { name: "smoothgrad", parameters: { samples: { number: 32 } } }],
    targets: [{ label: "tabby ü </script>" }, { contrast: { why: { classIndex: 281 }, whyNot: { label: "lynx" } } }],
    topK: 2,
  },
  style: { sign: "both", scale: "shared", threshold: { quantile: 0.8 }, fade: true, smooth: false, opacity: 0, contourLines: 0 },
  view: { models: ["resnet50", "vit"], layers: { resnet50: ["layer4"] }, regions: true },
};

test("a link restores the state, and only has characters of a fragment", () => {
  const link = writeLink(STATE);
  assert.match(link, /^[\w.-]+$/);
  assert.ok(link.length < 700, `${link.length} characters`);
  assert.deepEqual(readLink(`#${link}`), STATE);
});

test("a link keeps interventions, and the values and bands of a photo", () => {
  const interventions = { resnet50: [{ layer: "layer4", channels: [12, 40], silence: true }, { layer: "a", clamp: { minimum: 0 } }] };
  const state = { request: { valueRange: { minimum: 0, maximum: 4095 } }, style: {}, view: { interventions, bands: [3, 2, 1], window: { centre: 40, width: 400 } } };
  assert.deepEqual(readLink(writeLink(state)), state);
});

test("a link has no photo, no mask, and no photo of a similarity", () => {
  const photo = "A".repeat(1000);
  const targets = [{ similarity: { image: photo } }, { segment: { className: { label: "cat" }, mask: photo } }];
  const link = writeLink({ request: { image: photo, targets } });
  assert.ok(link.length < 150);
  assert.deepEqual(readLink(link).request, { targets: [{ similarity: {} }, { segment: { className: { label: "cat" } } }] });
});

test("a link without a state has the defaults", () => {
  assert.deepEqual(readLink(writeLink({})), { request: {}, style: {}, view: {} });
});

const encoded = (text) => `1.${Buffer.from(text).toString("base64url")}`;

for (const rubbish of ["", "#", "about", "1.", "1.%%%", "2.e30", encoded("{"), encoded("null"), encoded("{}"), "1.gICA", encoded("[".repeat(3000)), `1.${"A".repeat(9000)}`]) {
  test(`rubbish is no state: ${rubbish.slice(0, 12)}`, () => assert.equal(readLink(rubbish), null));
}

test("values of the wrong type are left out", () => {
  const request = { model: 3, methods: ["a"], targets: "b", topK: -1, unknown: 1, fusion: "FUSION_MAX" };
  const style = { opacity: 2, scale: -1, threshold: { quantile: 7 }, contourLines: 99, fade: "yes", colormap: "jet" };
  const view = { models: [1], layers: { a: "b" }, interventions: { a: [{ layer: "b", channels: "c", silence: true }] }, bands: [-1], peak: 1, regions: false };
  assert.deepEqual(readLink(encoded(JSON.stringify([request, style, view]))), { request: { fusion: "FUSION_MAX" }, style: { colormap: "jet" }, view: { regions: false } });
});

test("a link has only what the controls of the look can show", () => {
  const hidden = [{ threshold: { value: 1e30 } }, { threshold: { quantile: 0.5, value: 1e30 } }, { threshold: { quantile: 1 } }, { scale: 1e30 }, { sign: "none" }, { colormap: "black" }, { contourLines: 9 }];
  for (const style of hidden) assert.deepEqual(readLink(encoded(JSON.stringify([{}, style, {}]))).style, {});
  const shown = { threshold: { quantile: 0.95 }, scale: "map", sign: "absolute", colormap: "viridis", contourLines: 8 };
  assert.deepEqual(readLink(encoded(JSON.stringify([{}, shown, {}]))).style, shown);
});

test("names in the targets of a link are texts and numbers", () => {
  const attributes = { ONCLICK: "alert(1)", onclick: "alert(1)" };
  const wrong = [{ text: attributes }, { label: attributes }, { classIndex: attributes }, { classIndex: "1" }, { contrast: { why: { label: attributes } } }, { contrast: { why: null } }, { finer: { against: [{ label: attributes }] } }, { finer: [[1]] }];
  for (const target of wrong) assert.deepEqual(readLink(encoded(JSON.stringify([{ targets: [target] }, {}, {}]))).request, {});
  const targets = [{ text: "a cat" }, { label: "cat", softmax: true }, { finer: { why: { classIndex: 1 }, against: [{ label: "dog" }], weight: 0.5 } }, { detection: { className: { classIndex: 0 }, box: { left: 1, right: 3 } } }];
  assert.deepEqual(readLink(encoded(JSON.stringify([{ targets }, {}, {}]))).request, { targets });
});

test("a link cannot reach the prototype of objects", () => {
  const found = readLink(encoded('[{"model":"a","__proto__":{"polluted":1}},{},{"constructor":{"prototype":{"polluted":1}},"toString":1,"peak":true,"layers":{"__proto__":["a"]}}]'));
  assert.deepEqual([found.request, found.view, {}.polluted], [{ model: "a" }, found.view, undefined]);
  assert.deepEqual([found.view.peak, Object.keys(found.view)], [true, ["peak", "layers"]]);
});

test("ticks are round numbers that cover the range", () => {
  assert.deepEqual(ticks(0, 1), [0, 0.2, 0.4, 0.6, 0.8, 1]);
  assert.deepEqual(ticks(-0.03, 0.31, 5), [0, 0.1, 0.2, 0.3]);
  assert.deepEqual(ticks(0, 52), [0, 20, 40]);
  assert.deepEqual(ticks(3, 3), [3]);
  assert.deepEqual(powers(0.02, 300), [0.01, 0.1, 1, 10, 100, 1000]);
  assert.ok(powers(1e-30, 1e30).length <= 7);
});

test("probabilities and numbers keep their meaning at the ends", () => {
  assert.deepEqual([0, 0.0001, 0.38, 0.9999, 1, NaN].map(words.probability), ["0.0 %", "<0.1 %", "38.0 %", ">99.9 %", "100.0 %", "–"]);
  assert.deepEqual([0, -0.05621, 1234567, 1e-9, null, Infinity].map(words.number), ["0", "−0.0562", "1.23e6", "1.00e−9", "–", "Infinity"]);
});

test("verdicts, costs, progress and targets are described in words", () => {
  assert.equal(words.warning({ verdict: "VERDICT_OK" }), "");
  assert.equal(words.warning({ verdict: "VERDICT_FLAT", verdictMessage: "the same everywhere" }), "Flat: the same everywhere");
  assert.equal(words.warning({ verdict: "VERDICT_OF_A_NEWER_SERVER" }), "Unknown verdict");
  assert.deepEqual(words.cost({ rows: 1, explanations: 1, maxRows: 2 }), { allowed: true, text: "1 map, 1 row through the model" });
  assert.match(words.cost({ rows: 20000, explanations: 4, maxRows: 16384 }).text, /^4 maps, 20,000 rows .*: the server allows 16,384 rows$/);
  assert.deepEqual(words.progress({ rowsDone: 5, rowsTotal: 20 }), { share: 0.25, text: "5 of 20 rows" });
  assert.equal(words.targetName({ target: { label: "tabby" }, contrast: { classIndex: 7 } }), "tabby, not class 7");
  assert.equal(words.targetName({}), "class 0");
});
