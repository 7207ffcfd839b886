/**
 * Conventions that turn the shown values of a map into intensities: the same as the server's profiles.
 *
 * "paper" and "signed" divide by the largest magnitude; maps on the pixels of the model's input are divided by their 99th
 * percentile instead, and cut. The others are those of pytorch-grad-cam, torchcam and Captum.
 */
import { resize, transpose } from "./maps.js";

const PIXELWISE_TOP = 0.99; // SmoothGrad, section 3.2
const CAPTUM_MASS = 0.98;

/** Return true if a map is on the pixels of the model's input. */
export const isOn = (map, [height, width]) => map.height === height && map.width === width;
const largest = (values) => values.reduce((most, value) => Math.max(most, value), 0);
const smallest = (values) => values.reduce((least, value) => Math.min(least, value), Infinity);

/** Resize shown values to the pixels of the model's input, as a profile does. */
export function onInput(map, profile, size) {
  if (isOn(map, size)) return map;
  if (profile === "captum") return repeat(map, ...size);
  if (profile !== "torchcam") return resize(map, ...size);
  const resized = bicubic(map, ...size);
  return { ...resized, data: resized.data.map((value) => Math.max(value, 0)) };
}

/** Return shown values on the grid that pictures are drawn from: the map's own for "paper" and "signed". */
export function onDrawnGrid(map, profile, size) {
  return ["paper", "signed"].includes(profile) ? map : onInput(map, profile, size);
}

/** Return the raw value with the intensity 1, or 0 if no value is shown. */
export function scaleOfProfile(map, profile, size) {
  if (profile === "grad-cam") return largest(resize(map, ...size).data);
  if (profile === "torchcam") return largest(map.data);
  if (profile === "captum") return captumScale(repeat(map, ...size).data.map(Math.abs).sort());
  const sizes = map.data.map(Math.abs);
  return (isOn(map, size) && ranked(sizes, PIXELWISE_TOP)) || largest(sizes);
}

/** Return the value of rank `share` × (n − 1), rounded half to even. */
function ranked(values, share) {
  const at = share * (values.length - 1);
  return values.slice().sort()[at % 1 === 0.5 ? 2 * Math.round(at / 2) : Math.round(at)];
}

function captumScale(sorted) {
  const sums = new Float32Array(sorted.length);
  sorted.reduce((sum, value, index) => (sums[index] = sum + value), 0);
  const limit = Math.fround(sums.at(-1) * Math.fround(CAPTUM_MASS));
  return sorted[sums.findIndex((sum) => sum >= limit)];
}

/** Return the intensities of shown values, on the grid that pictures are drawn from. */
export function intensitiesOf(map, profile, scale, size) {
  if (profile === "grad-cam") return toUnit(resize(toUnit(map, 1e-7), ...size), 1e-7);
  if (profile === "torchcam") return bicubic(toUnit(map, 1e-8), ...size);
  if (profile === "captum") return divide(repeat(map, ...size), scale, 1);
  return divide(map, scale, isOn(map, size) ? 1 : Infinity);
}

/** Divide by a scale, and cut what lies beyond a limit. */
function divide(map, scale, limit) {
  const data = new Float32Array(map.data.length);
  if (!(scale > 0)) return { ...map, data };
  for (let index = 0; index < data.length; index++) {
    const value = map.data[index] / scale;
    data[index] = value > limit ? limit : value < -limit ? -limit : value;
  }
  return { ...map, data };
}

/** Scale a map from its minimum and maximum to 0 to 1; epsilon avoids 0/0 for a constant map. */
function toUnit(map, epsilon) {
  const least = smallest(map.data);
  const range = largest(map.data) - least + epsilon;
  return { ...map, data: map.data.map((value) => (value - least) / range) };
}

/** Enlarge a map to the nearest cells, with integer arithmetic. */
function repeat(map, height, width) {
  const data = new Float32Array(height * width);
  for (let y = 0; y < height; y++) {
    const row = Math.floor((y * map.height) / height) * map.width;
    for (let x = 0; x < width; x++) data[y * width + x] = map.data[row + Math.floor((x * map.width) / width)];
  }
  return { height, width, data };
}

/** Resize a map bicubically as Pillow does: first its rows, then its columns. */
function bicubic(map, height, width) {
  return weighRows(transpose(weighRows(transpose(map), cubicAxis(map.width, width))), cubicAxis(map.height, height));
}

function weighRows({ width, data }, axis) {
  const result = new Float32Array(axis.length * width);
  axis.forEach(({ first, weights }, row) => {
    for (let x = 0; x < width; x++) {
      result[row * width + x] = weights.reduce((sum, weight, index) => sum + weight * data[(first + index) * width + x], 0);
    }
  });
  return { height: axis.length, width, data: result };
}

/** Return the cells and weights of each pixel of an axis: Keys' kernel with a = −0.5, widened if the axis shrinks. */
function cubicAxis(cells, pixels) {
  const [ratio, reach] = [cells / pixels, 2 * Math.max(1, cells / pixels)];
  const kernel = (x) => (x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? ((-0.5 * x + 2.5) * x - 4) * x + 2 : 0);
  return Array.from({ length: pixels }, (_, pixel) => {
    const centre = (pixel + 0.5) * ratio;
    const [first, end] = [Math.max(0, Math.floor(centre - reach + 0.5)), Math.min(cells, Math.floor(centre + reach + 0.5))];
    const weights = Array.from({ length: end - first }, (_, index) => kernel((Math.abs(first + index + 0.5 - centre) * 2) / reach));
    const sum = weights.reduce((total, weight) => total + weight, 0);
    return { first, weights: weights.map((weight) => weight / sum) };
  });
}
