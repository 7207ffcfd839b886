/** The predictions with bars; a click explains one, adds it, or contrasts it with the explained one. */
import { byId, fill, h, segmented, swatch } from "../dom.js";
import { className, count, probability } from "../lib/words.js";
import { mainTask, on, state } from "../state.js";
import { choose, classOf, isAsked } from "../targets.js";
import { classColour } from "./marks.js";

const FIRST = 5;
const MODES = [
  ["only", "Explain"],
  ["add", "Add"],
  ["contrast", "Contrast"],
];
const MODE_HINTS = {
  only: "Click a prediction to see why the model made it.",
  add: "Click predictions to add their maps, or to remove them.",
  contrast: "Click another prediction to see why the model prefers the explained one to it.",
};

let mode = "only";
let showAll = false;

/** Return what a click on a prediction does: "only", "add" or "contrast". */
export const clickMode = () => (mode === "contrast" && !hasClasses() ? "only" : mode);

const hasClasses = () => mainTask() !== "embed";

function draw() {
  const panel = byId("predictions");
  if (!panel) return;
  const results = state.results.filter(({ response }) => response);
  if (!results.length) return fill(panel, waitingText());
  const modes = hasClasses() ? MODES : MODES.slice(0, 2);
  const hint = h("p.hint", MODE_HINTS[clickMode()]);
  const pickMode = segmented("A click on a prediction", modes, clickMode(), (value) => {
    mode = value;
    hint.textContent = MODE_HINTS[mode];
  });
  fill(panel, h("h2", "Predictions"), h("div.row", pickMode), hint, results.map((result, index) => listOf(result, index, results.length)));
}

function waitingText() {
  if (!state.photo || state.run.status !== "running") return null;
  return [h("h2", "Predictions"), h("div.skeleton"), h("div.skeleton"), h("div.skeleton")];
}

function listOf({ model, response }, index, models) {
  const { predictions = [], unchangedPredictions: before = [] } = response;
  const title = [models > 1 ? h("h3", model) : null, before.length ? h("p.hint", `Without interventions: ${className(before[0])}, ${valueOf(before[0])}.`) : null];
  if (!predictions.length) return [title, h("p.hint", emptyText())];
  const shown = showAll ? predictions : predictions.slice(0, FIRST);
  const items = shown.map((prediction) => h("li", row(prediction, index === 0, before)));
  const more = predictions.length > FIRST && h("button.quiet", { onclick: toggleAll }, showAll ? "Show fewer" : `Show ${count(predictions.length - FIRST, "more").replace(/s$/, "")}`);
  return [title, h("ol.predictions", { "aria-label": `Predictions of ${model}` }, items), more];
}

const emptyText = () =>
  mainTask() === "embed" ? "This model returns an embedding, so it has no classes. Add a text or another photo as target." : "The model found nothing in this photo.";

function toggleAll() {
  showAll = !showAll;
  draw();
}

const valueOf = ({ probability: share = 0, score = 0 }) => (mainTask() === "regress" ? score.toPrecision(3) : probability(share));

function row(prediction, isMain, before) {
  const { classIndex = 0, probability: share = 0, area = 0 } = prediction;
  const old = mainTask() !== "detect" && before.find((other) => (other.classIndex ?? 0) === classIndex);
  const bar = h("span.bar", { "aria-hidden": "true" });
  bar.style.width = `${Math.max(0.5, 100 * share)}%`;
  const colour = mainTask() === "segment" ? swatch(classIndex ? classColour(classIndex) : "transparent") : null;
  const parts = [bar, colour, h("span.name", className(prediction)), h("span.value", valueOf(prediction)), old ? h("small", `was ${valueOf(old)}`) : null, area ? h("small", `${probability(area)} of the photo`) : null];
  const against = state.ask.targets.some(({ contrast }) => contrast?.whyNot?.classIndex === classIndex);
  const pressed = isAsked(prediction) || against || isExplained(classIndex, isMain);
  return h("button", { class: against ? "prediction against" : "prediction", "aria-pressed": String(pressed), onclick: () => choose(prediction, clickMode()) }, parts);
}

/** Return true if no target is chosen and a map explains the class, or if a contrast explains it. */
function isExplained(classIndex, isMain) {
  if (state.ask.targets.length) return state.ask.targets.some((target) => target.contrast && classOf(target) === classIndex);
  const models = state.cells.filter(({ model }) => !isMain || model === state.ask.models[0]);
  return mainTask() !== "detect" && models.some(({ explanation }) => (explanation.target?.classIndex ?? 0) === classIndex);
}

on(["results", "run", "ask"], draw);
