/** Descriptions of verdicts, numbers and costs for people. */

const VERDICTS = {
  VERDICT_UNSPECIFIED: { short: "unknown", text: "The server did not say whether the map can be read." },
  VERDICT_OK: { short: "readable", text: "The map has evidence for the target." },
  VERDICT_ALL_NEGATIVE: { short: "no evidence for it", text: "No value of the map is above zero: nothing supports the target." },
  VERDICT_FLAT: { short: "flat", text: "The map has the same value everywhere, so it points at nothing." },
  VERDICT_ZERO_GRADIENT: { short: "zero gradient", text: "The score does not depend on this layer." },
  VERDICT_NON_FINITE: { short: "not finite", text: "The map has NaN or infinite values." },
};

/** Describe a verdict of the API's JSON: {ok, short, text}. */
export function verdict(name = "VERDICT_UNSPECIFIED") {
  const known = VERDICTS[name] ?? VERDICTS.VERDICT_UNSPECIFIED;
  return { ok: name === "VERDICT_OK", ...known };
}

/** Format a probability, 0 to 1, as a percentage: "less than 0.1 %" and "more than 99.9 %" at the ends. */
export function probability(value) {
  if (!Number.isFinite(value)) return "–";
  if (value > 0 && value < 0.001) return "<0.1 %";
  if (value < 1 && value > 0.999) return ">99.9 %";
  return `${(100 * value).toFixed(1)} %`;
}

/** Format a raw value with three significant digits. */
export function number(value) {
  if (value === null || value === undefined) return "–";
  if (!Number.isFinite(value)) return String(value);
  if (value === 0) return "0";
  const size = Math.abs(value);
  const text = size >= 1e5 || size < 1e-3 ? value.toExponential(2) : value.toPrecision(3);
  return text.replace("-", "−").replace("e+", "e");
}

/** Format a count with thousands separators and its noun: count(1, "row") is "1 row". */
export function count(value, noun) {
  return `${Number(value).toLocaleString("en")} ${noun}${Number(value) === 1 ? "" : "s"}`;
}

/**
 * Describe the cost of a request.
 *
 * @param estimate an `EstimateCostResponse` of the API's JSON.
 * @returns {text, allowed}
 */
export function cost({ rows = 0, explanations = 0, maxRows = 0 }) {
  const allowed = rows <= maxRows;
  const maps = `${count(explanations, "map")}, ${count(rows, "row")} through the model`;
  return { allowed, text: allowed ? maps : `${maps}: the server allows ${count(maxRows, "row")}` };
}

/** Describe progress: {share, text} of {rowsDone, rowsTotal}. */
export function progress({ rowsDone = 0, rowsTotal = 0 }) {
  return {
    share: rowsTotal ? rowsDone / rowsTotal : 0,
    text: `${rowsDone.toLocaleString("en")} of ${count(rowsTotal, "row")}`,
  };
}

/** Return the name of an explained target: "tabby", "class 7", "tabby, not tiger cat". */
export function targetName({ target = {}, contrast }) {
  const name = ({ label, classIndex = 0 }) => label || `class ${classIndex}`;
  return name(target) + (contrast ? `, not ${name(contrast)}` : "");
}
