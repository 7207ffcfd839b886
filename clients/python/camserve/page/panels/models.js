/** The choice of models: one, or several side by side. */
import { fill, h, option } from "../dom.js";
import { ask, mainModel, modelNamed, on, state } from "../state.js";
import { detailsOf } from "../server.js";

const TASKS = {
  classify: "one of several classes",
  multilabel: "classes that do not exclude each other",
  regress: "numbers",
  segment: "a class for each pixel",
  detect: "boxes of objects",
  embed: "an embedding",
};
const STATES = {
  MODEL_STATE_LOADING: "is being loaded",
  MODEL_STATE_FAILED: "could not be loaded",
  MODEL_STATE_UNLOADING: "is being unloaded",
  MODEL_STATE_UNLOADED: "is not loaded",
};

const list = h("div.options");
const about = h("p.hint");

export function modelsControl() {
  return h("fieldset", { "data-field": "model" }, h("legend", "Models"), list, about);
}

function show() {
  fill(list, state.models.map(choiceOf));
  const { classes = 0, inputHeight, inputWidth, task, parameters = 0 } = mainModel() ?? {};
  if (!task) return fill(about);
  const size = `${inputWidth} × ${inputHeight} pixels`;
  const kind = task === "embed" ? TASKS[task] : `${TASKS[task]} (${classes.toLocaleString("en")})`;
  fill(about, `Input ${size}, output ${kind}, ${(Number(parameters) / 1e6).toFixed(1)} million parameters.`);
}

function choiceOf({ name, state: now, weights, source = "" }) {
  const trouble = STATES[now];
  const hint = trouble ?? (weights === "none" ? "has random weights: its maps mean nothing" : "");
  return option(name, state.ask.models.includes(name), choose, { hint, title: source, disabled: Boolean(trouble) });
}

async function choose(name, isOn) {
  const { models } = state.ask;
  const chosen = isOn ? [...models, name] : models.filter((other) => other !== name);
  if (!chosen.length) return show();
  const first = chosen[0];
  const keep = first === models[0] || (await haveSameLabels(first, models[0]));
  ask({ models: state.models.map((model) => model.name).filter((other) => chosen.includes(other)), ...(keep ? {} : { targets: [] }) });
}

/** Return true if targets of one model mean the same for another one. */
async function haveSameLabels(one, other) {
  if (modelNamed(one)?.task !== modelNamed(other)?.task) return false;
  const [first, second] = await Promise.all([one, other].map(detailsOf));
  return String(first.labels) === String(second.labels);
}

on(["models", "ask"], show);
