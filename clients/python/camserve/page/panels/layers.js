/** The choice of layers: the model's modules as a tree. Layers that cannot be explained say why. */
import { chip, choice, fill, h, labelled, searchField } from "../dom.js";
import { ask, mainModel, on, state } from "../state.js";
import { interventions, nameOf, withdraw } from "../interventions.js";
import { detailsOf } from "../server.js";

const MOST_LAYERS = 8;
const FUSIONS = [["", "A map for each layer"], ...["mean", "max", "product", "sum"].map((how) => [`FUSION_${how.toUpperCase()}`, `One map: their ${how}`])];

const chips = h("ul.chips", { "aria-label": "Chosen layers" });
const changes = h("ul.chips", { "aria-label": "Interventions" });
const usual = h("p.hint");
const tree = h("div.tree");
const fusion = h("div");
const search = searchField("Find a layer", { oninput: showTree });
const all = h("details.all", { ontoggle: showTree }, h("summary", "Choose layers"), search, tree);
const open = new Set(); // names of the opened branches

export function layersControl() {
  return h("fieldset", { "data-field": "layers" }, h("legend", "Layers"), usual, chips, fusion, all, changes);
}

const chosen = () => state.ask.layers[mainModel()?.name] ?? [];

/** Explain a layer of the first model too, or no longer. */
export function toggleLayer(name, isOn) {
  const names = chosen().filter((other) => other !== name);
  const next = isOn ? [...names, name].slice(-MOST_LAYERS) : names;
  ask({ layers: { ...state.ask.layers, [mainModel().name]: next } });
}

function show() {
  const model = mainModel();
  if (!model) return;
  const names = chosen();
  usual.hidden = names.length > 0;
  usual.textContent = model.pyramid ? "All scales in one map." : `The model's default layer, ${model.defaultLayer}.`;
  fill(chips, names.map((name, index) => chip(name, `layers[${index}]`, () => toggleLayer(name, false))));
  fill(fusion, names.length > 1 ? labelled("Several layers give", choice(FUSIONS, state.ask.fusion, (value) => ask({ fusion: value }))) : null);
  fill(changes, interventions().map((one, index) => chip(nameOf(one), `interventions[${index}]`, () => withdraw(one))));
  showTree();
}

async function showTree() {
  const model = mainModel();
  if (!model || !all.open) return;
  const { layers } = await detailsOf(model.name).catch(() => ({ layers: [] }));
  const text = search.value.trim().toLowerCase();
  const focused = document.activeElement?.dataset?.layer;
  if (text) {
    const found = layers.filter(({ name, type = "" }) => `${name} ${type}`.toLowerCase().includes(text)).slice(0, 100);
    fill(tree, h("ul", found.map((layer) => h("li", row(layer, layer.name)))));
  } else {
    fill(tree, branch(grow(layers), ""));
  }
  if (focused) tree.querySelector(`[data-layer="${CSS.escape(focused)}"]`)?.focus();
}

/** Return the layers as a tree, {layer, children} by the parts of their names. */
function grow(layers) {
  const root = { children: new Map() };
  for (const layer of layers) {
    let node = root;
    for (const part of layer.name.split(".")) {
      if (!node.children.has(part)) node.children.set(part, { children: new Map() });
      node = node.children.get(part);
    }
    node.layer = layer;
  }
  return root;
}

function branch({ children }, prefix) {
  return h("ul", [...children].map(([part, node]) => leaf(part, node, prefix ? `${prefix}.${part}` : part)));
}

function leaf(part, node, name) {
  if (!node.children.size) return h("li", row(node.layer, part));
  const isOpen = open.has(name);
  const toggle = () => {
    if (!open.delete(name)) open.add(name);
    showTree();
  };
  const button = h("button.toggle", { "aria-expanded": String(isOpen), "aria-label": `Layers in ${name}`, "data-layer": `${name}/`, onclick: toggle }, isOpen ? "▾" : "▸");
  return h("li", h("div.line.start", button, node.layer ? row(node.layer, part) : h("span", part)), isOpen ? branch(node, name) : null);
}

function row({ name, type = "", explainable = false, reason = "", gridHeight = 0, gridWidth = 0 }, text) {
  const isOn = chosen().includes(name);
  const box = h("input", { type: "checkbox", checked: isOn, disabled: !explainable && !isOn, "data-layer": name, onchange: ({ target }) => toggleLayer(name, target.checked) });
  const grid = explainable ? `${gridHeight} × ${gridWidth}` : reason;
  return h("label", { class: explainable ? "layer" : "layer refused", title: name }, box, h("span", text), h("small", `${type}${grid ? `, ${grid}` : ""}`));
}

on(["models", "ask"], show);
