/** Boxes of detected objects and the mask of a segmentation over the photo; a click explains one. */
import { fill, h } from "../dom.js";
import { bytesOf, readPhoto } from "../lib/maps.js";
import { className, probability } from "../lib/words.js";
import { on, state } from "../state.js";
import { choose, isAsked } from "../targets.js";
import { clickMode } from "./predictions.js";

let layer = null;

/** Return the element with the marks for the photo on the screen. */
export function marksOf() {
  layer = h("div.marks");
  return layer;
}

function draw() {
  if (!layer) return;
  const { response } = state.results[0] ?? {};
  if (!response) return fill(layer);
  const photo = readPhoto(response.photo);
  fill(layer, response.classMap ? maskOf(response, photo) : null, boxesOf(response, photo));
}

/** Lay a mark over a box of the photo. */
function place(node, { left = 0, top = 0, right = 0, bottom = 0 }, { width, height }) {
  const share = (part, whole) => `${(100 * part) / whole}%`;
  Object.assign(node.style, { left: share(left, width), top: share(top, height), width: share(right - left, width), height: share(bottom - top, height) });
  return node;
}

function boxesOf({ predictions = [] }, photo) {
  const objects = predictions.filter(({ box }) => box);
  return objects.map((prediction) => {
    const name = className(prediction);
    const text = `${name}, ${probability(prediction.probability ?? 0)}`;
    const pick = () => choose(prediction, clickMode());
    const box = h("button.box", { "aria-pressed": String(isAsked(prediction)), "aria-label": `Explain ${text}`, onclick: pick }, h("span", name));
    return place(box, prediction.box, photo);
  });
}

/** Return the colour of a class, so that neighbours in the list differ. */
export const classColour = (index) => `hsl(${(index * 137.5) % 360} 70% 55%)`;

function maskOf({ classMap, predictions = [] }, photo) {
  const { height, width, data } = classMap;
  const classes = new Uint16Array(bytesOf(data).buffer);
  const canvas = h("canvas.mask", { width, height, "aria-hidden": "true" });
  paintClasses(canvas, classes);
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const column = Math.min(width - 1, Math.floor((offsetX / canvas.clientWidth) * width));
    const row = Math.min(height - 1, Math.floor((offsetY / canvas.clientHeight) * height));
    const classIndex = classes[row * width + column];
    choose(predictions.find((prediction) => (prediction.classIndex ?? 0) === classIndex) ?? { classIndex }, clickMode());
  });
  return place(canvas, photo.seen, photo);
}

function paintClasses(canvas, classes) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const colours = new Map([...new Set(classes)].map((index) => [index, index ? pixelOf(classColour(index)) : 0]));
  classes.forEach((index, at) => (pixels[at] = colours.get(index)));
  context.putImageData(image, 0, 0);
}

function pixelOf(colour) {
  const context = h("canvas", { width: 1, height: 1 }).getContext("2d");
  context.fillStyle = colour;
  context.fillRect(0, 0, 1, 1);
  const [red, green, blue] = context.getImageData(0, 0, 1, 1).data;
  return ((150 << 24) | (blue << 16) | (green << 8) | red) >>> 0;
}

on(["results", "photo", "ask"], draw);
