/** The controls of what to explain: models, methods, targets and layers, and the cost of it all. */
import { byId, fill, h, problem } from "../dom.js";
import { cost as costText } from "../lib/words.js";
import { on, state } from "../state.js";
import { explain, isStale } from "../run.js";
import { sentence } from "../server.js";
import { layersControl } from "./layers.js";
import { methodsControl } from "./methods.js";
import { modelsControl } from "./models.js";
import { targetsControl } from "./targets.js";

const footer = h("div.ask");

export function controlsPanel() {
  const sections = [modelsControl(), targetsControl(), methodsControl(), layersControl()];
  fill(byId("controls"), h("h2", { id: "controls-title" }, "What to explain"), sections, footer);
  showCost();
}

function showCost() {
  const { cost } = state;
  const isWaiting = isStale() && state.run.status !== "running";
  const button = h("button", { class: isWaiting ? "primary" : "", disabled: !state.photo || state.run.status === "running", onclick: explain }, "Explain");
  fill(footer, h("div.row", button, costOf(cost)));
}

function costOf(cost) {
  if (!cost) return null;
  if (cost.error) return h("p.hint.refused", sentence(cost.error.message));
  const { allowed, text } = costText(cost);
  return h("p", { class: allowed ? "hint" : "hint refused" }, text);
}

/** Show an error's violations at the fields that they name, or at the nearest part of the page. */
function showViolations() {
  for (const old of document.querySelectorAll(".violation")) old.remove();
  for (const node of document.querySelectorAll("[data-invalid]")) markInvalid(node, false);
  const errors = [...state.results.map(({ error }) => error), state.cost?.error].filter(Boolean);
  const seen = new Set();
  for (const { field, description } of errors.flatMap(({ fields }) => fields)) {
    const path = field.replace(/^explain\./, "");
    if (seen.has(path)) continue;
    seen.add(path);
    const place = placeOf(path);
    if (!place) continue;
    place.append(Object.assign(problem(sentence(description.replace(path, nameOf(path)))), { className: "problem violation" }));
    markInvalid(place, true);
  }
}

/** Return the last name in a path: "samples" of methods[1].parameters["samples"]. */
const nameOf = (path) => path.match(/[A-Za-z_]+/g)?.at(-1) ?? path;

function markInvalid(place, isInvalid) {
  place.toggleAttribute("data-invalid", isInvalid);
  for (const control of place.querySelectorAll(":scope > input, :scope > select")) control.setAttribute("aria-invalid", String(isInvalid));
}

/** Return the element for the longest part of a path that the page has. */
function placeOf(path) {
  const places = [...document.querySelectorAll("[data-field]")];
  const fits = ({ dataset: { field } }) => path === field || (path.startsWith(field) && ".[".includes(path[field.length]));
  return places.filter(fits).sort((one, other) => other.dataset.field.length - one.dataset.field.length)[0];
}

on(["cost", "run", "photo"], showCost);
on(["cost", "results"], showViolations);
