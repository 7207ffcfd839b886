/** Regions of a map: connected parts of it whose shown values reach a threshold. */
import { complete, shown, thresholdValue } from "./draw.js";
import { list, resize, sum } from "./maps.js";

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
 * Return the regions of a map, those with the largest sums first: {box: {left, top, right, bottom}, share}, in the photo's
 * pixels. They are found on the pixels of the model's input, as the server does. The style's sign selects the values; its
 * threshold is that of the regions, or else the quantile 0.8. Negative values form regions of their own.
 */
export function regionsOf(map, { seen }, style, { inputSize = [224, 224], most = 8 } = {}) {
  const whole = complete(style);
  const { height, width, data } = resize(shown(map, whole.sign), ...inputSize);
  const least = thresholdValue(map, { ...whole, threshold: whole.threshold ?? { quantile: 0.8 } }, inputSize);
  const mask = Uint8Array.from(data, (value) => (Math.abs(value) >= least && value !== 0 ? (value > 0 ? 1 : 2) : 0));
  const { labels, count } = components(mask, height, width);
  const found = list(count, () => ({ left: Infinity, top: Infinity, right: 0, bottom: 0, evidence: 0 }));
  for (let index = 0; index < labels.length; index++) {
    if (!labels[index]) continue;
    const region = found[labels[index] - 1];
    const [y, x] = [Math.floor(index / width), index % width];
    [region.left, region.right] = [Math.min(region.left, x), Math.max(region.right, x + 1)];
    [region.top, region.bottom] = [Math.min(region.top, y), Math.max(region.bottom, y + 1)];
    region.evidence += Math.abs(data[index]);
  }
  const total = sum(Float64Array.from(data, Math.abs));
  const x = (column) => seen.left + (column / width) * (seen.right - seen.left);
  const y = (row) => seen.top + (row / height) * (seen.bottom - seen.top);
  const strongestFirst = found.sort((one, other) => other.evidence - one.evidence).slice(0, most);
  return strongestFirst.map(({ left, top, right, bottom, evidence }) => ({
    box: { left: x(left), top: y(top), right: x(right), bottom: y(bottom) },
    share: evidence / total,
  }));
}
