/** Receipts of explanations, in the Python client's format. */
import { bytesOf } from "./maps.js";
import { sha256 } from "./sha256.js";

export const FORMAT = "camserve receipt 1";
const FUSIONS = { FUSION_MEAN: "mean", FUSION_MAX: "max", FUSION_PRODUCT: "product", FUSION_SUM: "sum" };
const SEPARATOR = " + "; // joins the names of fused layers
const TEXTS = ["model", "source", "weights", "digest", "precision", "device", "image_sha256", "input_sha256", "method"];

/** Return an explanation's receipt as JSON text, or null; responses leave out images and masks of targets, requests do not. */
export function receiptText(response, index, request = {}) {
  if (!response.receipt) return null;
  const explanation = response.explanations[index];
  const { targets = [] } = request;
  const requested = targets.length ? targets[index % targets.length] : null;
  const { source = "", weights = "", digest = "", precision = "", device = "", versions = {}, imageSha256 = "", inputSha256 = "", texts, valueRange, interventions } = response.receipt;
  const content = {
    format: FORMAT,
    ...{ model: response.model ?? "", source, weights, digest, precision, device, versions },
    image_sha256: imageSha256,
    input_sha256: inputSha256,
    ...fieldsOf(explanation, requested),
    ...(texts && { texts }),
    ...(valueRange && { value_range: [valueRange.minimum ?? 0, valueRange.maximum ?? 0] }),
    ...(interventions && { interventions: renamed(interventions, snakeName) }),
  };
  return JSON.stringify(content, null, 2);
}

function fieldsOf(explanation, requested) {
  const { method = "", layer = "", parameters = {}, score = 0, verdict = "VERDICT_UNSPECIFIED" } = explanation;
  return {
    method,
    parameters: Object.fromEntries(Object.entries(parameters).map(([name, value]) => [name, plainParameter(value)])),
    augmentation_smoothing: explanation.augmentationSmoothing ?? false,
    eigen_smoothing: explanation.eigenSmoothing ?? false,
    layers: layer ? layer.split(SEPARATOR) : [],
    fusion: FUSIONS[explanation.fusion] ?? null,
    target: targetOf(explanation.resolvedTarget ?? {}, requested),
    score: jsonNumber(score, Math.fround),
    verdict: verdict.replace("VERDICT_", ""),
    heatmap: explanation.heatmap ? heatmapOf(explanation.heatmap) : null,
    ...("inputChannel" in explanation && { input_channel: explanation.inputChannel }),
  };
}

function plainParameter(parameter) {
  return "text" in parameter ? parameter.text : jsonNumber(parameter.number ?? 0);
}

/** Convert a number of protobuf's JSON, in which NaN and infinities are strings. */
function jsonNumber(number, round = (value) => value) {
  const value = Number(number);
  if (Number.isFinite(value)) return round(value);
  return Number.isNaN(value) ? "nan" : value > 0 ? "inf" : "-inf";
}

function targetOf(resolved, requested) {
  const lacksFile = (resolved.similarity && !resolved.similarity.image) || requested?.segment?.mask;
  return renamed(lacksFile && requested ? requested : resolved, snakeName);
}

/** Rename the fields of a message: receipts have the names of the .proto file. */
function renamed(value, rename) {
  if (Array.isArray(value)) return value.map((item) => renamed(item, rename));
  if (!isObject(value)) return value;
  return Object.fromEntries(Object.entries(value).map(([key, part]) => [rename(key), renamed(part, rename)]));
}

export const snakeName = (name) => name.replace(/[A-Z]/g, (letter) => `_${letter.toLowerCase()}`);
const camelName = (name) => name.replace(/_([a-z])/g, (_, letter) => letter.toUpperCase());

function heatmapOf({ height = 0, width = 0, data = "" }) {
  return { height, width, sha256: sha256(bytesOf(data)), data };
}

/** Return the fields of a receipt; throw an Error with a message for people if the text is none. */
export function readReceipt(text) {
  const content = parse(text);
  for (const [name, expected, fits] of CHECKS) {
    if (OPTIONAL.includes(name) && !(name in content)) continue;
    if (!(name in content)) throw new Error(`the receipt has no "${name}"`);
    if (!fits(content[name])) throw new Error(`"${name}" of the receipt must be ${expected}`);
  }
  return content;
}

