/**
 * Comparison of the maps of one result, for the output of a notebook cell.
 *
 * The data comes with the script, and nothing is fetched. Texts of the server are only set as text, never as HTML.
 */
import { COLORMAPS } from "../page/lib/colormaps.js";
import { barValues, complete, drawColorBar, drawMap, ownScale } from "../page/lib/draw.js";
import { decodeMap, peak, readPhoto, valueAt } from "../page/lib/maps.js";
import { number } from "../page/lib/words.js";

const STEPS = 40; // arrow keys move by this part of the picture
const DISPLAY = 320; // pixels of a picture's longer side
const SIGNS = [["", "as suits each map"], ["positive", "for the target"], ["negative", "against it"], ["both", "for and against"], ["absolute", "magnitudes"]];

/** Create an element with properties and children. */
function make(name, properties = {}, ...children) {
  const node = Object.assign(document.createElement(name), properties);
  node.append(...children);
  return node;
}

/**
 * Show a comparison in an element, in place of what it contains.
 *
 * @param root the element.
 * @param data {photo, image, maps}: the photo's geometry, its address, and for each map {title, layer, warning,
 *   signed, heatmap}.
 */
export function show(root, { photo, image, maps }) {
  const geometry = readPhoto(photo);
  const cells = maps.map((map) => cellOf(map, geometry, image));
  const pixelwise = maps.find(({ layer }) => !layer);
  const inputSize = pixelwise ? [pixelwise.heatmap.height, pixelwise.heatmap.width] : null;
  const controls = controlsOf(() => draw(cells, controls, geometry, inputSize));
  root.replaceChildren(controls.node, make("div", { className: "camserve-cells" }, ...cells.map(({ node }) => node)));
  const point = (x, y) => hover(cells, geometry, [x, y], controls.style(false).smooth);
  for (const cell of cells) readable(cell, point, () => leave(cells));
  draw(cells, controls, geometry, inputSize);
}

/** Let the pointer and the arrow keys read the values at a place of a picture: x and y are shares of its sides. */
function readable({ picture, peak: { x, y } }, point, leave) {
  let place = [x, y];
  picture.addEventListener("pointermove", ({ clientX, clientY }) => {
    const { left, top, width, height } = picture.getBoundingClientRect();
    point((clientX - left) / width, (clientY - top) / height);
  });
  picture.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation(); // a notebook moves between its cells with these keys
    place = place.map((at, index) => Math.min(Math.max(at + step[index] / STEPS, 0), 1));
    point(...place);
  });
  for (const end of ["pointerleave", "blur"]) picture.addEventListener(end, leave);
}

/** Build the figure of one map. */
function cellOf({ title, layer, warning, signed, heatmap }, geometry, image) {
  const { width, height } = geometry;
  const map = decodeMap(heatmap);
  const scale = Math.min(1, DISPLAY / Math.max(width, height));
  const size = { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) };
  const canvas = make("canvas", size);
  const mark = make("span", { className: "camserve-mark", hidden: true });
  const picture = make("div", { className: "camserve-picture" }, make("img", { src: image, alt: "", ...size }), canvas, mark);
  picture.tabIndex = 0;
  picture.setAttribute("role", "img");
  picture.setAttribute("aria-label", `${title} ${layer}. Read it with the arrow keys.`);
  const bar = make("canvas", { width: 128, height: 1, className: "camserve-bar" });
  const [low, high, value] = [make("span"), make("span"), make("output")];
  const caption = make("figcaption", {}, make("strong", { textContent: title }), make("span", { textContent: layer }));
  if (warning) caption.append(make("em", { textContent: warning }));
  caption.append(make("div", { className: "camserve-scale" }, low, bar, high), value);
  const { x, y } = peak(map, geometry);
  const start = { x: x / width, y: y / height };
  return { map, signed, canvas, mark, picture, peak: start, bar, low, high, value, node: make("figure", {}, picture, caption) };
}

/** Build the controls; `style(signed)` returns the drawing style that they select. */
function controlsOf(onChange) {
  const range = (value, max) => make("input", { type: "range", min: 0, max, step: 1, value });
  const [opacity, threshold] = [range(55, 100), range(0, 99)];
  const select = (pairs) => make("select", {}, ...pairs.map(([value, text]) => make("option", { value, textContent: text })));
  const sign = select(SIGNS);
  const colormap = select([["", "default"], ...COLORMAPS.map((name) => [name, name])]);
  const box = (checked) => make("input", { type: "checkbox", checked });
  const [shared, smooth, fade] = [box(false), box(true), box(false)];
  const label = (text, ...inputs) => make("label", {}, `${text} `, ...inputs);
  const node = make(
    "div", { className: "camserve-controls" },
    label("Opacity", opacity), label("Hide the weakest %", threshold), label("Values", sign), label("Colours", colormap),
    label("Same scale", shared), label("Smooth", smooth), label("Fade", fade),
  );
  node.addEventListener("input", onChange);
  const style = (signed) => ({
    sign: sign.value || (signed ? "both" : null),
    colormap: colormap.value || null,
    threshold: Number(threshold.value) ? { quantile: threshold.value / 100 } : null,
    smooth: smooth.checked,
    fade: fade.checked,
    opacity: opacity.value / 100,
    scale: shared.checked ? "shared" : "map",
  });
  return { node, style };
}

function draw(cells, controls, photo, inputSize) {
  const styles = cells.map(({ signed }) => controls.style(signed));
  const own = cells.map(({ map }, index) => ownScale(map, styles[index], inputSize));
  cells.forEach(({ map, canvas, bar, low, high, value }, index) => {
    const style = styles[index];
    const scale = style.scale === "shared" ? Math.max(...own) : own[index];
    canvas.style.opacity = style.opacity;
    drawMap(canvas, map, photo, style, { scale, inputSize });
    drawColorBar(bar, style);
    const values = barValues(style, scale);
    [low.textContent, high.textContent] = [number(values[0]), number(values.at(-1))];
    value.textContent = peakText(map, style, photo);
  });
}

function peakText(map, style, photo) {
  const { value, x, y } = peak(map, photo, complete(style).sign);
  return `peak ${number(value)} at ${Math.round(x)}, ${Math.round(y)}`;
}

/** Show the values of all maps, and a mark, at a place of the photo. */
function hover(cells, photo, [across, down], smooth) {
  for (const { map, mark, value } of cells) {
    const here = valueAt(map, photo, across * photo.width, down * photo.height, smooth);
    mark.hidden = false;
    [mark.style.left, mark.style.top] = [`${100 * across}%`, `${100 * down}%`];
    value.dataset.peak ??= value.textContent;
    value.textContent = here === null ? "not seen by the model" : `here ${number(here)}`;
  }
}

function leave(cells) {
  for (const { mark, value } of cells) {
    mark.hidden = true;
    value.textContent = value.dataset.peak ?? value.textContent;
    delete value.dataset.peak;
  }
}
