/** Numbers that compare two maps of one photo, as the Python client's `Comparison` defines them. */
import { allFinite, areaWeights, list, onPixels, roundEven, strongest, sum, sumCells } from "./maps.js";

export const SHARES = [0.05, 0.1, 0.2, 0.3, 0.4, 0.5];
export const HOTTEST = 0.2;
const KL_EPSILON = 1e-7;
const MOST = 16; // cells along an axis, for ranks
const [SSIM_SIDE, SSIM_SIGMA] = [11, 1.5]; // window, in cells
const [C1, C2] = [0.02 ** 2, 0.06 ** 2]; // of SSIM, for values from -1 to 1
const UNDEFINED = { spearman: NaN, iou: NaN, iouCurve: SHARES.map(() => NaN), shift: NaN, ssim: NaN, pearson: NaN, kl: NaN };
const WHOLE = { seen: { left: 0, top: 0, right: 1, bottom: 1 } };

/** Return the numbers of two maps, {map, photo} each, by their names; what is undefined is NaN. */
export function compareMaps(one, other) {
  if (!allFinite(one.map) || !allFinite(other.map)) return UNDEFINED;
  const { box, coarse, fine } = align(one, other);
  const [first, second] = fine.map(({ data }) => data);
  const [from, to] = fine.map((map) => centre(map, box));
  const iouCurve = SHARES.map((share) => intersectionOverUnion(overlap(...coarse, share).data));
  return {
    spearman: correlation(...coarse.map(({ data }) => ranks(data))),
    iou: iouCurve[SHARES.indexOf(HOTTEST)],
    iouCurve,
    shift: (100 * Math.hypot(to.x - from.x, to.y - from.y)) / Math.hypot(one.photo.width, one.photo.height),
    ssim: structuralSimilarity(...fine),
    pearson: correlation(first, second),
    kl: divergence(first, second),
  };
}

/** Return two maps over the part of the photo that both cover: {box, coarse, fine}, on the coarser and the finer grid. */
export function align(...pair) {
  const maps = pair.map(({ map }) => map);
  const [a, b] = pair.map(({ map: { height, width }, photo: { seen } }) => ({ height, width, ...seen }));
  const most = (edge) => Math.max(a[edge], b[edge]);
  const least = (edge) => Math.min(a[edge], b[edge]);
  const box = { left: most("left"), top: most("top"), right: least("right"), bottom: least("bottom") };
  if (Math.max(a.height, a.width) <= MOST && Object.keys(a).every((name) => a[name] === b[name])) return { box, coarse: maps, fine: maps };
  const rows = along(pair, box, "height", "top", "bottom");
  const columns = along(pair, box, "width", "left", "right");
  const coarse = maps.map((map, index) => rounded(sumCells(map, rows[index].weights, columns[index].weights)));
  const fine = maps.map((map, index) => {
    const seen = { ...rows[index].edges, ...columns[index].edges };
    return onPixels(map, { height: rows[index].most, width: columns[index].most, seen });
  });
  return { box, coarse, fine };
}

/** Return how each map is aligned along an axis: its cells' weights on the coarser grid, its edges on the finer. */
function along(pair, box, size, low, high) {
  const length = box[high] - box[low];
  const axes = pair.map(({ map, photo: { seen } }) => [map[size], seen[low], seen[high]]);
  const counts = axes.map(([cells, start, end]) => Math.max(1, roundEven((cells * length) / (end - start))));
  const most = Math.max(...counts);
  const place = (position) => ((position - box[low]) * most) / length;
  return axes.map(([cells, start, end]) => ({
    weights: areaWeights(Math.min(MOST, ...counts), box[low], box[high], cells, start, end),
    most,
    edges: { [low]: place(start), [high]: place(end) },
  }));
}

/** Round to the precision of raw maps: equal values stay equal, whatever the last bits of their sums. */
const rounded = (map) => ({ ...map, data: Float32Array.from(map.data) });

/** Align two maps that cover the same part of a photo. */
const onOneGrid = (...maps) => align(...maps.map((map) => ({ map, photo: WHOLE })));

/** Return the difference of two maps on the finer grid, each divided by its scale first. */
export function difference(one, other, [a, b]) {
  const [first, second] = onOneGrid(one, other).fine;
  const divided = (value, scale) => (scale > 0 ? value / scale : 0);
  return { ...first, data: first.data.map((value, index) => divided(value, a) - divided(second.data[index], b)) };
}

