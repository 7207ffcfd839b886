/** The features of a layer: its channels, which can be switched off, its principal components, concepts or heads. */
import { checkbox, choice, fill, h, labelled, newId, problem } from "../dom.js";
import { isOff, toggleChannel } from "../interventions.js";
import { levels } from "../lib/colormaps.js";
import { bytesOf } from "../lib/maps.js";
import { className, probability } from "../lib/words.js";
import { mainModel, on, requestFor, state } from "../state.js";
import { imageOf } from "../run.js";
import { api, detailsOf, guarded, sentence } from "../server.js";
import { toggleLayer } from "./layers.js";

const RANKS = [
  ["GRADIENT", "channels that matter most for the score", "channels"],
  ["ACTIVATION", "channels that are most active", "channels"],
  ["PCA", "principal components, as colours", "components"],
  ["FACTORS", "concepts, by factorisation", "concepts"],
  ["HEADS", "attention of each head", "heads"],
];
const MOST_FITTED = 16; // photos

const listId = newId("layers");
const names = h("datalist", { id: listId });
const layer = h("input", { type: "search", list: listId, placeholder: "the usual one", onchange: load });
const kind = choice(RANKS, "GRADIENT", load);
const options = h("div.switches");
const result = h("div.stack", { "aria-live": "polite" });
const settings = { foreground: false, fit: false };

let turn = 0; // of the requests: an answer to an older one is dropped

export function featuresPart() {
  const fields = h("div.row", labelled("Kind", kind), labelled("Layer", layer), options, h("button", { onclick: load }, "Show features"));
  return h("section.stack", h("h3", "Features"), fields, names, result);
}

export function showFeatures(name) {
  layer.value = name;
  load();
}

export function resetFeatures() {
  turn++;
  fill(result);
}

/** Return the request for a measurement of layers: its target has no box or region, and is no similarity. */
export async function layerRequest() {
  const { model, targets: [target] = [], valueRange, interventions } = requestFor(mainModel().name);
  const part = ["segment", "detection"].find((name) => target?.[name]);
  const asked = part ? { [part]: { className: target[part].className } } : target;
  return { model, image: await imageOf(state.photo), valueRange, interventions, ...(asked && !asked.similarity && { target: asked }) };
}

async function load() {
  if (!state.photo) return;
  const mine = ++turn;
  const rank = kind.value;
  showOptions(rank);
  fill(result, h("p.hint", { role: "status" }, "Loading…"));
  try {
    const isChannels = nounOf(rank) === "channels";
    const { interventions, ...request } = await layerRequest();
    const look = isChannels ? { raw: true } : { picture: "IMAGE_FORMAT_JPEG", interventions };
    const pca = rank === "PCA" && { foreground: settings.foreground, fitImages: await others() };
    const response = await guarded(() => api.call("ExplainService/ExtractFeatures", { ...request, layer: layer.value, rank: `CHANNEL_RANK_${rank}`, ...look, ...pca }));
    if (mine === turn) await show(rank, response);
  } catch (error) {
    if (mine === turn) fill(result, problem(sentence(error.message)));
  }
}

const nounOf = (rank) => RANKS.find(([key]) => key === rank)[2];

function showOptions(rank) {
  const set = (name) => (isOn) => {
    settings[name] = isOn;
    load();
  };
  const fit = state.photos.length > 1 && checkbox("Same colours for all photos", settings.fit, set("fit"));
  fill(options, rank === "PCA" ? [checkbox("Without background", settings.foreground, set("foreground")), fit] : null);
}

/** Return the other photos, if components are fitted to all of them. */
function others() {
  if (!settings.fit) return [];
  return Promise.all(state.photos.filter((photo) => photo !== state.photo).slice(0, MOST_FITTED - 1).map(imageOf));
}

async function show(rank, { layer: name, picture, channels = [], channelCount = 0, gridHeight, gridWidth, maps }) {
  const { layers } = await detailsOf(mainModel().name);
  const isExplainable = layers.find((other) => other.name === name)?.explainable;
  const noun = nounOf(rank);
  const of = ["channels", "heads"].includes(noun) ? `${channels.length} of ${channelCount}` : channels.length;
  fill(
    result,
    h("div.row", h("h3", `${name}: ${of} ${noun}, ${gridHeight} × ${gridWidth}`), isExplainable && h("button", { onclick: () => toggleLayer(name, true) }, "Explain this layer")),
    picture ? pictureOf(picture, channels, noun) : tilesOf(name, channels, new Float32Array(bytesOf(maps).buffer), gridWidth, gridHeight),
  );
}

function pictureOf({ data }, channels, noun) {
  const items = channels.map(({ index = 0, share = 0, nearest = [] }) => h("li", `${index}: ${[probability(share), ...nearest.map(className)].join(", ")}`));
  return [h("img.tiles", { src: `data:image/jpeg;base64,${data}`, alt: `The ${noun} in the photo` }), h("ul.legend", { "aria-label": `Shares of the ${noun}` }, items)];
}

/** Return a button for each channel, which switches it off. */
function tilesOf(name, channels, values, width, height) {
  const tiles = channels.map(({ index = 0 }, at) => {
    const canvas = h("canvas", { width, height });
    paint(canvas.getContext("2d"), values.subarray(at * width * height, (at + 1) * width * height));
    return h("button.channel", { "data-channel": index, "aria-label": `Channel ${index} of ${name} is off`, onclick: () => toggleChannel(name, index) }, canvas, index);
  });
  const group = h("div.channels", { role: "group", "aria-label": `Channels of ${name}`, "data-layer": name }, tiles);
  press(group);
  return [h("p.hint", "Click a channel to switch it off: the predictions and the maps become those of the model without it."), group];
}

function press(group) {
  for (const tile of group.querySelectorAll("[data-channel]")) tile.setAttribute("aria-pressed", String(isOff(group.dataset.layer, Number(tile.dataset.channel))));
}

/** Colour a channel from its smallest to its largest value. */
function paint(context, values) {
  const { width, height } = context.canvas;
  const image = context.createImageData(width, height);
  const colours = levels("viridis");
  const low = values.reduce((least, value) => Math.min(least, value)); // a call cannot take all values of a large grid
  const range = values.reduce((most, value) => Math.max(most, value)) - low || 1;
  new Uint32Array(image.data.buffer).set(Array.from(values, (value) => colours[Math.round((255 * (value - low)) / range)]));
  context.putImageData(image, 0, 0);
}

on(["models", "ask"], async () => {
  result.querySelectorAll(".channels").forEach(press);
  const model = mainModel()?.name;
  if (!model || names.dataset.model === model) return;
  names.dataset.model = model;
  layer.value = "";
  resetFeatures();
  const { layers } = await detailsOf(model).catch(() => ({ layers: [] }));
  fill(names, layers.map(({ name }) => h("option", { value: name })));
});