function parse(text) {
  let content;
  try {
    content = JSON.parse(text);
  } catch (error) {
    throw new Error(`not a camserve receipt: it is not JSON (${error.message})`);
  }
  if (!isObject(content)) throw new Error("not a camserve receipt: it is not a JSON object");
  if (content.format === FORMAT) return content;
  if (typeof content.format === "string" && content.format.startsWith("camserve receipt")) {
    throw new Error(`the receipt has the format ${JSON.stringify(content.format.slice(0, 60))}; this page reads "${FORMAT}"`);
  }
  throw new Error(`not a camserve receipt: its "format" is not "${FORMAT}"`);
}

export const isText = (value) => typeof value === "string";
export const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
export const isBoolean = (value) => typeof value === "boolean";
const isNumber = (value) => typeof value === "number" || (isText(value) && /^-?(inf|nan|\d)/i.test(value));
const entries = (value, fits) => isObject(value) && Object.values(value).every(fits);

export const isCount = (value) => Number.isInteger(value) && value >= 0;
export const listOf = (fits) => (value) => Array.isArray(value) && value.every((item) => fits(item));

const NAMED = new Map([["text", isText], ["label", isText], ["classIndex", isCount], ["class_index", isCount]]);
const isPlain = (value) => ["string", "number", "boolean"].includes(typeof value);
const isPart = (value) => isPlain(value) || isTarget(value) || listOf(isTarget)(value);

/** Return true for a target, in the API's JSON or a receipt's, and for a part of one: its names are texts and numbers. */
export function isTarget(value) {
  return isObject(value) && Object.entries(value).every(([name, part]) => (NAMED.get(name) ?? isPart)(part));
}

const CHANGES = ["silence", "scale", "clamp", "replaceMean", "clipGradient"];

/** Return true for an intervention, in the API's JSON or a receipt's. */
export function isIntervention(value) {
  const changes = isObject(value) ? Object.keys(value).filter((name) => CHANGES.includes(camelName(name))) : [];
  return changes.length === 1 && isText(value.layer) && listOf(isCount)(value.channels ?? []);
}

const OPTIONAL = ["texts", "value_range", "interventions", "input_channel"];

const CHECKS = [
  ...TEXTS.map((name) => [name, "a string", isText]),
  ["versions", "an object of strings", (value) => entries(value, isText)],
  ["parameters", "an object of numbers and strings", (value) => entries(value, (item) => isText(item) || typeof item === "number")],
  ["augmentation_smoothing", "true or false", isBoolean],
  ["eigen_smoothing", "true or false", isBoolean],
  ["layers", "a list of names", listOf(isText)],
  ["texts", "a list of texts", listOf(isText)],
  ["value_range", "two numbers", (value) => listOf(Number.isFinite)(value) && value.length === 2],
  ["interventions", "a list of interventions", listOf(isIntervention)],
  ["input_channel", "the index of a channel", isCount],
  ["fusion", "null, mean, max, product, sum", (value) => value === null || Object.values(FUSIONS).includes(value)],
  ["target", "a target", isTarget],
  ["score", "a number", isNumber],
  ["verdict", "a verdict", isText],
  ["heatmap", "null or a map that matches its SHA-256", (value) => value === null || isIntact(value)],
];

function isIntact(heatmap) {
  try {
    const bytes = bytesOf(heatmap.data);
    return bytes.length === 4 * heatmap.height * heatmap.width && sha256(bytes) === heatmap.sha256;
  } catch {
    return false;
  }
}

/** Return the ExplainRequest, in the API's JSON and without the image, that computes a receipt's explanation again. */
export function requestOf(receipt) {
  const smoothing = { augmentationSmoothing: receipt.augmentation_smoothing, eigenSmoothing: receipt.eigen_smoothing };
  const parameter = (value) => (isText(value) ? { text: value } : { number: value });
  const parameters = Object.fromEntries(Object.entries(receipt.parameters).map(([name, value]) => [name, parameter(value)]));
  const channel = "input_channel" in receipt && { perChannel: true, inputChannels: [receipt.input_channel] };
  const request = {
    model: receipt.model,
    methods: [{ name: receipt.method, parameters, ...smoothing, ...channel }],
    targets: [renamed(receipt.target, camelName)],
    layers: receipt.layers,
    interventions: renamed(receipt.interventions ?? [], camelName),
    ...(receipt.texts && { texts: receipt.texts }),
    ...(receipt.value_range && { valueRange: { minimum: receipt.value_range[0], maximum: receipt.value_range[1] } }),
  };
  return receipt.fusion ? { ...request, fusion: `FUSION_${receipt.fusion.toUpperCase()}` } : request;
}
