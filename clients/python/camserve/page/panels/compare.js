/** Two maps compared: their difference, where only one is strong, and how far they agree, in words. */
import { choice, fill, framed, h, labelled, segmented } from "../dom.js";
import { compareMaps, difference, overlap } from "../lib/compare.js";
import { barValues, complete, drawColorBar, drawMap, shown } from "../lib/draw.js";
import { onPixels, scalePhoto, valueAt } from "../lib/maps.js";
import { number, probability } from "../lib/words.js";
import { changed, on, state } from "../state.js";
import { titleOf } from "./cell.js";
import { styleOf } from "./look.js";

const MODES = [
  ["difference", "Difference"],
  ["overlap", "Overlap"],
];
const STRONGEST = 0.8; // quantile: the strongest fifth of each map
const COLOURS = ["", "#2f7de0", "#e2552d", "#f3c545"]; // only A, only B, both
const WIDTH = 480; // pixels of the picture

const body = h("div.stack");
let mode = "difference";

export function comparePanel() {
  return body;
}

function pair() {
  const byId = (id) => state.cells.find((cell) => cell.id === id);
  const [a, b] = state.picks.map(byId);
  const first = a ?? state.cells[0];
  return [first, b ?? state.cells.find((cell) => cell !== first)];
}

function show() {
  const [a, b] = pair();
  if (!a || !b) return fill(body, h("p.hint", "Add a method, a target, a layer or a model: two maps can be compared."));
  const canvas = h("canvas.map", { "aria-hidden": "true" });
  const picture = h("div.picture.compared", h("img", { src: a.source.url, alt: "" }), canvas);
  picture.style.aspectRatio = `${a.photo.width} / ${a.photo.height}`;
  const legend = h("div.stack");
  const pick = segmented("Compare by", MODES, mode, (value) => {
    mode = value;
    draw(canvas, legend, a, b);
  });
  const reading = h("div.stack", pick, legend, wordsOf(a, b));
  fill(body, h("div.pair", picker("A", a, b), picker("B", b, a)), h("div.sides", picture, reading));
  draw(canvas, legend, a, b);
}

function picker(letter, cell, other) {
  const options = state.cells.filter((option) => option !== other).map((option) => [option.id, titleOf(option)]);
  const pick = (id) => {
    state.picks = letter === "A" ? [id, other.id] : [other.id, id];
    changed("picks");
  };
  return labelled(`Map ${letter}`, choice(options, cell.id, pick));
}

/** Return the map of B over the part of the photo that A covers: models may see different parts. Elsewhere it is 0. */
function registered(a, b) {
  if (JSON.stringify(a.photo) === JSON.stringify(b.photo)) return b.map;
  const { left, top, right, bottom } = a.photo.seen;
  const [height, width] = [Math.max(a.map.height, b.map.height), Math.max(a.map.width, b.map.width)];
  const data = Float32Array.from({ length: height * width }, (_, index) => {
    const x = left + (((index % width) + 0.5) / width) * (right - left);
    const y = top + ((Math.floor(index / width) + 0.5) / height) * (bottom - top);
    return valueAt(b.map, b.photo, x, y) ?? 0;
  });
  return { height, width, data };
}

/** Return the values of both maps that are shown, over the same part of the photo. */
function shownPair(a, b) {
  return [shown(a.map, complete(styleOf(a)).sign), shown(registered(a, b), complete(styleOf(b)).sign)];
}

function wordsOf(a, b) {
  const [first, second] = shownPair(a, b);
  const { spearman, pearson, iou, text } = compareMaps(first, second);
  const facts = [
    ["Rank correlation", number(spearman)],
    ["Correlation", number(pearson)],
    ["Overlap of the strongest fifths", Number.isFinite(iou) ? probability(iou) : "–"],
  ];
  return [h("p.verdict", text), h("dl.facts", facts.map(([name, value]) => [h("dt", name), h("dd", value)]))];
}

function draw(canvas, legend, a, b) {
  const { width, height } = a.photo;
  Object.assign(canvas, { width: WIDTH, height: Math.max(1, Math.round((WIDTH * height) / width)) });
  canvas.style.opacity = Math.max(state.style.opacity, 0.6);
  if (mode === "overlap") drawOverlap(canvas, legend, a, b);
  else drawDifference(canvas, legend, a, b);
}

/** Draw A − B: in raw values with a shared scale, otherwise each divided by its own. */
function drawDifference(canvas, legend, a, b) {
  const isShared = state.style.scale === "shared";
  const map = difference(a.map, registered(a, b), isShared ? [1, 1] : [a.scale, b.scale]);
  const style = { sign: "both", smooth: state.style.smooth };
  const scale = drawMap(canvas, map, a.photo, style, { inputSize: a.inputSize });
  const bar = h("canvas.colours", { width: 128, height: 1, "aria-hidden": "true" });
  drawColorBar(bar, style);
  const unit = isShared ? "In raw values." : "Each map is divided by its strongest value first.";
  fill(legend, bar, h("div.ticks", h("span", `B stronger, ${number(barValues(style, scale)[0])}`), h("span", `A stronger, ${number(scale)}`)), h("p.hint", unit));
}

function drawOverlap(canvas, legend, a, b) {
  const [first, second] = shownPair(a, b);
  const mask = overlap(first, second, STRONGEST);
  const display = scalePhoto(a.photo, canvas.width, canvas.height);
  const field = onPixels({ ...mask, data: Float32Array.from(mask.data) }, display, false);
  const context = canvas.getContext("2d");
  for (let y = 0; y < field.height; y++) {
    for (let x = 0; x < field.width; x++) {
      const colour = COLOURS[field.data[y * field.width + x]];
      if (!colour) continue;
      context.fillStyle = colour;
      context.fillRect(field.left + x, field.top + y, 1, 1);
    }
  }
  const share = (kind) => probability(mask.data.filter((value) => value === kind).length / mask.data.length);
  const entries = ["only A", "only B", "both"].map((name, index) => h("li", swatch(COLOURS[index + 1]), `${name}: ${share(index + 1)} of the map`));
  fill(legend, h("ul.legend", entries), h("p.hint", "Where each map is among its strongest fifth."));
}

function swatch(colour) {
  const node = h("span.swatch", { "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}

on(["results", "picks", "photo"], show);
on("style", framed(show));
