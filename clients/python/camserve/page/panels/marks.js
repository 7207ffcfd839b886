/** Boxes of detected objects and the mask of a segmentation over the photo; a click explains one. */
import { fill, h } from "../dom.js";
import { bytesOf, readPhoto } from "../lib/maps.js";
import { probability } from "../lib/words.js";
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

const percent = (part, whole) => `${(100 * part) / whole}%`;

function boxesOf({ predictions = [] }, photo) {
  const objects = predictions.filter(({ box }) => box);
  return objects.map((prediction) => {
    const { left = 0, top = 0, right = 0, bottom = 0 } = prediction.box;
    const name = prediction.label || `class ${prediction.classIndex ?? 0}`;
    const text = `${name}, ${probability(prediction.probability ?? 0)}`;
    const pick = () => choose(prediction, clickMode());
    const box = h("button.box", { "aria-pressed": String(isAsked(prediction)), "aria-label": `Explain ${text}`, onclick: pick }, h("span", name));
    Object.assign(box.style, {
      left: percent(left, photo.width),
      top: percent(top, photo.height),
      width: percent(right - left, photo.width),
      height: percent(bottom - top, photo.height),
    });
    return box;
  });
}

/** Return the colour of a class, so that neighbours in the list differ. */
export const classColour = (index) => `hsl(${(index * 137.5) % 360} 70% 55%)`;

function maskOf({ classMap, predictions = [] }, photo) {
  const { height, width, data } = classMap;
  const classes = new Uint16Array(bytesOf(data).buffer);
  const canvas = h("canvas.mask", { width, height, "aria-hidden": "true" });
  paintClasses(canvas, classes);
  const { left, top, right, bottom } = photo.seen;
  Object.assign(canvas.style, {
    left: percent(left, photo.width),
    top: percent(top, photo.height),
    width: percent(right - left, photo.width),
    height: percent(bottom - top, photo.height),
  });
  canvas.addEventListener("click", ({ offsetX, offsetY }) => {
    const column = Math.min(width - 1, Math.floor((offsetX / canvas.clientWidth) * width));
    const row = Math.min(height - 1, Math.floor((offsetY / canvas.clientHeight) * height));
    const classIndex = classes[row * width + column];
    choose(predictions.find((prediction) => (prediction.classIndex ?? 0) === classIndex) ?? { classIndex }, clickMode());
  });
  return canvas;
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
