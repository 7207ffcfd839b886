/** The layers over depth: a chart of their statistics, and the features of one that is clicked. */
import { choice, fill, h, labelled, problem } from "../dom.js";
import { lineChart } from "../lib/charts.js";
import { number, targetName } from "../lib/words.js";
import { on, state } from "../state.js";
import { api, guarded, sentence } from "../server.js";
import { featuresPart, layerRequest, resetFeatures, showFeatures } from "./features.js";

const MEASURES = [
  ["gradient.norm", "Gradient: norm", true],
  ["gradient.zeros", "Gradient: share of zeros", false],
  ["activation.norm", "Output: norm", true],
  ["activation.std", "Output: standard deviation", true],
  ["activation.zeros", "Output: share of zeros", false],
];
const chart = h("div");
const start = h("button.primary", { onclick: inspect }, "Measure all layers");
const body = h("div.stack", h("p.hint", "One forward and one backward pass show where in the model the score arises, or where its gradient vanishes."), h("div.row", start), chart, featuresPart());

let measure = "gradient.norm";
let inspected = null;
let turn = 0; // of the requests: an answer to an older one is dropped

export const depthPanel = () => body;

async function inspect() {
  const mine = ++turn;
  start.disabled = true;
  fill(chart, h("p.hint", { role: "status" }, "Measuring…"));
  try {
    const response = await guarded(async () => api.call("ExplainService/InspectLayers", await layerRequest()));
    if (mine !== turn) return;
    inspected = response;
    showChart();
  } catch (error) {
    if (mine === turn) fill(chart, problem(sentence(error.message)));
  } finally {
    start.disabled = false;
  }
}

function showChart() {
  const layers = (inspected.layers ?? []).filter(({ container, elements }) => !container && Number(elements ?? 0) > 0);
  const [, title, logarithmic] = MEASURES.find(([key]) => key === measure);
  const [part, name] = measure.split(".");
  const points = layers.map((layer, index) => ({ x: index, y: Number(layer[part]?.[name] ?? 0), label: `${layer.name} (${layer.type})`, layer: layer.name }));
  const svg = lineChart({
    title: `${title} of each layer`,
    description: `For ${targetName(inspected)}, ${layers.length} layers from the input to the output.`,
    series: [{ name: title, points }],
    xLabel: "Layers, from input to output",
    yLabel: title,
    logarithmic,
    xTicks: false,
    onPick: (_, point) => showFeatures(point.layer),
  });
  const pick = choice(MEASURES, measure, (value) => {
    measure = value;
    showChart();
  });
  const troubled = layers.filter(({ activation, gradient }) => Number(activation?.nonFinite ?? 0) + Number(gradient?.nonFinite ?? 0) > 0);
  fill(
    chart,
    h("div.row", labelled("Measure", pick), h("p.hint", `For ${targetName(inspected)}, score ${number(inspected.score ?? 0)}. Click a point, or move with the arrow keys and press Enter, to see its channels.`)),
    troubled.length ? h("p.warning", `Not finite: ${troubled.map((layer) => layer.name).join(", ")}.`) : null,
    svg,
  );
}

function reset() {
  turn++;
  inspected = null;
  fill(chart);
  resetFeatures();
  start.disabled = !state.photo;
}

on(["photo", "models"], reset);