/** Return where maps are hottest, on the coarser grid: 0 for neither, 1 for the first, 2 for the second, 3 for both. */
export function overlap(one, other, share = HOTTEST) {
  const { coarse } = onOneGrid(one, other);
  const [first, second] = coarse.map((map) => hottest(map, share));
  return { ...coarse[0], data: first.map((isHot, index) => isHot + 2 * second[index]) };
}

/** Return 1 for the cells with the largest values, and all that equal the least of these; the minimum is never hot. */
function hottest(map, share) {
  const sorted = Float64Array.from(map.data).sort();
  const count = Math.max(1, roundEven(share * sorted.length));
  const least = allFinite(map) ? sorted.at(-count) : Infinity;
  return Uint8Array.from(map.data, (value) => value >= least && value > sorted[0]);
}

function intersectionOverUnion(masks) {
  const both = masks.filter((value) => value === 3).length;
  return both / masks.filter((value) => value > 0).length;
}

/** Return Pearson's correlation of two lists; NaN if one is constant. */
function correlation(...lists) {
  const [x, y] = lists.map((values) => {
    const mean = sum(values) / values.length;
    return Float64Array.from(values, (value) => value - mean);
  });
  const dot = (a, b) => sum(a.map((value, index) => value * b[index]));
  const norm = Math.sqrt(dot(x, x) * dot(y, y));
  return norm ? Math.min(Math.max(dot(x, y) / norm, -1), 1) : NaN;
}

/** Return the ranks of values from 1; equal values share the mean of their ranks. */
function ranks(values) {
  const order = Array.from(values.keys()).sort((a, b) => values[a] - values[b]);
  const result = new Float64Array(values.length);
  for (let start = 0, end; start < order.length; start = end) {
    for (end = start + 1; end < order.length && values[order[end]] === values[order[start]]; ) end++;
    for (let index = start; index < end; index++) result[order[index]] = (start + end + 1) / 2;
  }
  return result;
}

/** Return the positive values, divided by their sum. */
function distribution(values) {
  const positive = Float64Array.from(values, (value) => Math.max(value, 0));
  const total = sum(positive);
  return positive.map((value) => value / total);
}

/** Return the centre of mass of the positive values of a map that covers a box. */
function centre({ height, width, data }, { left, top, right, bottom }) {
  const parts = distribution(data);
  const x = sum(parts.map((part, index) => part * ((index % width) + 0.5))) / width;
  const y = sum(parts.map((part, index) => part * (Math.floor(index / width) + 0.5))) / height;
  return { x: left + x * (right - left), y: top + y * (bottom - top) };
}

/** Return the Kullback-Leibler divergence of the second list's positive values from the first's. */
function divergence(first, second) {
  const q = distribution(second);
  return Math.max(0, sum(distribution(first).map((p, index) => p * Math.log(KL_EPSILON + p / (q[index] + KL_EPSILON)))));
}

function structuralSimilarity(...maps) {
  const [x, y] = maps.map(({ data }) => {
    const scale = strongest(data);
    return Float64Array.from(data, (value) => value / scale);
  });
  const [down, across] = [maps[0].height, maps[0].width].map(gaussianWindows);
  const means = (product) => sumCells({ ...maps[0], data: x.map((value, index) => product(value, y[index])) }, down, across).data;
  const [meanX, meanY] = [means((a) => a), means((_, b) => b)];
  const [squares, products] = [means((a, b) => a * a + b * b), means((a, b) => a * b)];
  const local = meanX.map((mx, index) => {
    const [both, cross] = [mx ** 2 + meanY[index] ** 2, mx * meanY[index]];
    return ((2 * cross + C1) * (2 * (products[index] - cross) + C2)) / ((both + C1) * (squares[index] - both + C2));
  });
  return sum(local) / local.length;
}

/** Return the weights of every window along an axis, for sumCells; a small map has one. */
function gaussianWindows(side) {
  const size = Math.min(side, SSIM_SIDE);
  const heights = list(size, (index) => Math.exp(-(((index - (size - 1) / 2) / SSIM_SIGMA) ** 2) / 2));
  return list(side - size + 1, (start) => heights.flatMap((height, index) => [start + index, height / sum(heights)]));
}

/** Describe a rank correlation in words. */
export function agreement(rho) {
  if (!Number.isFinite(rho)) return "One of the maps is constant or not finite, so they cannot be compared.";
  if (rho >= 0.9) return "The maps rank the places almost alike.";
  if (rho >= 0.6) return "The maps agree in the main.";
  if (rho >= 0.3) return "The maps agree in part.";
  if (rho > -0.3) return "The maps have little in common.";
  return "The maps contradict each other: where one is strong, the other tends to be weak.";
}
