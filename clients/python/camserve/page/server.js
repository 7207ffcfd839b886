/** The connection to the server: its catalogue of models and methods, its token, and its return after a restart. */
import { Api, ApiError, retrying } from "./lib/api.js";
import { changed, on, state } from "./state.js";

export const api = new Api();
const PENDING = ["MODEL_STATE_LOADING", "MODEL_STATE_UNLOADING"];

let reconnecting = null;

function show(status, text) {
  state.connection = { status, text };
  changed("connection");
}

function waiting(error, pause) {
  const again = `Trying again in ${(pause / 1000).toFixed(1)} s.`;
  show("waiting", `${sentence(error.message)} ${again}`);
}

/** Return a message of the server as a sentence. */
export function sentence(message) {
  const text = message.charAt(0).toUpperCase() + message.slice(1);
  return /[.!?]$/.test(text) ? text : `${text}.`;
}

/** Load the catalogue, as soon as the server answers; ask for a token if it requires one. */
export function connect() {
  reconnecting ??= load().finally(() => (reconnecting = null));
  return reconnecting;
}

async function load() {
  const list = async () => {
    const { models = [] } = await api.call("ModelService/ListModels"); // first, so that a missing token is refused once
    const [{ methods = [] }, { metrics = [] }] = await Promise.all([
      api.call("ModelService/ListMethods"),
      api.call("EvaluateService/ListMetrics"),
    ]);
    if (models.length && models.every(({ state: now }) => PENDING.includes(now))) {
      throw new ApiError("unavailable", "the models are being loaded");
    }
    return { models, methods, metrics };
  };
  try {
    Object.assign(state, await retrying(list, { onWait: waiting }));
  } catch (error) {
    show(error.code === "unauthenticated" ? "token" : "failed", sentence(error.message));
    return false;
  }
  state.details.clear();
  show("ready", "Connected");
  changed("models");
  return true;
}

/** Send the token of this tab with every call from now on, and connect again. */
export async function useToken(token) {
  api.token = token.trim();
  show("connecting", "Connecting…");
  if (await connect()) changed("reconnected");
}

/**
 * Return what a call returns. If the server is gone or refuses the token, say so and connect again.
 *
 * Throws the call's ApiError.
 */
export async function guarded(call) {
  try {
    return await call();
  } catch (error) {
    if (error.code === "unauthenticated") show("token", sentence(error.message));
    if (error.code === "unavailable" && error.reason !== "MODEL_FAILED") reconnect(error);
    throw error;
  }
}

async function reconnect(error) {
  waiting(error, error.retryAfter ?? 250);
  if (await connect()) changed("reconnected");
}

/** Return the labels and layers of a model; they are asked for once. */
export function detailsOf(model) {
  if (!state.details.has(model)) {
    const loading = Promise.all([
      api.call("ModelService/GetModel", { name: model }),
      api.call("ModelService/ListLayers", { model }),
    ]).then(([{ labels = [] }, { layers = [] }]) => ({ labels, layers }));
    loading.catch(() => state.details.delete(model));
    state.details.set(model, loading);
  }
  return state.details.get(model);
}

on("models", () => {
  const ready = state.models.filter(({ state: now }) => !["MODEL_STATE_FAILED", "MODEL_STATE_UNLOADED"].includes(now));
  const known = state.ask.models.filter((name) => ready.some((model) => model.name === name));
  state.ask.models = known.length ? known : ready.slice(0, 1).map(({ name }) => name);
  changed("ask");
});
