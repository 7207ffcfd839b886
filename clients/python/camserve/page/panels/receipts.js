/** Receipts: open one, take over its request, and compare its map with the one that is computed now. */
import { fill, h, problem, removeButton } from "../dom.js";
import { decodeMap, strongest } from "../lib/maps.js";
import { readReceipt, requestOf } from "../lib/receipt.js";
import { number } from "../lib/words.js";
import { ask, changed, modelNamed, on, state } from "../state.js";
import { sentence } from "../server.js";

const report = h("div.stack", { "aria-live": "polite" });

/** Return what an opened receipt is, and if the map is the same. */
export const receiptReport = () => report;

/** Open a receipt: the controls ask for its explanation. */
export async function openReceipt(file) {
  try {
    state.receipt = { name: file.name, content: readReceipt(await file.text()) };
  } catch (error) {
    state.receipt = null;
    fill(report, problem(`${file.name}: ${sentence(error.message)}`));
    return;
  }
  const { model, methods, targets, layers, interventions, fusion = "", valueRange = null } = requestOf(state.receipt.content);
  changed("receipt");
  ask({ ...(modelNamed(model) ? { models: [model] } : {}), methods, targets, layers: { ...state.ask.layers, [model]: layers }, interventions: { ...state.ask.interventions, [model]: interventions }, fusion, valueRange });
  show();
}

function show() {
  if (!state.receipt) return;
  const { name, content } = state.receipt;
  const cell = state.cells.find(({ response, explanation }) => response.receipt && explanation.method === content.method);
  const checks = cell ? checksOf(content, cell) : [];
  const close = () => {
    state.receipt = null;
    changed("receipt");
    fill(report);
  };
  fill(
    report,
    h("div.line", h("h3", `Receipt ${name}`), removeButton("Close the receipt", close)),
    h("p.hint", `${content.method} on ${content.layers.join(" + ") || "the pixels"}, model ${content.model}, score ${number(Number(content.score))}.`),
    checks.length ? h("ul.checks", checks.map(check)) : h("p", "Choose its photo to compute the map again."),
  );
}

function checksOf(content, { response: { receipt }, explanation, map }) {
  return [
    [content.image_sha256 === receipt.imageSha256, "The photo is the same.", "The photo is another file."],
    [content.digest === receipt.digest, "The model's weights are the same.", "The model's weights are different."],
    mapCheck(content.heatmap, map),
    [explanation.verdict === `VERDICT_${content.verdict}`, "The verdict is the same.", "The verdict is different."],
  ].filter(Boolean);
}

function mapCheck(recorded, map) {
  if (!recorded) return null;
  const before = decodeMap(recorded);
  if (before.height !== map.height || before.width !== map.width) return [false, "", "The map has another size."];
  const furthest = strongest(before.data.map((value, index) => value - map.data[index]));
  if (furthest === 0) return [true, "The map is the same, bit by bit."];
  const share = furthest / strongest(before.data);
  return [share < 1e-3, `The map is the same within ${number(share)} of its largest value.`, `The map differs by up to ${number(share)} of its largest value.`];
}

const check = ([isGood, good, bad]) => h("li", { class: isGood ? "good" : "bad" }, `${isGood ? "✓" : "✗"} ${isGood ? good : bad}`);

on("results", show);
