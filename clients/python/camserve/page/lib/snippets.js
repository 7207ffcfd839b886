/** A request as a Python call of the SDK, and as a curl command of the HTTP/JSON API. */
import { snakeName } from "./receipt.js";

const OPEN = "photo.jpg";
const OTHER = "other.jpg"; // the photo of a similarity
const MASK = "mask.png";

/** Quote text as a Python string literal; characters that editors do not show are escaped. */
export function pythonString(text) {
  return JSON.stringify(text).replace(/[\u007f-\u00a0\u00ad\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]/g, (character) =>
    `\\u${character.charCodeAt(0).toString(16).padStart(4, "0")}`,
  );
}

/** Quote text for a POSIX shell. */
export function shellString(text) {
  return /^[\w./:@%+=,-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`;
}

/** Return the Python literal of a value. Of what a link or a receipt may hold, nothing becomes code in any other way. */
function pythonValue(value) {
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value === "string") return pythonString(value);
  if (Array.isArray(value)) return `[${value.map(pythonValue).join(", ")}]`;
  if (typeof value === "object") {
    return `{${Object.entries(value).map(([name, part]) => `${pythonString(name)}: ${pythonValue(part)}`).join(", ")}}`;
  }
  return Number.isFinite(value) ? String(value) : `float(${pythonString(String(value))})`;
}

/** Return a name as a Python identifier; one that is none already becomes another one. */
const pythonName = (name) => snakeName(name).replace(/\W/g, "_").replace(/^(?=\d)/, "_");

const word = (name, prefix) => name.replace(prefix, "").toLowerCase();
const className = (name) => pythonValue("label" in name ? name.label : (name.classIndex ?? 0));
const tuple = (...values) => `(${values.map(pythonValue).join(", ")})`;
const box = ({ left = 0, top = 0, right = 0, bottom = 0 }) => tuple(left, top, right, bottom);

const TARGETS = {
  contrast: ({ why, whyNot }) => `camserve.contrast(${className(why)}, ${className(whyNot)})`,
  finer: ({ why, against = [], weight }) => {
    const parts = [why, ...against].map(className);
    return `camserve.finer(${[...parts, ...(weight === undefined ? [] : [`weight=${pythonValue(weight)}`])].join(", ")})`;
  },
  similarity: () => `camserve.similarity(${pythonString(OTHER)})`,
  text: (text) => `camserve.text(${pythonValue(text)})`,
  segment: ({ className: name, region, mask }) =>
    mask ? `camserve.mask(${className(name)}, ${pythonString(MASK)})` : `camserve.segment(${className(name)}${region ? `, ${box(region)}` : ""})`,
  detection: ({ className: name, box: edges }) => `camserve.detection(${className(name)}${edges ? `, ${box(edges)}` : ""})`,
};

function pythonTarget(target) {
  const kind = Object.keys(TARGETS).find((name) => target[name]);
  if (kind) return TARGETS[kind](target[kind]);
  return target.softmax ? `camserve.probability(${className(target)})` : className(target);
}

function pythonMethod({ name, parameters = {}, augmentationSmoothing = false, eigenSmoothing = false, perChannel = false, inputChannels = [] }) {
  const values = Object.fromEntries(
    Object.entries(parameters).map(([key, parameter]) => [key, parameter.text ?? Number(parameter.number ?? 0)]),
  );
  const options = [
    ...(Object.keys(values).length ? [pythonValue(values)] : []),
    ...(augmentationSmoothing ? ["augmentation_smoothing=True"] : []),
    ...(eigenSmoothing ? ["eigen_smoothing=True"] : []),
    ...(perChannel ? [`per_channel=${pythonValue(inputChannels.length ? inputChannels : true)}`] : []),
  ];
  return options.length ? `camserve.Method(${[pythonValue(name), ...options].join(", ")})` : pythonValue(name);
}

/** Return the SDK's call that makes an intervention. */
export function pythonIntervention({ layer, channels = [], input, ...change }) {
  const [[kind, value]] = Object.entries(change); // the API's JSON has nothing else
  const named = { scale: { factor: value }, clamp: value, clipGradient: { limit: value } }[kind] ?? {};
  const parts = Object.entries({ ...named, ...(channels.length && { channels }) }).map(([name, part]) => `${pythonName(name)}=${pythonValue(part)}`);
  return `camserve.${pythonName(kind)}(${[pythonValue(layer), ...parts, ...(input ? ["input=True"] : [])].join(", ")})`;
}

/** Return the server's Rendering of a drawing style; the view says if regions are shown. */
export function renderingOf({ opacity, sign, colormap, threshold, scale, contourLines, fade }, { regions }) {
  const given = {
    alpha: opacity === 0.5 ? undefined : opacity,
    sign: sign ? `SIGN_${sign.toUpperCase()}` : undefined,
    colormap: colormap ?? undefined,
    thresholdQuantile: threshold?.quantile,
    sharedScale: scale === "shared" || undefined,
    contourLines: contourLines || undefined,
    fade: fade || undefined,
    regions: regions ? { draw: true } : undefined,
  };
  const used = Object.entries(given).filter(([, value]) => value !== undefined);
  return { overlay: "IMAGE_FORMAT_JPEG", heatmap: true, ...Object.fromEntries(used) };
}

/** Return the keyword arguments of Client.explain, [name, Python code], without defaults. */
function keywords(request) {
  const { model, methods = [], targets = [], layers = [], interventions = [], topK, maxPredictions, fusion, valueRange } = request;
  const list = (items) => (items.length === 1 ? items[0] : `[${items.join(", ")}]`);
  const given = [
    ["model", model && pythonValue(model)],
    ["methods", methods.length && list(methods.map(pythonMethod))],
    ["targets", targets.length && list(targets.map(pythonTarget))],
    ["layers", layers.length && list(layers.map(pythonValue))],
    ["fusion", fusion && fusion !== "FUSION_UNSPECIFIED" && pythonString(word(fusion, "FUSION_"))],
    ["interventions", interventions.length && `[${interventions.map(pythonIntervention).join(", ")}]`],
    ["value_range", valueRange && tuple(valueRange.minimum ?? 0, valueRange.maximum ?? 0)],
    ["top_k", topK !== undefined && topK !== 1 && pythonValue(topK)],
    ["class_map", request.classMap && "True"],
    ["max_predictions", maxPredictions !== undefined && maxPredictions !== 5 && pythonValue(maxPredictions)],
    ...renderingKeywords(request.rendering ?? {}),
  ];
  return given.filter(([, code]) => code);
}

/** Return the keyword arguments of a Rendering that renderingOf returns. */
function renderingKeywords({ alpha, sign, colormap, thresholdQuantile, sharedScale, contourLines, fade, regions, bands = [], window }) {
  return [
    ["alpha", alpha !== undefined && pythonValue(alpha)],
    ["sign", sign && pythonString(word(sign, "SIGN_"))],
    ["colormap", colormap && pythonValue(colormap)],
    ["threshold", thresholdQuantile !== undefined && pythonValue(thresholdQuantile)],
    ["scale", sharedScale && pythonString("request")],
    ["contour_lines", contourLines && pythonValue(contourLines)],
    ["fade", fade && "True"],
    ["bands", bands.length && `(${bands.map(pythonValue).join(", ")},)`],
    ["window", window && tuple(window.centre ?? 0, window.width ?? 0)],
    ["regions", regions && "camserve.RegionOptions(draw=True)"],
  ];
}

/**
 * Return Python code that sends an ExplainRequest with the SDK to a gRPC address; the photo is a file's name. A token is
 * read from CAMSERVE_TOKEN.
 */
export function asPython(request, { address = "localhost:50051", photo = OPEN, token = false } = {}) {
  const access = token ? ', token=os.environ["CAMSERVE_TOKEN"]' : "";
  const options = [pythonString(photo), ...keywords(request).map(([name, code]) => `${name}=${code}`)];
  return [
    ...(token ? ["import os", ""] : []),
    "import camserve",
    "",
    `with camserve.Client(${pythonString(address)}${access}) as client:`,
    "    result = client.explain(",
    ...options.map((option) => `        ${option},`),
    "    )",
    "for explanation in result.explanations:",
    "    print(explanation.title, explanation.method, explanation.verdict)",
    "",
  ].join("\n");
}

/** Return a shell command that sends an ExplainRequest with curl, to an HTTP address. */
export function asCurl(request, { address = "http://localhost:8080", photo = OPEN, token = false } = {}) {
  const { image: _, targets = [], ...rest } = request;
  const mark = (name) => `\u0000${name}\u0000`;
  const filled = targets.map((target) => {
    if (target.similarity) return { ...target, similarity: { image: mark("other") } };
    return target.segment?.mask ? { ...target, segment: { ...target.segment, mask: mark("mask") } } : target;
  });
  const body = { ...rest, ...(filled.length ? { targets: filled } : {}), image: mark("photo") };
  const files = { photo, other: OTHER, mask: MASK };
  const pieces = JSON.stringify(body).split(/\\u0000(photo|other|mask)\\u0000/); // names at the odd places
  const commands = pieces.map((piece, index) =>
    index % 2 ? `base64 < ${shellString(files[piece])} | tr -d '\\n'` : `printf %s ${shellString(piece)}`,
  );
  const access = token ? '  -H "Authorization: Bearer $CAMSERVE_TOKEN" \\\n' : "";
  return `{ ${commands.join(";\n  ")}; } |\ncurl --fail-with-body --data-binary @- \\\n  -H 'Content-Type: application/json' \\\n${access}  ${shellString(`${address.replace(/\/$/, "")}/camserve.v1.ExplainService/Explain`)}\n`;
}
