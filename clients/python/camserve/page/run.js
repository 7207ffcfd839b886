/** Requests for explanations: their cost, their progress, and the maps that they return. */
import { base64Of, bytesOf, decodeMap, readPhoto } from "./lib/maps.js";
import { changed, modelNamed, on, requestFor, state } from "./state.js";
import { api, guarded } from "./server.js";
import { debounced } from "./dom.js";

/** Rows up to which a change of the controls is computed at once. */
const CHEAP_ROWS = 100;

let running = null; // AbortController
let wanted = ""; // what the maps on the screen answer

const fingerprint = () => JSON.stringify(state.ask.models.map(requestFor));

/** Return true if the controls ask for something else than the maps on the screen. */
export const isStale = () => state.photo !== null && wanted !== fingerprint();

/** Return the bytes of a photo as base64. They are not kept, so that many photos need no memory. */
export async function imageOf(photo) {
  return base64Of(new Uint8Array(await photo.file.arrayBuffer()));
}

/** Explain the photo with every chosen model; a request that runs is cancelled. */
export async function explain() {
  if (!state.photo || state.connection.status !== "ready") return;
  running?.abort();
  const control = (running = new AbortController());
  const { photo } = state;
  const models = [...state.ask.models];
  const parts = models.map(() => ({ rowsDone: 0, rowsTotal: 0 }));
  wanted = fingerprint();
  setRun("running", null);
  const image = await imageOf(photo);
  const results = await Promise.all(
    models.map((model, index) =>
      one(model, image, control.signal, (progress) => {
        parts[index] = progress;
        if (running === control) setRun("running", { rowsDone: total(parts, "rowsDone"), rowsTotal: total(parts, "rowsTotal") });
      }),
    ),
  );
  if (running === control) finish(photo, results);
}

async function one(model, image, signal, onProgress) {
  const request = requestFor(model);
  try {
    const response = await guarded(() => api.explain({ ...request, image }, { signal, onProgress }));
    return { model, request, response };
  } catch (error) {
    return { model, request, error };
  }
}

const total = (parts, name) => parts.reduce((all, part) => all + (part[name] ?? 0), 0);

function setRun(status, progress) {
  state.run = { status, progress };
  changed("run");
}

function finish(photo, results) {
  running = null;
  const isCancelled = results.some(({ error }) => error?.code === "canceled");
  if (isCancelled) {
    wanted = "";
    setRun("cancelled", null);
    return;
  }
  if (photo.isDrawn) takePicture(photo, results);
  state.results = results;
  state.cells = results.filter(({ response }) => response).flatMap((result) => cellsOf(photo, result));
  state.picks = state.picks.filter((id) => state.cells.some((cell) => cell.id === id));
  setRun(results.some(({ error }) => error) ? "failed" : "done", null);
  changed("results");
  changed("picks");
}

/** Show a photo that this browser cannot decode as the server draws it. */
function takePicture(photo, results) {
  const { response } = results.find(({ response: found }) => found?.explanations?.[0]?.overlay) ?? {};
  if (!response) return;
  const { width, height } = readPhoto(response.photo);
  const picture = new Blob([bytesOf(response.explanations[0].overlay.data)], { type: "image/jpeg" });
  Object.assign(photo, { picture, width, height });
  changed("picture");
}

function cellsOf(photo, { model, request, response }) {
  const { inputHeight = 0, inputWidth = 0 } = modelNamed(model) ?? {};
  return (response.explanations ?? []).map((explanation, index) => ({
    id: [model, explanation.method, explanation.layer ?? "", index].join("/"),
    model,
    request,
    response,
    index,
    explanation,
    map: decodeMap(explanation.heatmap ?? {}),
    photo: readPhoto(response.photo),
    source: photo,
    inputSize: inputHeight ? [inputHeight, inputWidth] : null,
  }));
}

/** Cancel the request that runs; the server stops computing it. */
export function cancel() {
  running?.abort();
}

/** Return the cost of what the controls ask, {rows, explanations, maxRows}, or the server's refusal as {error}. */
async function estimate() {
  const costs = await Promise.all(state.ask.models.map(costOf));
  const refused = costs.find(({ error }) => error);
  if (refused) return refused;
  return { rows: total(costs, "rows"), explanations: total(costs, "explanations"), maxRows: Math.min(...costs.map(({ maxRows = 0 }) => maxRows)) };
}

async function costOf(model) {
  try {
    return await guarded(() => api.call("ExplainService/EstimateCost", { explain: requestFor(model) }));
  } catch (error) {
    return { error };
  }
}

/** Estimate the cost after a change of the controls, and compute at once what is cheap. */
const reconsider = debounced(async () => {
  if (state.connection.status !== "ready" || !state.ask.models.length) return;
  const asked = fingerprint();
  const cost = await estimate();
  if (asked !== fingerprint()) return;
  state.cost = cost;
  changed("cost");
  if (isStale() && !cost.error && cost.rows <= CHEAP_ROWS) await explain();
}, 200);

on("ask", () => {
  changed("run");
  reconsider();
});
on("photo", () => {
  state.results = [];
  state.cells = [];
  wanted = "";
  if (state.photo) explain();
  else cancel();
});
on("reconnected", () => {
  if (state.photo) explain();
});
