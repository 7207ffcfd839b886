/** Line charts as SVG, which the style sheet colours by their classes. */

const SVG = "http://www.w3.org/2000/svg";
const [WIDTH, HEIGHT] = [640, 260]; // pixels; the chart shrinks with its container
const MARGIN = { left: 56, right: 12, top: 12, bottom: 40 };

/** Return round numbers that cover a range: steps of 1, 2 or 5 times a power of ten. */
export function ticks(low, high, most = 6) {
  if (!(high > low)) return [low];
  const raw = (high - low) / Math.max(1, most - 1);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * (1 - 1e-9));
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  const [first, last] = [Math.ceil(low / step - 1e-9), Math.floor(high / step + 1e-9)];
  return Array.from({ length: last - first + 1 }, (_, index) => Number(((first + index) * step).toFixed(Math.min(digits, 20))));
}

/** Return at most `most` powers of ten that cover a range of positive numbers. */
export function powers(low, high, most = 6) {
  const [first, last] = [Math.floor(Math.log10(low)), Math.ceil(Math.log10(high))];
  const step = Math.max(1, Math.ceil((last - first) / Math.max(1, most - 1)));
  return Array.from({ length: Math.floor((last - first) / step) + 1 }, (_, index) => 10 ** (first + index * step));
}

/** Create an element of SVG. */
export function element(name, attributes = {}, text = "") {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text) node.textContent = text;
  return node;
}

const short = (value) => {
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e5) ? value.toExponential(0).replace("e+", "e") : String(Number(value.toPrecision(6)));
};

/**
 * Return a line chart as an SVG element.
 *
 * @param options.title, options.description for screen readers
 * @param options.series list of {name, points: [{x, y, label}]}; points that are not finite leave a gap
 * @param options.logarithmic true for a logarithmic y axis; values of 0 or less leave a gap
 * @param options.xTicks false to leave out the numbers of the x axis
 * @param options.onPick called with (series, point) on a click, Enter or Space
 */
export function lineChart(options) {
  const { title, description = "", series, xLabel = "", yLabel = "" } = options;
  const svg = element("svg", { class: "chart", viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "group", "aria-label": `${title}. ${description}` });
  const frame = frameOf(options);
  svg.append(axes(frame, { xLabel, yLabel, xTicks: options.xTicks ?? true }));
  const tip = tipOf();
  series.forEach((one, index) => svg.append(lineOf(one, index, frame, tip, options.onPick)));
  svg.append(tip.node);
  moveByKeys(svg);
  return svg;
}

function frameOf({ series, logarithmic = false }) {
  const isShown = (value) => Number.isFinite(value) && (!logarithmic || value > 0);
  const points = series.flatMap(({ points: all }) => all).filter(({ y }) => isShown(y));
  const ends = (values, fallback) => (values.length ? [Math.min(...values), Math.max(...values)] : fallback);
  const [left, right] = ends(points.map(({ x }) => x), [0, 1]);
  let [low, high] = ends(points.map(({ y }) => y), logarithmic ? [1, 10] : [0, 1]);
  if (low === high) [low, high] = logarithmic ? [low / 2, high * 2] : [low - 0.5, high + 0.5];
  const yTicks = logarithmic ? powers(low, high) : ticks(low, high);
  [low, high] = [Math.min(low, yTicks[0]), Math.max(high, yTicks.at(-1))];
  const scale = logarithmic ? Math.log10 : (value) => value;
  const share = (value) => (scale(value) - scale(low)) / (scale(high) - scale(low));
  return {
    x: (value) => MARGIN.left + ((value - left) / (right - left || 1)) * (WIDTH - MARGIN.left - MARGIN.right),
    y: (value) => HEIGHT - MARGIN.bottom - share(value) * (HEIGHT - MARGIN.top - MARGIN.bottom),
    isShown,
    xTicks: ticks(left, right),
    yTicks,
  };
}

