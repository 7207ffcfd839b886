/**
 * Raw maps: {height, width, data} with a Float32Array, row by row, signed and not normalised. A map covers the part of
 * the photo that the model saw, `photo.seen`. A value belongs to the centre of its cell.
 */

/** Decode base64 into bytes. */
export function bytesOf(base64) {
  const text = atob(base64);
  const bytes = new Uint8Array(text.length);
  for (let index = 0; index < text.length; index++) bytes[index] = text.charCodeAt(index);
  return bytes;
}

/** Encode bytes as base64. */
export function base64Of(bytes) {
  const chunks = [];
  for (let start = 0; start < bytes.length; start += 0x8000) {
    chunks.push(String.fromCharCode(...bytes.subarray(start, start + 0x8000)));
  }
  return btoa(chunks.join(""));
}

/** Decode a `Heatmap` of the API's JSON into a map; throw a RangeError if it does not have height × width values. */
export function decodeMap({ height = 0, width = 0, data = "" }) {
  const bytes = bytesOf(data);
  if (!height || !width || bytes.length !== 4 * height * width) {
    throw new RangeError(`the heatmap does not have ${height} × ${width} values`);
  }
  const view = new DataView(bytes.buffer);
  return { height, width, data: Float32Array.from({ length: height * width }, (_, index) => view.getFloat32(4 * index, true)) };
}

/** Read a `Photo` of the API's JSON, which leaves out zeros: {width, height, seen: {left, top, right, bottom}}. */
export function readPhoto({ width = 0, height = 0, seen } = {}) {
  const box = seen ? { left: 0, top: 0, right: 0, bottom: 0, ...seen } : { left: 0, top: 0, right: width, bottom: height };
  return { width, height, seen: box };
}

const derived = new WeakMap();

/** Return what `compute` makes of a map, whose values never change; keep the last one of each kind with the map. */
export function keep(map, kind, key, compute) {
  if (!derived.has(map)) derived.set(map, new Map());
  const kept = derived.get(map);
  if (kept.get(kind)?.key !== key) kept.set(kind, { key, value: compute() });
  return kept.get(kind).value;
}

/** Return true if no value is NaN or infinite. */
export function allFinite(map) {
  return keep(map, "finite", "", () => map.data.every(Number.isFinite));
}

/**
 * Return the pixels of an axis that a map covers from `first` to `last`, and how each is interpolated.
 *
 * @returns {start, length, low, high, weight}: the first covered pixel, their number, and for each pixel the cells
 *   before and after its centre and the weight of the latter. A pixel is covered if its centre is; at least one is.
 */
function axis(first, last, pixels, cells, smooth) {
  const start = Math.min(Math.max(0, Math.ceil(first - 0.5)), pixels - 1);
  const length = Math.max(start + 1, Math.min(pixels, Math.ceil(last - 0.5))) - start;
  const low = new Int32Array(length);
  const high = new Int32Array(length);
  const weight = new Float32Array(length);
  for (let index = 0; index < length; index++) {
    const position = ((start + index + 0.5 - first) / (last - first)) * cells - 0.5;
    const at = Math.min(Math.max(position, 0), cells - 1);
    low[index] = Math.floor(at);
    high[index] = Math.min(low[index] + 1, cells - 1);
    weight[index] = smooth ? at - low[index] : Math.round(at - low[index]);
  }
  return { start, length, low, high, weight };
}

/** Interpolate a map at the pixels of two axes; return a map of their lengths. */
function sample(map, rows, columns) {
  const [height, width] = [rows.length, columns.length];
  const wide = new Float32Array(map.height * width);
  for (let row = 0; row < map.height; row++) {
    const source = row * map.width;
    const target = row * width;
    for (let x = 0; x < width; x++) {
      const low = map.data[source + columns.low[x]];
      wide[target + x] = low + (map.data[source + columns.high[x]] - low) * columns.weight[x];
    }
  }
  const data = new Float32Array(height * width);
  for (let y = 0; y < height; y++) {
    const [low, high, weight, target] = [rows.low[y] * width, rows.high[y] * width, rows.weight[y], y * width];
    for (let x = 0; x < width; x++) data[target + x] = wide[low + x] + (wide[high + x] - wide[low + x]) * weight;
  }
  return { height, width, data };
}

/** Resize a map, bilinearly between the centres of its cells. */
export function resize(map, height, width) {
  if (height === map.height && width === map.width) return map;
  return sample(map, axis(0, height, height, map.height, true), axis(0, width, width, map.width, true));
}

export const list = (length, make) => Array.from({ length }, (_, index) => make(index));

