/** Regions of a map: connected parts of it whose shown values reach a threshold. */
import { complete, shown, thresholdValue } from "./draw.js";
import { resize } from "./maps.js";

/**
 * Label the connected components of a mask, of equal values and eight neighbours: {labels, count}, with labels 1, 2, … in
 * the order of their first pixels, and 0 outside.
 */
function components(mask, height, width) {
  const labels = new Int32Array(mask.length);
  const stack = [];
  let count = 0;
  for (let start = 0; start < mask.length; start++) {
    if (!mask[start] || labels[start]) continue;
    labels[start] = ++count;
    stack.push(start);
    while (stack.length) {
      const index = stack.pop();
      const [y, x] = [Math.floor(index / width), index % width];
      for (let row = Math.max(0, y - 1); row <= Math.min(height - 1, y + 1); row++) {
        for (let column = Math.max(0, x - 1); column <= Math.min(width - 1, x + 1); column++) {
          const other = row * width + column;
          if (mask[other] !== mask[start] || labels[other]) continue;
          labels[other] = count;
          stack.push(other);
        }
      }
    }
  }
  return { labels, count };
}

/**
 * Return the regions of a grid whose magnitudes reach a threshold, those with the largest sums first, in cells of the grid:
 * {box: {left, top, right, bottom}, area, peak: {x, y}, peakValue, share}. Negative values form regions of their own, and
 * the value 0 belongs to none.
 */
function regionsOfGrid({ height, width, data }, threshold, most = 8) {
  const mask = Uint8Array.from(data, (value) => (Math.abs(value) >= threshold && value !== 0 ? (value > 0 ? 1 : 2) : 0));
  const { labels, count } = components(mask, height, width);
  const total = data.reduce((sum, value) => sum + Math.abs(value), 0);
  const found = Array.from({ length: count }, () => ({ left: Infinity, top: Infinity, right: 0, bottom: 0, area: 0, sum: 0, best: -1 }));
  for (let index = 0; index < labels.length; index++) {
    if (!labels[index]) continue;
    const region = found[labels[index] - 1];
    const [y, x] = [Math.floor(index / width), index % width];
    [region.left, region.right] = [Math.min(region.left, x), Math.max(region.right, x + 1)];
    [region.top, region.bottom] = [Math.min(region.top, y), Math.max(region.bottom, y + 1)];
    region.area += 1;
    region.sum += Math.abs(data[index]);
    if (region.best < 0 || Math.abs(data[index]) > Math.abs(data[region.best])) region.best = index;
  }
  found.sort((one, other) => other.sum - one.sum);
  return found.slice(0, most).map(({ area, sum, best, ...box }) => ({
    box,
    area,
    peak: { x: (best % width) + 0.5, y: Math.floor(best / width) + 0.5 },
    peakValue: data[best],
    share: sum / total,
  }));
}

/**
 * Return the regions of a map in the photo's pixels, found on the pixels of the model's input as the server does. The
 * style's sign selects the values; its threshold is that of the regions, or else the quantile 0.8.
 */
export function regionsOf(map, { seen }, style, { inputSize = [224, 224], most = 8 } = {}) {
  const whole = complete(style);
  const grid = resize(shown(map, whole.sign), ...inputSize);
  const least = thresholdValue(map, { ...whole, threshold: whole.threshold ?? { quantile: 0.8 } }, inputSize);
  const [across, down] = [(seen.right - seen.left) / grid.width, (seen.bottom - seen.top) / grid.height];
  const x = (column) => seen.left + column * across;
  const y = (row) => seen.top + row * down;
  return regionsOfGrid(grid, least, most).map(({ box, area, peak, ...rest }) => ({
    ...rest,
    box: { left: x(box.left), top: y(box.top), right: x(box.right), bottom: y(box.bottom) },
    area: area * across * down,
    peak: { x: x(peak.x), y: y(peak.y) },
  }));
}
