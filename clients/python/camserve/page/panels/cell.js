/** One map over the photo, with its colour bar, its verdict and its value under the cursor. */
import { fill, h, say } from "../dom.js";
import { element } from "../lib/charts.js";
import { barValues, complete, drawColorBar, drawMap, shown } from "../lib/draw.js";
import { peak, valueAt } from "../lib/maps.js";
import { regionsOf } from "../lib/regions.js";
import { methodName, number, probability, targetName, warning } from "../lib/words.js";
import { changed, state } from "../state.js";
import { styleOf } from "./look.js";

const STEPS = 40; // arrow keys move the cursor by this part of the photo
const SHARPEST = 2; // pixels of a canvas for each pixel of the page
const BAR = 128; // pixels

/** Point every map at a place of the photo, {x, y} in its pixels, or at none. */
export function moveCursor(place) {
  state.cursor = place;
  changed("cursor");
}

/** Return a name for a map. */
export function titleOf({ model, explanation }) {
  const place = explanation.layer ? ` on ${explanation.layer}` : "";
  const several = state.ask.models.length > 1 ? `, ${model}` : "";
  return `${methodName(explanation)}${place} for ${targetName(explanation)}${several}`;
}

export class Cell {
  /** @param content one of state.cells. */
  constructor(content, { onpick }) {
    this.content = content;
    this.canvas = h("canvas.map", { "aria-hidden": "true" });
    this.image = h("img", { src: content.source.url, alt: "", draggable: "false" });
    this.overlay = element("svg", { "aria-hidden": "true" });
    this.cross = h("div.cross", { hidden: true });
    this.value = h("output.value");
    this.badge = h("span.badge", { hidden: true });
    this.bar = h("canvas.colours", { width: BAR, height: 1, "aria-hidden": "true" });
    this.ticks = h("div.ticks", { "aria-hidden": "true" });
    this.regions = h("p.hint", { hidden: true });
    this.node = this.#build(onpick);
    this.observer = new ResizeObserver(() => this.draw());
    this.observer.observe(this.stage);
  }

  #build(onpick) {
    const { explanation, photo, id } = this.content;
    const fault = warning(explanation);
    this.stage = h("button.stage", { "aria-pressed": "false", "aria-label": `${titleOf(this.content)}. ${fault} Press to compare, arrow keys to read values.` }, this.image, this.canvas, this.overlay, this.cross, this.badge);
    this.stage.style.aspectRatio = `${photo.width} / ${photo.height}`;
    this.overlay.setAttribute("viewBox", `0 0 ${photo.width} ${photo.height}`);
    this.stage.addEventListener("click", () => onpick(id));
    this.stage.addEventListener("pointermove", (event) => this.#point(event));
    this.stage.addEventListener("pointerleave", () => moveCursor(null));
    this.stage.addEventListener("keydown", (event) => this.#key(event));
    this.stage.addEventListener("blur", () => moveCursor(null));
    const name = h("span.name", methodName(explanation));
    const place = h("small", [explanation.layer, `score ${number(explanation.score ?? 0)}`].filter(Boolean).join(" · "));
    const judgement = fault ? h("p.warning", fault) : null;
    return h("figure.cell", this.stage, h("figcaption", h("div.line", name, this.value), place, this.bar, this.ticks, judgement, this.#completeness(), this.regions));
  }

  #completeness() {
    const { completenessError } = this.content.explanation;
    return completenessError === undefined ? null : h("p.hint", `Adds up to the score within ${probability(completenessError)}.`);
  }

  #point({ clientX, clientY }) {
    const { left, top, width, height } = this.stage.getBoundingClientRect();
    const { photo } = this.content;
    moveCursor({ x: ((clientX - left) / width) * photo.width, y: ((clientY - top) / height) * photo.height });
  }

  #key(event) {
    const { photo } = this.content;
    const [across, down] = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key] ?? [];
    if (event.key === "Escape") moveCursor(null);
    if (across === undefined) return;
    event.preventDefault();
    const { x, y } = state.cursor ?? peak(shown(this.content.map, complete(styleOf(this.content)).sign), photo);
    const inside = (value, most) => Math.min(Math.max(value, 0), most);
    moveCursor({ x: inside(x + (across * photo.width) / STEPS, photo.width), y: inside(y + (down * photo.height) / STEPS, photo.height) });
    say(`${Math.round(state.cursor.x)}, ${Math.round(state.cursor.y)}: ${number(this.#valueHere())}`);
  }

  #valueHere() {
    const { map, photo } = this.content;
    return state.cursor && valueAt(map, photo, state.cursor.x, state.cursor.y, state.style.smooth);
  }

  showCursor() {
    const { cursor } = state;
    const { photo } = this.content;
    this.cross.hidden = !cursor;
    this.value.textContent = cursor ? number(this.#valueHere()) : "";
    if (!cursor) return;
    this.cross.style.left = `${(100 * cursor.x) / photo.width}%`;
    this.cross.style.top = `${(100 * cursor.y) / photo.height}%`;
  }

  /** Show that the map is picked to be compared: as A, as B, or not. */
  showPick(place) {
    this.stage.setAttribute("aria-pressed", String(place >= 0));
    this.badge.hidden = place < 0;
    this.badge.textContent = "AB"[place] ?? "";
  }

  draw() {
    const { map, photo, inputSize, scale } = this.content;
    const style = styleOf(this.content);
    const sharpness = Math.min(globalThis.devicePixelRatio || 1, SHARPEST);
    const [width, height] = [this.stage.clientWidth, this.stage.clientHeight].map((size) => Math.round(size * sharpness));
    if (!width || !height) return;
    this.canvas.style.opacity = style.opacity;
    const drawn = JSON.stringify([{ ...style, opacity: 0 }, scale, width, height, state.view]);
    if (drawn === this.drawn) return;
    this.drawn = drawn;
    Object.assign(this.canvas, { width, height });
    drawMap(this.canvas, map, photo, style, { scale, inputSize });
    drawColorBar(this.bar, style);
    fill(this.ticks, barValues(style, scale).map((value) => h("span", number(value))));
    this.#drawMarks(style);
  }

  #drawMarks(style) {
    const { map, photo, inputSize } = this.content;
    const { view } = state;
    const found = view.regions ? regionsOf(map, photo, style, { inputSize: inputSize ?? undefined }) : [];
    const rings = view.peak ? [peak(shown(map, complete(style).sign), photo)] : [];
    this.overlay.replaceChildren(...found.map(({ box }) => rectangle(box)), ...rings.map((at) => ring(at, photo)));
    this.regions.hidden = !view.regions;
    this.regions.textContent = found.length ? `Regions with ${found.map(({ share }) => probability(share)).join(", ")} of the evidence` : "No region";
  }

  /**
   * Free the memory of the map. Removing the image's address as well would keep the cell: Chromium then watches the image
   * for changes of the window for ever.
   */
  release() {
    this.observer.disconnect();
    this.canvas.width = this.canvas.height = 0;
  }
}

const rectangle = ({ left, top, right, bottom }) => element("rect", { class: "region", x: left, y: top, width: right - left, height: bottom - top });
const ring = ({ x, y }, { width, height }) => element("circle", { class: "peak", cx: x, cy: y, r: Math.max(width, height) / 40 });
