/** Which map to believe: measures of the maps on the screen, as a table and as curves. */
import { fill, h, labelled, option, problem, swatch } from "../dom.js";
import { lineChart } from "../lib/charts.js";
import { count, number, targetName } from "../lib/words.js";
import { mainModel, on, requestFor, state } from "../state.js";
import { imageOf } from "../run.js";
import { api, guarded, sentence } from "../server.js";

const EDGES = ["left", "top", "right", "bottom"];

const spaced = (name) => name.replaceAll("_", " ");
const chosen = new Set(["deletion", "insertion", "sparseness"]);
const options = h("div.metrics", { role: "group", "aria-label": "Measures" });
const box = h("div.edges", { role: "group", "aria-label": "Box of the object, in pixels of the photo", "data-field": "box" });
const cost = h("p.hint");
const start = h("button.primary", { onclick: evaluate }, "Evaluate");
const stop = h("button", { hidden: true, onclick: () => running?.abort() }, "Cancel");
const result = h("div.stack", { "aria-live": "polite" });

let running = null;

export function evaluatePanel() {
  return h("div.stack", h("p.hint", "A map is to be believed if the model changes its mind where the map says that it looks. Compare with the baselines edges and random: a map that is not better says nothing."), options, box, h("div.row", start, stop, cost), result);
}

function show() {
  fill(options, state.metrics.map(choiceOf));
  showBox();
  showCost();
}

const better = (higherIsBetter) => `${higherIsBetter ? "higher" : "lower"} is better`;

function choiceOf({ name, summary = "", paper = "", higherIsBetter = false }) {
  return option(name, chosen.has(name), toggle, { text: spaced(name), hint: `${summary}: ${better(higherIsBetter)}.`, title: paper });
}

function toggle(name, isOn) {
  if (isOn) chosen.add(name);
  else chosen.delete(name);
  showBox();
  showCost();
}

const chosenMetrics = () => state.metrics.filter(({ name }) => chosen.has(name));

/** Show the object's box if a chosen measure needs it; the middle of the photo is the first guess. */
function showBox() {
  const { photo } = state;
  box.hidden = !photo?.width || !chosenMetrics().some(({ needsBox }) => needsBox);
  if (box.hidden || box.dataset.photo === photo.name) return;
  box.dataset.photo = photo.name;
  const { width, height } = photo;
  const values = [width / 4, height / 4, (3 * width) / 4, (3 * height) / 4];
  fill(box, EDGES.map((edge, index) => labelled(edge, h("input", { type: "number", name: edge, step: "any", value: Math.round(values[index]) }))));
}

function boxOf() {
  return Object.fromEntries(EDGES.map((edge) => [edge, Number(box.querySelector(`[name=${edge}]`).value)]));
}

function showCost() {
  const metrics = chosenMetrics();
  const mapRows = Math.max(1, state.cost?.rows ?? 1);
  const rows = metrics.reduce((sum, { rows: each = 0, repeats }) => sum + each * (repeats ? mapRows : state.cells.length), mapRows);
  cost.textContent = metrics.length ? `About ${count(rows, "row")} through the model.` : "Choose a measure.";
  start.disabled = !metrics.length || !state.photo || running !== null;
}

async function evaluate() {
  running = new AbortController();
  stop.hidden = false;
  showCost();
  fill(result, h("p.hint", { role: "status" }, "Evaluating…"));
  try {
    const explain = { ...requestFor(mainModel().name), image: await imageOf(state.photo), rendering: {}, classMap: false };
    const metrics = chosenMetrics();
    const request = { explain, metrics: metrics.map(({ name }) => ({ name })), ...(box.hidden ? {} : { box: boxOf() }) };
    const { signal } = running;
    const response = await guarded(() => api.call("EvaluateService/Evaluate", request, { signal }));
    showReadings(response, metrics);
  } catch (error) {
    fill(result, error.code === "canceled" ? h("p.hint", "Cancelled.") : problem(sentence(error.message)));
  } finally {
    running = null;
    stop.hidden = true;
    showCost();
  }
}

function nameOf(explanation) {
  return [explanation.method, explanation.layer, targetName(explanation)].filter(Boolean).join(" · ");
}

function showReadings({ explained = {}, readings = [] }, metrics) {
  const names = (explained.explanations ?? []).map(nameOf);
  fill(result, tableOf(names, readings, metrics), metrics.map((metric) => curvesOf(metric, names, readings)));
}

const readingOf = (readings, explanation, name) => readings.find((reading) => (reading.explanation ?? 0) === explanation && reading.metric === name);

function tableOf(names, readings, metrics) {
  const head = h("tr", h("th", { scope: "col" }, "Map"), metrics.map(({ name, higherIsBetter }) => h("th", { scope: "col" }, `${spaced(name)} `, h("small", better(higherIsBetter)))));
  const bests = metrics.map((metric) => bestOf(metric, readings));
  const rows = names.map((name, index) => h("tr", h("th", { scope: "row" }, name), metrics.map((metric, at) => cellOf(readingOf(readings, index, metric.name), bests[at]))));
  return h("div.scrolls", { tabindex: "0", role: "region", "aria-label": "Readings" }, h("table", h("thead", head), h("tbody", rows)));
}

function bestOf({ name, higherIsBetter }, readings) {
  const values = readings.filter(({ metric, message }) => metric === name && !message).map(({ value = 0 }) => Number(value)).filter(Number.isFinite);
  return values.length > 1 ? Math[higherIsBetter ? "max" : "min"](...values) : NaN;
}

function cellOf(reading, best) {
  if (!reading) return h("td", "–");
  const value = Number(reading.value ?? 0);
  if (reading.message) return h("td", h("small.hint", reading.message));
  return h("td", value === best ? h("strong", { title: "the best" }, `${number(value)} ★`) : number(value));
}

function curvesOf({ name }, names, readings) {
  const series = names.flatMap((title, index) => {
    const curves = readingOf(readings, index, name)?.curves ?? [];
    return curves.map(({ name: curve = "", x = [], y = [] }) => ({
      name: curves.length > 1 ? `${title}, ${curve}` : title,
      points: x.map((at, point) => ({ x: Number(at), y: Number(y[point]) })),
    }));
  });
  if (!series.length) return null;
  const chart = lineChart({ title: `Curves of ${name}`, description: "One line for each map.", series, xLabel: "Share", yLabel: spaced(name) });
  const legend = h("ul.legend", series.map(({ name: text }, index) => h("li", swatch(`var(--series-${index % 6})`), text)));
  return h("section", h("h3", spaced(name)), chart, legend);
}

on("models", show);
on(["cost", "results"], showCost);
on("picture", showBox);
on("photo", () => {
  running?.abort();
  fill(result);
  showBox();
  showCost();
});
