/** The report of a diff: completes the groups of findings, and shows the list of cases with its controls. */
import { byId, choice, debounced, fill, h, labelled, swatch } from "../../page/dom.js";
import { COLORMAPS } from "../../page/lib/colormaps.js";
import { count } from "../../page/lib/words.js";
import { cardOf } from "./card.js";
import { readEntries, readReport } from "./data.js";
import { completeGroups } from "./findings.js";
import { caseList, isSelected, ORDERS, sorted } from "./list.js";
import { PARTS } from "./pictures.js";

const TYPING = 150; // milliseconds without a key until the list follows
const NOTHING = { change: "", method: "", image: "", label: "", group: "" };

/** Show the report. */
export function show() {
  const { sources, groups, changes } = readReport();
  const entries = readEntries();
  const state = { ...NOTHING, order: "worst", colormap: "jet" };
  const list = caseList(entries, (entry) => drawn(cardOf(entry, sources)));
  const drawn = (card) => {
    card.draw(state.colormap);
    return card;
  };
  const status = h("p.status", { role: "status" });
  const update = () => {
    const group = state.group === "" ? null : new Set(groups[state.group].cases);
    const shown = sorted(entries.filter((entry) => isSelected(entry, { ...state, group })), state.order);
    list.show(shown);
    status.textContent = shown.length === entries.length ? count(entries.length, "case") : `${shown.length.toLocaleString("en")} of ${count(entries.length, "case")}`;
    mark(state.group);
  };
  const controls = controlsOf(entries, { groups, changes }, state, update, () => list.redraw(drawn));
  const mark = completeGroups(groups, entries, (group, entry) => {
    controls.set({ ...NOTHING, group });
    if (entry) list.go(entry);
    else if (group) list.goToStart();
  });
  fill(byId("cases"), controls.filters, controls.look, h("div.line", status, controls.reset), list.node);
  update();
}

/** Return the controls, which change the state: {filters, look, reset, set}; `set` changes the state and what they show. */
function controlsOf(entries, { groups, changes }, state, update, redraw) {
  const change = (name) => (value) => {
    state[name] = value;
    update();
  };
  const pick = (name, options) => choice([["", "all"], ...options], state[name], change(name));
  const type = (name) => {
    const field = h("input", { type: "search", oninput: debounced(() => change(name)(field.value), TYPING) });
    return field;
  };
  const fields = {
    group: pick("group", groups.map(({ title }, index) => [String(index), title])),
    change: pick("change", countedChanges(entries, changes)),
    method: pick("method", unique(entries.map(({ method }) => method)).map((name) => [name, name])),
    image: type("image"),
    label: type("label"),
  };
  const set = (values) => {
    Object.assign(state, values);
    for (const [name, field] of Object.entries(fields)) field.value = state[name];
    update();
  };
  const filters = [
    labelled("Finding", fields.group),
    labelled("Class of the finding", fields.change),
    labelled("Method", fields.method),
    labelled("Name of the photo", fields.image),
    labelled("Label", fields.label),
    labelled("Order", choice(ordersOf(entries), state.order, change("order"))),
  ];
  const reset = h("button", { onclick: () => set(NOTHING) }, "Show all cases");
  return { filters: h("div.controls", filters), look: lookOf(state, redraw), reset, set };
}

function lookOf(state, redraw) {
  const opacity = h("input", { type: "range", min: 0, max: 100, value: 60, oninput: () => root.setProperty("--opacity", opacity.value / 100) });
  const root = document.documentElement.style;
  const colours = choice(COLORMAPS.map((name) => [name, name]), state.colormap, (name) => {
    state.colormap = name;
    redraw();
  });
  const legend = h("ul.legend", PARTS.map(([colour, name]) => h("li", swatch(colour), ` ${name}`)));
  return h("div.look", labelled("Opacity of the maps", opacity), labelled("Colours", colours), legend);
}

const unique = (values) => [...new Set(values)];

function countedChanges(entries, changes) {
  const number = (change) => entries.filter((entry) => entry.change === change).length;
  return changes.filter(number).map((change) => [change, `${change} (${number(change).toLocaleString("en")})`]);
}

/** Return the orders that a report has numbers for. */
function ordersOf(entries) {
  const isKnown = (key) => !(key in entries[0].numbers) || entries.some(({ numbers }) => numbers[key] !== null);
  return ORDERS.filter(([key]) => entries.length && isKnown(key)).map(([key, text]) => [key, text]);
}
