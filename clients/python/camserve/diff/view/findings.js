/** Groups of findings: each gets its worst cases as small pictures, and a button that filters the list. */
import { h } from "../../page/dom.js";
import { photoUrl, readCase } from "./data.js";
import { watcher } from "./list.js";
import { drawOverlap, pictureOf, sizeOf } from "./pictures.js";

const WORST = 3; // pictures of a group
const SIDE = 128; // pixels

/**
 * Complete the groups; return a function that marks the chosen one.
 *
 * @param groups list of {title, cases}
 * @param choose function that is called with the index of a group, or "", and the case to show, if any
 */
export function completeGroups(groups, entries, choose) {
  const nodes = [...document.querySelectorAll("[data-group]")];
  const near = watcher((node) => {
    near.unobserve(node);
    addPictures(node, groups[node.dataset.group].cases, entries, choose);
  });
  const buttons = nodes.map((node) => addButton(node, groups[node.dataset.group], choose));
  for (const node of nodes) near.observe(node);
  return (chosen) => buttons.forEach((button, index) => button.setAttribute("aria-pressed", String(String(index) === chosen)));
}

function addButton(node, { title }, choose) {
  const pick = () => choose(button.getAttribute("aria-pressed") === "true" ? "" : node.dataset.group);
  const button = h("button", { "aria-pressed": "false", "aria-label": `Show only these cases: ${title}`, onclick: pick }, "Show only these cases");
  node.append(button);
  return button;
}

function addPictures(node, cases, entries, choose) {
  const worst = firstOfEachPhoto(cases.map((index) => entries[index])).slice(0, WORST);
  const pictures = worst.map((entry) => smallPicture(entry, () => choose(node.dataset.group, entry)));
  node.querySelector(".named").replaceWith(h("div.worst", pictures));
}

function firstOfEachPhoto(entries) {
  return [...new Map([...entries].reverse().map((entry) => [entry.photo, entry])).values()].sort((a, b) => a.index - b.index);
}

function smallPicture(entry, onclick) {
  const { photos, maps } = readCase(entry.index);
  const size = sizeOf(photos[0], SIDE);
  const canvas = h("canvas", { ...size, "aria-hidden": "true" });
  drawOverlap(canvas, maps, photos);
  return h("button.small", { onclick }, pictureOf(photoUrl(entry.photo), size, canvas), h("span", entry.image));
}
