/** Card of a case: four pictures, the answers of both models, and the numbers. */
import { fill, h, swatch } from "../../page/dom.js";
import { agreement } from "../../page/lib/compare.js";
import { number, probability, warning } from "../../page/lib/words.js";
import { photoUrl, readCase } from "./data.js";
import { drawEvidence, drawOverlap, drawWipe, PARTS, pictureOf, sizeOf } from "./pictures.js";

const SIDE = 256; // pixels of a canvas's longer side; the photo has no more

/** Return a card: {node, draw}; `draw(colormap)` draws its maps. */
export function cardOf(entry, sources) {
  const { photos, maps, answers, ...rest } = readCase(entry.index);
  const url = photoUrl(entry.photo);
  const size = sizeOf(photos[0], SIDE);
  const canvas = () => h("canvas", { ...size, "aria-hidden": "true" });
  const [a, b, both] = [canvas(), canvas(), canvas()];
  const wipe = wipeOf(canvas(), a, b, entry.image);
  const shares = h("ul.parts");
  const pictures = h(
    "div.pictures",
    figure(pictureOf(url, size, a), answerOf("A", sources[0], answers[0])),
    figure(pictureOf(url, size, b), answerOf("B", sources[1], answers[1])),
    figure(pictureOf(url, size, both), h("strong", "The hottest fifth of each map"), shares),
    figure(pictureOf(url, size, wipe.nodes), h("strong", "Slide between A and B"), h("span", "A is to the left of the line.")),
  );
  const draw = (colormap) => {
    drawEvidence(a, maps[0], photos[0], colormap);
    drawEvidence(b, maps[1], photos[1], colormap);
    wipe.draw();
  };
  fill(shares, partsOf(drawOverlap(both, maps, photos)));
  return { node: h("div.body", aboutOf(entry, rest), pictures, factsOf(entry, answers, rest)), draw };
}

const figure = (picture, ...caption) => h("figure", picture, h("figcaption", caption));

function aboutOf({ method, layer, target, numbers }, { same_target }) {
  const what = [method, layer && `on ${layer}`, `for “${target}”`].filter(Boolean).join(" ");
  const notes = [agreement(numbers.spearman ?? NaN), same_target ? "" : "The two maps explain different classes."];
  return h("p.about", `${what}. `, h("span.muted", notes.filter(Boolean).join(" ")));
}

function answerOf(letter, source, { prediction, verdict }) {
  const says = prediction ? `predicts ${prediction[0]}, ${probability(prediction[1])}` : "";
  const trouble = warning({ verdict: `VERDICT_${verdict}` });
  return [
    h("strong", h("b.letter", letter), ` ${source}`),
    says && h("span", says),
    trouble && h("span.warning", `The map: ${trouble.toLowerCase()}`),
  ].filter(Boolean);
}

const partsOf = (shares) => PARTS.map(([colour, name], part) => h("li", swatch(colour), `${name}: ${probability(shares[part])}`));

/** Return a picture that shows one map to the left of a line and the other to its right: {nodes, draw}. */
function wipeOf(canvas, a, b, image) {
  const edge = h("span.edge", { "aria-hidden": "true" });
  const range = h("input.wipe", { type: "range", min: 0, max: 100, value: 50, "aria-label": `Slide between A and B: ${image}` });
  const draw = () => {
    drawWipe(canvas, a, b, range.value / 100);
    edge.style.left = `${range.value}%`;
    range.setAttribute("aria-valuetext", `${range.value} % of the width shows A`);
  };
  range.addEventListener("input", draw);
  return { nodes: [canvas, edge, range], draw };
}

function factsOf({ numbers }, [a, b], { box_energy: box }) {
  const change = (first, second, format) => `${format(first)} → ${format(second)}`;
  const percent = (value) => probability(value ?? NaN).replace(" ", "\u00a0");
  const facts = [
    ["Rank correlation", number(numbers.spearman)],
    ["Overlap of the hottest fifths", percent(numbers.iou)],
    ["Shift, of the photo’s diagonal", numbers.shift === null ? "–" : `${number(numbers.shift)}\u00a0%`],
    ["Towards randomised weights", percent(numbers.position)],
    ["SSIM", number(numbers.ssim)],
    ["Pearson’s correlation", number(numbers.pearson)],
    ["KL divergence", numbers.kl === null ? "–" : `${number(numbers.kl)} nats`],
    ["Score", change(a.score, b.score, number)],
    ["Probability", change(a.probability, b.probability, percent)],
    ...(box ? [["Evidence in the box", change(...box, percent)]] : []),
  ];
  return h("dl.facts", facts.map(([name, value]) => h("div", h("dt", name), h("dd", value))));
}