function axes(frame, { xLabel, yLabel, xTicks }) {
  const group = element("g", { "aria-hidden": "true" });
  const [left, right, bottom] = [MARGIN.left, WIDTH - MARGIN.right, HEIGHT - MARGIN.bottom];
  for (const value of frame.yTicks) {
    const y = frame.y(value);
    group.append(element("line", { class: "chart-grid", x1: left, x2: right, y1: y, y2: y }));
    group.append(element("text", { class: "chart-label", x: left - 6, y: y + 4, "text-anchor": "end" }, short(value)));
  }
  for (const value of xTicks ? frame.xTicks : []) {
    group.append(element("text", { class: "chart-label", x: frame.x(value), y: bottom + 16, "text-anchor": "middle" }, short(value)));
  }
  group.append(element("line", { class: "chart-axis", x1: left, x2: right, y1: bottom, y2: bottom }));
  group.append(element("text", { class: "chart-title", x: (left + right) / 2, y: HEIGHT - 6, "text-anchor": "middle" }, xLabel));
  const turned = { transform: `rotate(-90 12 ${(MARGIN.top + bottom) / 2})`, "text-anchor": "middle" };
  group.append(element("text", { class: "chart-title", x: 12, y: (MARGIN.top + bottom) / 2, ...turned }, yLabel));
  return group;
}

function lineOf({ name, points }, index, frame, tip, onPick) {
  const group = element("g", { color: `var(--series-${index % 6})`, role: "list", "aria-label": name });
  let path = "";
  let isNew = true;
  for (const point of points) {
    isNew ||= !frame.isShown(point.y);
    if (!frame.isShown(point.y)) continue;
    path += `${isNew ? "M" : "L"}${frame.x(point.x).toFixed(1)} ${frame.y(point.y).toFixed(1)}`;
    isNew = false;
  }
  group.append(element("path", { class: "chart-line", d: path, fill: "none", "aria-hidden": "true" }));
  for (const point of points) if (frame.isShown(point.y)) group.append(pointOf(point, name, frame, tip, onPick));
  return group;
}

function pointOf(point, name, frame, tip, onPick) {
  const [x, y] = [frame.x(point.x), frame.y(point.y)];
  const text = `${name}: ${point.label ?? short(point.x)}, ${short(Number(point.y.toPrecision(3)))}`;
  const dot = element("circle", { class: "chart-point", cx: x, cy: y, r: 4, tabindex: "-1", role: onPick ? "button" : "img", "aria-label": text });
  const item = element("g", { role: "listitem" });
  item.append(dot);
  for (const event of ["pointerenter", "focus"]) dot.addEventListener(event, () => tip.show(x, y, text));
  for (const event of ["pointerleave", "blur"]) dot.addEventListener(event, () => tip.hide());
  if (!onPick) return item;
  dot.addEventListener("click", () => onPick(name, point));
  dot.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== " ") return;
    event.preventDefault();
    onPick(name, point);
  });
  return item;
}

function tipOf() {
  const node = element("text", { class: "chart-tip", "aria-hidden": "true", visibility: "hidden" });
  const show = (x, y, text) => {
    const [anchor, at] = x > WIDTH / 2 ? ["end", x - 8] : ["start", x + 8];
    node.setAttribute("x", at);
    node.setAttribute("y", Math.max(14, y - 8));
    node.setAttribute("text-anchor", anchor);
    node.setAttribute("visibility", "visible");
    node.textContent = text;
  };
  return { node, show, hide: () => node.setAttribute("visibility", "hidden") };
}

/** Let Tab reach one point of a chart, and the arrow keys, Home and End move to the others. */
function moveByKeys(svg) {
  const points = [...svg.querySelectorAll(".chart-point")];
  if (points.length) points[0].setAttribute("tabindex", "0");
  svg.addEventListener("keydown", (event) => {
    const at = points.indexOf(event.target);
    const next = { ArrowRight: at + 1, ArrowLeft: at - 1, Home: 0, End: points.length - 1 }[event.key];
    if (at < 0 || next === undefined || !points[next]) return;
    event.preventDefault();
    points[at].setAttribute("tabindex", "-1");
    points[next].setAttribute("tabindex", "0");
    points[next].focus();
  });
}
