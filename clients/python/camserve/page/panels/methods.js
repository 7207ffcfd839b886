/** The choice of methods, with a form for the parameters of each. Only methods that fit the model can be chosen. */
import { checkbox, choice, debounced, fill, h, labelled, option, removeButton, searchField } from "../dom.js";
import { count } from "../lib/words.js";
import { ask, mainModel, on, state } from "../state.js";
import { detailsOf } from "../server.js";

const KINDS = {
  METHOD_KIND_CAM: "Class activation: a layer's feature maps",
  METHOD_KIND_SALIENCY: "Gradient at the pixels",
  METHOD_KIND_PERTURBATION: "Hide parts and watch the score",
  METHOD_KIND_ATTENTION: "Attention of a transformer",
  METHOD_KIND_COMPOSITE: "Combinations",
  METHOD_KIND_BASELINE: "Baselines, to be better than",
};

const chosen = h("div.chosen");
const groups = h("div.groups");
let layers = []; // of the first model
let filter = "";

export function methodsControl() {
  const search = searchField("Find a method", { oninput: find });
  const all = h("details.all", h("summary", "Add methods"), search, groups);
  return h("fieldset", h("legend", "Methods"), chosen, all);
}

function find({ target }) {
  filter = target.value.toLowerCase();
  showGroups();
}

const infoOf = (name) => state.methods.find((method) => method.name === name);
const indexOf = (name) => state.ask.methods.findIndex((method) => method.name === name);

function toggle(name, isOn) {
  const { methods } = state.ask;
  const next = isOn ? [...methods, { name }] : methods.filter((method) => method.name !== name);
  if (next.length) ask({ methods: next });
  else show();
}

function change(index, part) {
  ask({ methods: state.ask.methods.map((method, at) => (at === index ? { ...method, ...part } : method)) });
}

const changeSoon = debounced(change, 300);

/** Show the chosen methods; their forms stay as they are if only values changed. */
function showChosen() {
  const key = JSON.stringify([state.ask.methods.map(({ name }) => name), state.methods.length]);
  if (chosen.dataset.key === key) return;
  chosen.dataset.key = key;
  fill(chosen, state.ask.methods.map((method, index) => card(method, index)));
}

function card({ name, ...given }, index) {
  const info = infoOf(name) ?? {};
  const { summary = "", formula = "", paper = "", parameters = [], eigenSmoothing = false, perChannel = false } = info;
  const remove = removeButton(`Remove ${name}`, () => toggle(name, false));
  const forms = parameters.map((parameter) => formOf(parameter, index, given.parameters?.[parameter.name]));
  const smoothing = [
    checkbox("Average mirrored and contrasted copies", given.augmentationSmoothing ?? false, (value) => change(index, { augmentationSmoothing: value }), { hint: "Costs six times as much." }),
    eigenSmoothing ? checkbox("First principal component", given.eigenSmoothing ?? false, (value) => change(index, { eigenSmoothing: value })) : null,
    perChannel ? checkbox("A map of each channel of the photo", given.perChannel ?? false, (value) => change(index, { perChannel: value, inputChannels: [] })) : null,
  ];
  const about = h("div.about", formula ? h("p", formula) : null, paper ? h("p.hint", paper) : null);
  const options = h("details", h("summary", "Options and formula"), forms, smoothing, about);
  const only = state.ask.methods.length === 1;
  return h("div.chip-card", { "data-field": `methods[${index}]` }, h("div.line", h("strong", name), only ? null : remove), h("p.hint", summary && `${summary}.`), options);
}

function formOf(info, index, given) {
  const { name, summary = "", choices = [] } = info;
  const value = given ?? info.defaultValue ?? {};
  const set = (parameter) => {
    const { parameters = {} } = state.ask.methods[index];
    changeSoon(index, { parameters: { ...parameters, [name]: parameter } });
  };
  const control = choices.length ? choice(choices.map((text) => [text, text]), value.text, (text) => set({ text })) : numberOf(info, value, set);
  const field = labelled(name.replaceAll("_", " "), control, { hint: summary });
  field.dataset.field = `methods[${index}].parameters["${name}"]`;
  return field;
}

function numberOf({ minimum = 0, maximum = 0, integer = false }, { number = 0 }, set) {
  const input = ({ target }) => target.value !== "" && set({ number: Number(target.value) });
  return h("input", { type: "number", min: minimum, max: maximum, step: integer ? 1 : "any", value: number, oninput: input });
}

function showGroups() {
  const fits = ({ name, summary = "" }) => `${name} ${summary}`.toLowerCase().includes(filter);
  const found = Object.entries(KINDS).map(([kind, title]) => [title, state.methods.filter((method) => method.kind === kind && fits(method))]);
  fill(groups, found.filter(([, methods]) => methods.length).map(([title, methods]) => h("div", { role: "group", "aria-label": title }, h("h3", title), methods.map(choiceOf))));
}

function choiceOf({ name, kind, summary = "", rows = 1, needs = "", layered = false }) {
  const refusal = refusalOf({ kind, needs, layered });
  const refused = refusal !== "";
  const hint = refusal || `${summary}. ${count(rows, "row")}.${needs ? ` Needs ${needs}.` : ""}`;
  return option(name, indexOf(name) >= 0, toggle, { hint, disabled: refused, refused });
}

/** Return why a method does not fit the model, or "". The server refuses what its layers do not show here. */
function refusalOf({ kind, needs, layered }) {
  if (!layers.length) return "";
  if (layered && !layers.some(({ kinds = [] }) => kinds.includes(kind))) return "No layer of this model can be explained with it.";
  const types = { ReLU: /relu/i, attention: /attention/i };
  const lacks = Object.keys(types).find((word) => needs.includes(word) && !layers.some(({ type = "" }) => types[word].test(type)));
  return lacks ? `Needs ${needs}, which this model does not have.` : "";
}

async function show() {
  showChosen();
  const model = mainModel();
  if (!model) return;
  ({ layers } = await detailsOf(model.name).catch(() => ({ layers: [] })));
  showGroups();
}

on(["models", "ask"], show);
