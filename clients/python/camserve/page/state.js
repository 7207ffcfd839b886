/** The state of the page, and the events by which its panels learn of changes. */
import { DEFAULT_STYLE } from "./lib/draw.js";
import { readLink, writeLink } from "./lib/link.js";

export const state = {
  connection: { status: "connecting", text: "Connecting…" },
  models: [], // Model of the API
  methods: [], // MethodInfo
  metrics: [], // MetricInfo
  details: new Map(), // by model: {labels, layers}
  // layers and interventions are by model; the last three are for photos that are drawn by the server
  ask: { models: [], methods: [{ name: "gradcam" }], targets: [], topK: 1, layers: {}, interventions: {}, fusion: "", valueRange: null, bands: [], window: null },
  style: { ...DEFAULT_STYLE },
  view: { regions: false, peak: false },
  photos: [],
  photo: null,
  results: [], // {model, request, response, error}
  cells: [], // the maps on the screen
  picks: [], // up to two cells to compare, by id; the last is exported
  run: { status: "idle", progress: null },
  receipt: null, // an opened receipt
};

const KEY = /key-[\w-]{43}\/$/;

const listeners = new Map();

/** Call a function after each change of a topic: a part of the state, or "reconnected". */
export function on(topics, listener) {
  for (const topic of [topics].flat()) listeners.set(topic, [...(listeners.get(topic) ?? []), listener]);
}

/** Tell the listeners of a topic that it changed. */
export function changed(topic) {
  for (const listener of listeners.get(topic) ?? []) listener();
}

export function ask(change) {
  Object.assign(state.ask, change);
  changed("ask");
}

export function restyle(change) {
  Object.assign(state.style, change);
  changed("style");
}

export const modelNamed = (wanted) => state.models.find(({ name }) => name === wanted);

/** Return the first chosen model, or undefined. */
export const mainModel = () => modelNamed(state.ask.models[0]);

export const mainTask = () => mainModel()?.task;

/** Return the ExplainRequest, without its image, for one of the chosen models. */
export function requestFor(model) {
  const { methods, targets, topK, layers, interventions, fusion, valueRange, bands, window } = state.ask;
  const { task } = modelNamed(model) ?? {};
  const isDrawn = state.photo?.isDrawn;
  const picture = isDrawn && { overlay: "IMAGE_FORMAT_JPEG", alpha: 0, bands, ...(window && { window }) };
  return {
    model,
    methods,
    ...(targets.length ? { targets } : { topK }),
    layers: layers[model] ?? [],
    interventions: interventions[model] ?? [],
    ...(fusion && { fusion }),
    ...(isDrawn && valueRange && { valueRange }),
    maxPredictions: 10,
    rendering: { heatmap: true, ...picture },
    ...(task === "segment" && { classMap: true }),
  };
}

/** Return true if this is the page of `camserve ui`: its address has the key, which is a secret of its user. */
export const hasKey = () => KEY.test(location.pathname);

/** Return the fragment of this page's address, with everything but the photo. */
export function fragment() {
  const { models, layers, interventions, bands, window, ...request } = state.ask;
  const view = { ...state.view, models, layers, interventions, bands, window };
  return `#${writeLink({ request: { model: models[0], ...request }, style: state.style, view })}`;
}

/** Return the address of this page without its key, with everything but the photo. */
export const link = () => `${location.origin}${location.pathname.replace(KEY, "")}${location.search}${fragment()}`;

/** Take over the state in the address of this page, if it has one. */
export function readAddress() {
  const linked = readLink(location.hash);
  if (!linked) return false;
  const { request, style, view } = linked;
  Object.assign(state.ask, {
    models: view.models ?? [request.model].filter(Boolean),
    methods: request.methods?.length ? request.methods : state.ask.methods,
    targets: request.targets ?? [],
    topK: request.topK || 1,
    layers: view.layers ?? {},
    interventions: view.interventions ?? {},
    fusion: request.fusion ?? "",
    valueRange: request.valueRange ?? null,
    bands: view.bands ?? [],
    window: view.window ?? null,
  });
  Object.assign(state.style, DEFAULT_STYLE, style);
  Object.assign(state.view, { regions: view.regions ?? false, peak: view.peak ?? false });
  return true;
}
