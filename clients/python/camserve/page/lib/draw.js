/** Drawing of maps in the browser, by the server's conventions: see Rendering in protos/camserve/v1/explain.proto. */
import { levels } from "./colormaps.js";
import { allFinite, average, keep, onPixels, quantileOfSorted, resize, roundEven, scalePhoto, strongest } from "./maps.js";

/** How a map is drawn; missing properties have these defaults. */
export const DEFAULT_STYLE = Object.freeze({
  sign: null, // "positive", "negative", "both" or "absolute"; null is "positive"
  scale: "map", // raw value with the strongest colour: "map" (each its own), "shared", or a number
  threshold: null, // {quantile: 0.8} or {value: 1.5}: weaker values are not painted
  colormap: null, // a name in COLORMAPS; null is "coolwarm" if sign is "both", otherwise "jet"
  opacity: 0.5, // of the canvas, in CSS, so changing it needs no drawing
  fade: false, // true to multiply the opacity by the intensity
  smooth: true, // false for the nearest cell
  contourLines: 0, // 0 to 16, at equally spaced intensities
});

const USUAL_SIZE = [224, 224]; // of a model's input that is not known: it only matters for quantiles and pixelwise maps
const PIXELWISE_TOP = 0.99; // quantile with the strongest colour in a map of single pixels (SmoothGrad, section 3.2)
const [DARK, LIGHT] = [0xff202020, 0xffffffff]; // ABGR, of contour lines

/** Return a style with all properties; sign and colormap are resolved. */
export function complete(style = {}) {
  const all = { ...DEFAULT_STYLE, ...style };
  const sign = all.sign ?? "positive";
  return { ...all, sign, colormap: all.colormap ?? (sign === "both" ? "coolwarm" : "jet") };
}

const PICK = {
  positive: (value) => (value > 0 ? value : 0),
  negative: (value) => (value < 0 ? -value : 0),
  absolute: Math.abs,
};

/** Return the values that a sign shows, for "negative" without their sign, and 0 for others; none if one is not finite. */
export function shown(map, sign) {
  if (!allFinite(map)) return keep(map, "shown", "none", () => ({ ...map, data: new Float32Array(map.data.length) }));
  return sign === "both" ? map : keep(map, "shown", sign, () => ({ ...map, data: map.data.map(PICK[sign]) }));
}

const isPixelwise = (map, [height, width]) => map.height === height && map.width === width;

/** Return the raw value with the strongest colour if a map is drawn alone, or 0; the input's size is [height, width]. */
export function ownScale(map, style, inputSize = null) {
  const { sign } = complete(style);
  const size = inputSize ?? USUAL_SIZE;
  return keep(map, "scale", `${sign} ${size}`, () => {
    const sorted = isPixelwise(map, size) ? sortedMagnitudes(map, sign, size) : [];
    return sorted[roundEven(PIXELWISE_TOP * (sorted.length - 1))] || strongest(shown(map, sign).data);
  });
}

/** Return the scale that a style asks for, or 0 if nothing is shown; `maps` are those that share it. */
export function scaleOf(map, style, maps = [map], inputSize = null) {
  const { scale } = complete(style);
  if (typeof scale === "number") return scale;
  return Math.max(...(scale === "shared" ? maps : [map]).map((one) => ownScale(one, style, inputSize)));
}

function sortedMagnitudes(map, sign, size) {
  return keep(map, "sorted", `${sign} ${size}`, () => resize(shown(map, sign), ...size).data.map(Math.abs).sort());
}

/** Return the raw value below which nothing is painted, or 0 if everything is. */
export function thresholdValue(map, style, inputSize = null) {
  const whole = complete(style);
  if (!whole.threshold) return 0;
  const { value, quantile: share } = whole.threshold;
  return value ?? quantileOfSorted(sortedMagnitudes(map, whole.sign, inputSize ?? USUAL_SIZE), share);
}

/** Draw a map on a canvas of any size that covers the photo, as `paint` does. */
export function drawMap(canvas, ...look) {
  const context = canvas.getContext("2d");
  const image = imageOf(canvas, context);
  const scale = paint(image, ...look);
  context.putImageData(image, 0, 0);
  return scale;
}

const images = new WeakMap();

/** Return a clear ImageData of a canvas's size: the same one in every frame. */
function imageOf(canvas, context) {
  const kept = images.get(canvas);
  if (kept?.width === canvas.width && kept.height === canvas.height) {
    kept.data.fill(0);
    return kept;
  }
  images.set(canvas, context.createImageData(canvas.width, canvas.height));
  return images.get(canvas);
}

/**
 * Paint a map into a clear ImageData of the display's size; return the scale that was used. The image stays transparent
 * where the model did not see the photo, and where nothing is painted.
 */
