/** The choice of targets: the first predictions, classes found by their labels, texts, masks, or another photo. */
import { checkbox, chip, debounced, fileButton, fill, h, labelled, newId, PHOTO_TYPES, searchField } from "../dom.js";
import { base64Of } from "../lib/maps.js";
import { ask, mainModel, on, state } from "../state.js";
import { detailsOf } from "../server.js";
import { classOf, isSame, maskOf, nameOf, targetOf } from "../targets.js";

const MOST_FOUND = 12;
const MOST_TARGETS = 16;

const chips = h("ul.chips", { "aria-label": "Chosen targets" });
const count = h("input", { type: "number", min: 1, max: 16, step: 1, value: 1, oninput: countChanged });
const countField = labelled("Number of first predictions", count);
const kinds = h("div.switches");
const listId = newId("labels");
const list = h("ul.found", { id: listId, role: "listbox", "aria-label": "Classes", hidden: true });
const search = searchField("Find a class", { role: "combobox", "aria-expanded": "false", "aria-controls": listId, "aria-autocomplete": "list", autocomplete: "off", oninput: debounced(find, 100), onkeydown: key });
const finder = h("div.finder", search, list);
const similarity = h("div.row", fileButton("Similarity to another photo", PHOTO_TYPES, withFile((image) => ({ similarity: { image } }))));
const mask = h("div.row", fileButton("The part in a PNG mask", "image/png", withFile(maskOf)));
const text = h("input", { maxlength: 1000, onkeydown: addText });
const textField = labelled("Add a text, such as “a photo of a cat”", text);

let labels = [];
let found = [];
let active = -1;

export function targetsControl() {
  countField.dataset.field = "top_k";
  return h("fieldset", { "data-field": "targets" }, h("legend", "Targets"), chips, countField, finder, textField, kinds, similarity, mask);
}

function countChanged() {
  const topK = Number(count.value);
  if (Number.isInteger(topK) && topK >= 1) ask({ topK });
}

/** Return a function that asks about the target of a chosen file. */
function withFile(make) {
  return async ([file]) => ask({ targets: [make(base64Of(new Uint8Array(await file.arrayBuffer())))] });
}

function addText({ key }) {
  if (key !== "Enter" || !text.value.trim()) return;
  addTarget({ text: text.value.trim() });
  text.value = "";
}

async function show() {
  const model = mainModel();
  if (!model) return;
  const { targets } = state.ask;
  countField.hidden = targets.length > 0 || model.task === "embed";
  if (document.activeElement !== count) count.value = state.ask.topK;
  similarity.hidden = !["classify", "multilabel", "regress", "embed"].includes(model.task);
  mask.hidden = model.task !== "segment";
  textField.hidden = !model.acceptsTexts;
  labels = [];
  ({ labels } = await detailsOf(model.name).catch(() => ({ labels: [] })));
  finder.hidden = model.task === "embed";
  fill(chips, targets.map(chipOf));
  showKinds(model);
}

function chipOf(target, index) {
  return chip(nameOf(target, labels), `targets[${index}]`, () => ask({ targets: state.ask.targets.filter((_, at) => at !== index) }));
}

/** Offer other questions about the chosen classes. */
function showKinds({ task }) {
  const { targets } = state.ask;
  const isClass = (target) => "classIndex" in target || "finer" in target;
  if (!targets.length || !targets.every(isClass) || !["classify", "multilabel"].includes(task)) return fill(kinds);
  const convert = (make) => ask({ targets: targets.map((target) => make(classOf(target))) });
  const isProbability = targets.every(({ softmax }) => softmax);
  const isFiner = targets.every(({ finer }) => finer);
  return fill(
    kinds,
    checkbox("Probability, not score", isProbability, (isOn) => convert((classIndex) => ({ classIndex, ...(isOn ? { softmax: true } : {}) }))),
    checkbox("Against similar classes", isFiner, (isOn) => convert((classIndex) => (isOn ? { finer: { why: { classIndex } } } : { classIndex }))),
  );
}

function find() {
  const text = search.value.trim().toLowerCase().replaceAll("_", " ");
  found = [];
  labels.forEach((label, classIndex) => {
    if (text && found.length < MOST_FOUND && `${label} ${classIndex}`.toLowerCase().includes(text)) found.push({ label, classIndex });
  });
  if (/^\d+$/.test(text) && !labels.length && Number(text) < (mainModel()?.classes ?? 0)) found = [{ label: `class ${text}`, classIndex: Number(text) }];
  active = found.length ? 0 : -1;
  showFound();
}

function showFound() {
  const isOpen = search.value.trim() !== "";
  list.hidden = !isOpen;
  search.setAttribute("aria-expanded", String(isOpen));
  const items = found.map(({ label, classIndex }, index) => h("li", { role: "option", id: `${listId}-${index}`, "aria-selected": String(index === active), onmousedown: (event) => event.preventDefault(), onclick: () => add(found[index]) }, label, h("small", ` ${classIndex}`)));
  fill(list, items.length ? items : h("li", { role: "option", "aria-disabled": "true", "aria-selected": "false" }, "No class has such a label."));
  if (active >= 0) search.setAttribute("aria-activedescendant", `${listId}-${active}`);
  else search.removeAttribute("aria-activedescendant");
}

function key(event) {
  const step = { ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (step && found.length) {
    event.preventDefault();
    active = (active + step + found.length) % found.length;
    showFound();
  }
  if (event.key === "Enter" && found[active]) {
    event.preventDefault();
    add(found[active]);
  }
  if (event.key === "Escape") close();
}

function add({ classIndex }) {
  close();
  addTarget(targetOf({ classIndex }, mainModel().task));
}

function addTarget(target) {
  const { targets } = state.ask;
  if (!targets.some((present) => isSame(present, target))) ask({ targets: [...targets, target].slice(-MOST_TARGETS) });
}

function close() {
  search.value = "";
  found = [];
  showFound();
}

on(["models", "ask"], show);
