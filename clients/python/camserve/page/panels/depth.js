/** The layers over depth: a chart of their statistics, and the channels of one that is clicked. */
import { choice, fill, h, labelled, problem } from "../dom.js";
import { lineChart } from "../lib/charts.js";
import { number, targetName } from "../lib/words.js";
import { mainModel, on, state } from "../state.js";
import { imageOf } from "../run.js";
import { api, detailsOf, guarded, sentence } from "../server.js";
import { toggleLayer } from "./layers.js";

const MEASURES = [
  ["gradient.norm", "Gradient: norm", true],
  ["gradient.zeros", "Gradient: share of zeros", false],
  ["activation.norm", "Output: norm", true],
  ["activation.std", "Output: standard deviation", true],
  ["activation.zeros", "Output: share of zeros", false],
];
const RANKS = [
  ["CHANNEL_RANK_GRADIENT", "that matter most for the score"],
  ["CHANNEL_RANK_ACTIVATION", "that are most active"],
];

const chart = h("div");
const channels = h("div.stack");
const start = h("button.primary", { onclick: inspect }, "Measure all layers");
const body = h("div.stack", h("p.hint", "One forward and one backward pass show where in the model the score arises, or where its gradient vanishes."), h("div.row", start), chart, channels);

let measure = "gradient.norm";
let rank = "CHANNEL_RANK_GRADIENT";
let inspected = null;
let turn = 0; // of the requests: an answer to an older one is dropped

export const depthPanel = () => body;

/** Return the target of a request that accepts one: a segment or detection without its box, and no similarity. */
function targetOf() {
  const [target] = state.ask.targets;
  if (!target || target.similarity) return {};
  const kind = ["segment", "detection"].find((name) => target[name]);
  return { target: kind ? { [kind]: { className: target[kind].className } } : target };
}

async function inspect() {
  const mine = ++turn;
  start.disabled = true;
  fill(chart, h("p.hint", { role: "status" }, "Measuring…"));
  try {
    const image = await imageOf(state.photo);
    const request = { model: mainModel().name, image, ...targetOf() };
    const response = await guarded(() => api.call("ExplainService/InspectLayers", request));
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
    onPick: (_, point) => showChannels(point.layer),
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

async function showChannels(layer) {
  const mine = ++turn;
  fill(channels, h("h3", layer), h("p.hint", { role: "status" }, "Loading its channels…"));
  try {
    const request = { model: mainModel().name, image: await imageOf(state.photo), layer, rank, picture: "IMAGE_FORMAT_JPEG", ...targetOf() };
    const response = await guarded(() => api.call("ExplainService/ExtractFeatures", request));
    if (mine === turn) await showPicture(layer, response);
  } catch (error) {
    if (mine === turn) fill(channels, h("h3", layer), problem(sentence(error.message)));
  }
}

async function showPicture(layer, { picture, channels: found = [], channelCount = 0, gridHeight, gridWidth }) {
  const { layers } = await detailsOf(mainModel().name);
  const isExplainable = layers.find(({ name }) => name === layer)?.explainable;
  const pick = choice(RANKS, rank, (value) => {
    rank = value;
    showChannels(layer);
  });
  fill(
    channels,
    h("h3", `${layer}: ${found.length} of ${channelCount} channels, ${gridHeight} × ${gridWidth}`),
    h("div.row", labelled("Channels", pick), isExplainable ? h("button", { onclick: () => toggleLayer(layer, true) }, "Explain this layer") : null),
    h("img.tiles", { src: `data:image/jpeg;base64,${picture.data}`, alt: `The photo, and the channels of ${layer}: ${found.map(({ index = 0 }) => index).join(", ")}` }),
  );
}

function reset() {
  turn++;
  inspected = null;
  fill(chart);
  fill(channels);
  start.disabled = !state.photo;
}

on(["photo", "models"], reset);
