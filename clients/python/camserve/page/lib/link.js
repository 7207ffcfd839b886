/** The page's state as a URL fragment, and back. */
import { base64Of, bytesOf } from "./maps.js";
import { COLORMAPS } from "./colormaps.js";
import { isBoolean, isCount, isIntervention, isObject, isTarget, isText, listOf } from "./receipt.js";

const VERSION = "1.";
const LONGEST = 8192; // characters of a fragment that is read

export const MOST_HIDDEN = 0.95; // of a map's cells, by the threshold
export const MOST_LINES = 8; // contour lines

/** Return the URL fragment, without "#", of a page's state; photos are left out, also those of targets, and masks. */
export function writeLink({ request = {}, style = {}, view = {} }) {
  const content = JSON.stringify([request, style, view], (key, value) => (["image", "mask"].includes(key) || isEmpty(value) ? undefined : value));
  return VERSION + base64Of(new TextEncoder().encode(content)).replaceAll("+", "-").replaceAll("/", "_").replaceAll("=", "");
}

function isEmpty(value) {
  return value === null || value === "" || (Array.isArray(value) && !value.length);
}

/** Read a URL fragment, with or without "#"; return {request, style, view}, or null if it is no state. */
export function readLink(fragment) {
  const text = fragment.replace(/^#/, "");
  if (!text.startsWith(VERSION) || text.length > LONGEST) return null;
  try {
    const bytes = bytesOf(text.slice(VERSION.length).replaceAll("-", "+").replaceAll("_", "/"));
    const content = JSON.parse(new TextDecoder("utf-8", { fatal: true }).decode(bytes));
    if (!Array.isArray(content)) return null;
    const [request, style, view] = content;
    return { request: keep(request, REQUEST), style: keep(style, STYLE), view: keep(view, VIEW) };
  } catch {
    return null;
  }
}

const isShare = (value) => typeof value === "number" && value >= 0 && value <= 1;
const oneOf = (...known) => (value) => known.includes(value);
const shortListOf = (fits) => (value) => listOf(fits)(value) && value.length <= 16;
const byModel = (fits) => (value) => isObject(value) && Object.values(value).every(shortListOf(fits));

const REQUEST = {
  model: isText,
  methods: shortListOf((value) => isObject(value) && isText(value.name)),
  targets: shortListOf(isTarget),
  topK: isCount,
  fusion: isText,
  valueRange: isObject,
};

/** What the controls of the look can be set to: a link must not hide a map by something that they do not show. */
const STYLE = {
  sign: oneOf("positive", "negative", "both", "absolute"),
  scale: oneOf("map", "shared"),
  threshold: (value) => isObject(value) && Object.keys(value).join() === "quantile" && isShare(value.quantile) && value.quantile <= MOST_HIDDEN,
  colormap: oneOf(...COLORMAPS),
  opacity: isShare,
  fade: isBoolean,
  smooth: isBoolean,
  contourLines: (value) => isCount(value) && value <= MOST_LINES,
};

const VIEW = {
  models: shortListOf(isText),
  layers: byModel(isText),
  interventions: byModel(isIntervention),
  bands: shortListOf(isCount),
  window: isObject,
  regions: isBoolean,
  peak: isBoolean,
};

/** Keep the properties of an object that have the expected types; others may reach its prototype. */
function keep(value, schema) {
  const parts = isObject(value) ? Object.entries(value) : [];
  return Object.fromEntries(parts.filter(([name, part]) => Object.hasOwn(schema, name) && schema[name](part)));
}