export const sum = (values) => values.reduce((total, value) => total + value, 0);

/** Return the largest magnitude of values. */
export const strongest = (values) => values.reduce((most, value) => Math.max(most, Math.abs(value)), 0);

/** Round to the nearest integer, and halves to the even one, as Python does. */
export const roundEven = (value) => (value % 1 === 0.5 ? 2 * Math.round(value / 2) : Math.round(value));

/** Reduce a map by averaging, each cell by the area that it shares with a new one; never enlarge it. */
export function average(map, height, width) {
  const weights = (count, cells) => areaWeights(Math.min(count, cells), 0, cells, cells, 0, cells);
  return sumCells(map, weights(height, map.height), weights(width, map.width));
}

/** Return an edge of equal intervals between two positions. */
const edge = (index, count, low, high) => (index === count ? high : low + index * ((high - low) / count));

/**
 * Return the weights that average cells, which lie between `start` and `end`, over equal intervals between `low` and
 * `high`: for each interval, a list of cells and their weights by turns.
 */
export function areaWeights(count, low, high, cells, start, end) {
  return list(count, (index) => {
    const [from, to] = [edge(index, count, low, high), edge(index + 1, count, low, high)];
    const shared = (cell) => Math.min(to, edge(cell + 1, cells, start, end)) - Math.max(from, edge(cell, cells, start, end));
    const shares = list(cells, (cell) => [cell, shared(cell)]).filter(([, share]) => share > 0);
    const total = sum(shares.map(([, share]) => share));
    return shares.flatMap(([cell, share]) => [cell, share / total]);
  });
}

/** Return weighted sums of a map's cells: for each row and column, a list of cells and weights by turns. */
export const sumCells = (map, rows, columns) => sumRows(sumRows(map, rows), columns);

/** Return the weighted sums of a map's rows, with rows and columns exchanged. */
function sumRows({ width, data }, weights) {
  const sums = new Float64Array(weights.length * width);
  for (let x = 0, at = 0; x < width; x++) {
    for (const parts of weights) {
      let total = 0;
      for (let part = 0; part < parts.length; part += 2) total += parts[part + 1] * data[parts[part] * width + x];
      sums[at++] = total;
    }
  }
  return { height: width, width: weights.length, data: sums };
}

/** Scale a photo's geometry to a display of `width` × `height` pixels: {width, height, seen}. */
export function scalePhoto({ width, height, seen }, newWidth, newHeight) {
  const [across, down] = [newWidth / width, newHeight / height];
  const { left, top, right, bottom } = seen;
  return {
    width: newWidth,
    height: newHeight,
    seen: { left: left * across, top: top * down, right: right * across, bottom: bottom * down },
  };
}

/** Interpolate a map on the pixels of a photo that the model saw; also return the position of the first, {left, top}. */
export function onPixels(map, { width, height, seen }, smooth = true) {
  const rows = axis(seen.top, seen.bottom, height, map.height, smooth);
  const columns = axis(seen.left, seen.right, width, map.width, smooth);
  return { left: columns.start, top: rows.start, ...sample(map, rows, columns) };
}

/** Return a map's value at a point of the photo (x and y in its pixels), or null where the model did not see it. */
export function valueAt(map, { seen }, x, y, smooth = true) {
  if (!(x >= seen.left && x <= seen.right && y >= seen.top && y <= seen.bottom)) return null;
  // The axes of one pixel, whose centre is at 0.5.
  const rows = axis(seen.top - y + 0.5, seen.bottom - y + 0.5, 1, map.height, smooth);
  const columns = axis(seen.left - x + 0.5, seen.right - x + 0.5, 1, map.width, smooth);
  return sample(map, rows, columns).data[0];
}

/** Return the strongest value that a sign shows, and its cell's centre in the photo: {value, x, y}. */
export function peak(map, { seen }, sign = "positive") {
  const strength = { positive: (value) => value, negative: (value) => -value }[sign] ?? Math.abs;
  const best = map.data.reduce((most, value, index) => (strength(value) > strength(map.data[most]) ? index : most), 0);
  const [row, column] = [Math.floor(best / map.width), best % map.width];
  return {
    value: map.data[best],
    x: seen.left + ((column + 0.5) / map.width) * (seen.right - seen.left),
    y: seen.top + ((row + 0.5) / map.height) * (seen.bottom - seen.top),
  };
}

/** Return the quantile of sorted values, interpolated linearly, as `numpy.quantile` does. */
export function quantileOfSorted(sorted, share) {
  const at = share * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]) * (at - low);
}
