/** Two maps compared: their difference, where only one is hot, and how far they agree, in words and numbers. */
import { choice, fill, framed, h, labelled, segmented, swatch } from "../dom.js";
import { agreement, align, compareMaps, difference, overlap } from "../lib/compare.js";
import { barValues, drawColorBar, drawMap } from "../lib/draw.js";
import { keep, onPixels, scalePhoto, strongest } from "../lib/maps.js";
import { className, methodName, number, probability, targetName, verdictName } from "../lib/words.js";
import { changed, on, state } from "../state.js";
import { titleOf } from "./cell.js";

const MODES = [
  ["difference", "Difference"],
  ["overlap", "Overlap"],
];
const COLOURS = ["", "#2f7de0", "#e2552d", "#f3c545"]; // only A, only B, both
const WIDTH = 480; // pixels of the picture

const body = h("div.stack");
let mode = "difference";

export const comparePanel = () => body;

/** Return the picked maps; what is not picked is the same map of another model, or else another map. */
function pair() {
  const [a, b] = state.picks.map((id) => state.cells.find((cell) => cell.id === id));
  const first = a ?? state.cells[0];
  return [first, b ?? counterpart(first) ?? state.cells.find((cell) => cell !== first)];
}

/** Return the map of another model by the same method, for the same target if there is one. */
function counterpart(cell) {
  const alike = ({ explanation, index }) =>
    2 * (targetName(explanation) === targetName(cell.explanation)) + (index === cell.index);
  const others = state.cells.filter(({ model, explanation }) => model !== cell.model && methodName(explanation) === methodName(cell.explanation));
  return others.sort((one, other) => alike(other) - alike(one))[0];
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
  const [words, facts] = reading(a, b);
  fill(body, h("div.pair", picker("A", a, b), picker("B", b, a)), h("div.sides", picture, h("div.stack", words, pick, legend)), facts);
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

const aligned = (a, b) => keep(a.map, "aligned", b.map, () => align(a, b));

/** Return the comparison in words, and in numbers. */
function reading(a, b) {
  const numbers = keep(a.map, "compared", b.map, () => compareMaps(a, b));
  const { words, facts } = a.model === b.model ? { words: "", facts: [] } : modelsCompared(a, b);
  const all = [
    ["Rank correlation", written(numbers.spearman)],
    ["Overlap of the hottest fifths", probability(numbers.iou)],
    ["Shift of the centre", written(numbers.shift, " % of the diagonal")],
    ["SSIM", written(numbers.ssim)],
    ["Correlation", written(numbers.pearson)],
    ["KL divergence", written(numbers.kl, " nats")],
    ...facts,
  ];
  const list = h("dl.facts", all.map(([name, value]) => h("div", h("dt.hint", name), h("dd", value))));
  const hint = h("p.hint", "From the raw values, in the part of the photo that both maps cover.");
  return [[h("p.verdict", agreement(numbers.spearman)), words && h("p", words)], [list, hint]];
}

/** Write a number of a comparison; the tiny ones of maps that are the same are 0. */
const written = (value, unit = "") => (Number.isFinite(value) ? number(Math.abs(value) < 1e-4 ? 0 : value) + unit : "–");

/** Compare what two models answer: {words, facts}. */
function modelsCompared(...pair) {
  const [one, other] = pair.map(({ response }) => response.predictions?.[0]);
  const [first, second] = pair.map(({ explanation }) => explanation);
  const [before, after] = [first, second].map(({ verdict }) => verdictName(verdict));
  const words = [
    one && other && (isSameClass(one, other) ? `Both predict ${className(one)}.` : `A predicts ${className(one)}, B predicts ${className(other)}.`),
    isSameClass(first.target, second.target) ? "" : "The maps explain different classes.",
    before === after ? "" : "The verdict changed.",
  ];
  const facts = [
    ["Score", change(first.score, second.score, number)],
    ["Probability", change(first.target?.probability, second.target?.probability, probability, (value) => `${(100 * value).toFixed(1)} points`)],
    ["Verdict", before === after ? `${before}, unchanged` : `${before} → ${after}`],
  ];
  return { words: words.filter(Boolean).join(" "), facts };
}

const isSameClass = (one, other) => (one?.classIndex ?? 0) === (other?.classIndex ?? 0);

/** Describe a change from A to B; the API's JSON leaves out zeros, and NaN is a string. */
function change(before = 0, after = 0, format, formatChange = format) {
  const difference = after - before;
  if (!Number.isFinite(difference)) return "–";
  return `${format(before)} → ${format(after)} (${difference < 0 ? "−" : "+"}${formatChange(Math.abs(difference))})`;
}

function draw(canvas, legend, a, b) {
  const { width, height } = a.photo;
  Object.assign(canvas, { width: WIDTH, height: Math.max(1, Math.round((WIDTH * height) / width)) });
  canvas.style.opacity = Math.max(state.style.opacity, 0.6);
  if (mode === "overlap") drawOverlap(canvas, legend, a, b);
  else drawDifference(canvas, legend, a, b);
}

/** Draw A − B: in raw values with a shared scale, otherwise each divided by its largest magnitude. */
function drawDifference(canvas, legend, a, b) {
  const isShared = state.style.scale === "shared";
  const { box, fine } = aligned(a, b);
  const map = difference(...fine, isShared ? [1, 1] : fine.map(({ data }) => strongest(data)));
  const style = { sign: "both", smooth: state.style.smooth };
  const scale = drawMap(canvas, map, { ...a.photo, seen: box }, style, { inputSize: a.inputSize });
  const bar = h("canvas.colours", { width: 128, height: 1, "aria-hidden": "true" });
  drawColorBar(bar, style);
  const unit = isShared ? "In raw values." : "Each map is divided by its largest magnitude first.";
  fill(legend, bar, h("div.ticks", h("span", `B stronger, ${number(barValues(style, scale)[0])}`), h("span", `A stronger, ${number(scale)}`)), h("p.hint", unit));
}

function drawOverlap(canvas, legend, a, b) {
  const { box, coarse } = aligned(a, b);
  const mask = overlap(...coarse);
  const field = onPixels(mask, scalePhoto({ ...a.photo, seen: box }, canvas.width, canvas.height), false);
  const context = canvas.getContext("2d");
  field.data.forEach((kind, index) => {
    context.fillStyle = COLOURS[kind];
    if (kind) context.fillRect(field.left + (index % field.width), field.top + Math.floor(index / field.width), 1, 1);
  });
  const share = (kind) => probability(mask.data.filter((value) => value === kind).length / mask.data.length);
  const entries = ["only A", "only B", "both"].map((name, index) => h("li", swatch(COLOURS[index + 1]), `${name}: ${share(index + 1)} of the map`));
  fill(legend, h("ul.legend", entries), h("p.hint", "Where each map is among its hottest fifth."));
}

on(["results", "picks", "photo"], show);
on("style", framed(show));
