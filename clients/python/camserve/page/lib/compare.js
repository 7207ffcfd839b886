/** Comparisons of two maps of the same photo. */
import { quantile, resize } from "./maps.js";

/** Resize two maps to the finer grid of both. */
export function align(one, other) {
  const [height, width] = [Math.max(one.height, other.height), Math.max(one.width, other.width)];
  return [resize(one, height, width), resize(other, height, width)];
}

/** Return the difference of two maps on the finer grid, each divided by its scale first. */
export function difference(one, other, [a, b]) {
  const [first, second] = align(one, other);
  const divided = (value, scale) => (scale > 0 ? value / scale : 0);
  return { ...first, data: first.data.map((value, index) => divided(value, a) - divided(second.data[index], b)) };
}

/** Return where two maps reach their quantiles: 0 for neither, 1 for only the first, 2 for only the second, 3 for both. */
export function overlap(one, other, share = 0.8) {
  const [first, second] = align(one, other);
  const limits = [first, second].map((map) => quantile(map.data, share));
  const strong = (value, limit) => value >= limit && value > 0;
  const data = Uint8Array.from(
    first.data,
    (value, index) => (strong(value, limits[0]) ? 1 : 0) + (strong(second.data[index], limits[1]) ? 2 : 0),
  );
  return { height: first.height, width: first.width, data };
}

/** Return the intersection over union of the strongest cells of two maps; NaN if neither has any. */
export function intersectionOverUnion(one, other, share = 0.8) {
  const masks = overlap(one, other, share).data;
  const both = masks.filter((value) => value === 3).length;
  return both / masks.filter((value) => value > 0).length;
}

/** Return Pearson's correlation of two lists of the same length; NaN if one is constant. */
export function pearson(x, y) {
  const mean = (values) => values.reduce((sum, value) => sum + value, 0) / values.length;
  const [meanX, meanY] = [mean(x), mean(y)];
  let [xy, xx, yy] = [0, 0, 0];
  for (let index = 0; index < x.length; index++) {
    const [dx, dy] = [x[index] - meanX, y[index] - meanY];
    xy += dx * dy;
    xx += dx * dx;
    yy += dy * dy;
  }
  return xx > 0 && yy > 0 ? Math.min(Math.max(xy / Math.sqrt(xx * yy), -1), 1) : NaN;
}

/** Return the ranks of values from 1; equal values share the mean of their ranks. */
export function ranks(values) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]);
  const result = new Float64Array(values.length);
  for (let start = 0, end; start < order.length; start = end) {
    for (end = start + 1; end < order.length && values[order[end]] === values[order[start]]; ) end++;
    for (let index = start; index < end; index++) result[order[index]] = (start + end + 1) / 2;
  }
  return result;
}

/** Return Spearman's rank correlation of two lists; NaN if one is constant. */
export function spearman(x, y) {
  return pearson(ranks(x), ranks(y));
}

/** Compare two maps: {spearman, pearson, iou, text}. */
export function compareMaps(one, other) {
  const [first, second] = align(one, other);
  const numbers = {
    spearman: spearman(first.data, second.data),
    pearson: pearson(first.data, second.data),
    iou: intersectionOverUnion(one, other),
  };
  return { ...numbers, text: agreement(numbers.spearman) };
}

/** Describe a rank correlation in words. */
export function agreement(rho) {
  if (!Number.isFinite(rho)) return "One of the maps is constant, so they cannot be compared.";
  if (rho >= 0.9) return "The maps rank the places almost alike.";
  if (rho >= 0.6) return "The maps agree in the main.";
  if (rho >= 0.3) return "The maps agree in part.";
  if (rho > -0.3) return "The maps have little in common.";
  return "The maps contradict each other: where one is strong, the other tends to be weak.";
}