export function paint(image, map, photo, style, { scale = scaleOf(map, style), inputSize = null } = {}) {
  const whole = complete(style);
  const size = inputSize ?? USUAL_SIZE;
  const display = scalePhoto(photo, image.width, image.height);
  const key = [whole.sign, whole.smooth];
  const values = shown(map, whole.sign);
  // Values are divided after interpolation where nothing is cut before it, so that another scale needs no interpolation.
  const isCut = isPixelwise(map, size);
  const strengths = !isCut || whole.threshold ? fieldOf(map, "strengths", display, key, () => values) : null;
  const field = isCut ? fieldOf(map, "field", display, [scale, ...key], () => cut(values, scale)) : strengths;
  const factor = isCut ? 1 : scale > 0 ? 1 / scale : 0;
  const pixels = new Uint32Array(image.data.buffer, image.data.byteOffset, image.width * image.height);
  const selected = whole.threshold ? strengths.data : null;
  colour(pixels, image.width, field, factor, whole, selected, thresholdValue(map, whole, inputSize));
  if (whole.contourLines) drawContours(pixels, image.width, field, factor * (whole.contourLines + 1), whole.contourLines);
  return scale;
}

/** Divide a map by a scale, and cut what lies beyond it. */
function cut(map, scale) {
  const data = scale > 0 ? map.data.map((value) => Math.min(Math.max(value / scale, -1), 1)) : new Float32Array(map.data.length);
  return { ...map, data };
}

/** Interpolate what `make` returns at the pixels of a display; the last result is kept with the map. */
function fieldOf(map, kind, display, key, make) {
  const { left, top, right, bottom } = display.seen;
  const isSmooth = key.at(-1);
  return keep(map, kind, [...key, display.width, display.height, left, top, right, bottom].join(), () =>
    onPixels(coarsen(make(), display.seen), display, isSmooth),
  );
}

/** Average a map with more cells than its box has pixels, so that no cell is skipped; the strongest value stays. */
function coarsen(map, { left, top, right, bottom }) {
  const [width, height] = [Math.max(1, Math.round(right - left)), Math.max(1, Math.round(bottom - top))];
  if (map.width <= width && map.height <= height) return map;
  const coarse = average(map, height, width);
  const gain = strongest(map.data) / (strongest(coarse.data) || 1);
  return { ...coarse, data: coarse.data.map((value) => value * gain) };
}

function colour(pixels, stride, { left, top, width, height, data }, factor, { colormap, sign, fade }, strengths, least) {
  const colours = levels(colormap);
  const isSigned = sign === "both";
  const [gain, offset, lowest] = isSigned ? [127.5, 128, -1] : [255, 0.5, 0];
  for (let y = 0; y < height; y++) {
    let target = (top + y) * stride + left;
    let source = y * width;
    for (let x = 0; x < width; x++, target++, source++) {
      if (strengths !== null) {
        const strength = Math.abs(strengths[source]);
        if (strength < least || strength === 0) continue;
      }
      const value = Math.min(Math.max(data[source] * factor, lowest), 1);
      const pixel = colours[(value * gain + offset) | 0];
      pixels[target] = fade ? (pixel & 0xffffff) | (((Math.abs(value) * 255 + 0.5) | 0) << 24) : pixel;
    }
  }
}

/**
 * Draw lines where the intensity passes a level, dark and light, so that they are seen on every colour: a pixel whose
 * right or lower neighbour is in another band is dark, and that neighbour is light.
 */
function drawContours(pixels, stride, { left, top, width, height, data }, factor, count) {
  const bands = new Int8Array(data.length);
  for (let index = 0; index < data.length; index++) {
    const band = data[index] * factor;
    bands[index] = band > count ? count : band < -count ? -count : band;
  }
  for (let y = 0; y < height - 1; y++) {
    const target = (top + y) * stride + left;
    for (let x = 0, index = y * width; x < width - 1; x++, index++) {
      const here = bands[index];
      const across = here !== bands[index + 1];
      const down = here !== bands[index + width];
      if (across || down) pixels[target + x] = DARK;
      if (across) pixels[target + x + 1] = LIGHT;
      if (down) pixels[target + x + stride] = LIGHT;
    }
  }
}

/** Draw the colours of a style over a whole canvas, the strongest at the right. */
export function drawColorBar(canvas, style) {
  const { colormap } = complete(style);
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, 1);
  const pixels = new Uint32Array(image.data.buffer);
  pixels.forEach((_, x) => (pixels[x] = levels(colormap)[Math.round((x / Math.max(1, canvas.width - 1)) * 255)]));
  for (let y = 0; y < canvas.height; y++) context.putImageData(image, 0, y);
}

/** Return the raw values at the ends and in the middle of a style's colour bar. */
export function barValues(style, scale) {
  const { sign } = complete(style);
  if (sign === "both") return [-scale, 0, scale];
  return sign === "negative" ? [0, -scale / 2, -scale] : [0, scale / 2, scale];
}
