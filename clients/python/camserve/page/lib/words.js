/** Descriptions of verdicts, numbers and costs for people. */

const VERDICTS = {
  VERDICT_OK: "Readable",
  VERDICT_ALL_NEGATIVE: "No evidence for it",
  VERDICT_FLAT: "Flat",
  VERDICT_ZERO_GRADIENT: "Zero gradient",
  VERDICT_NON_FINITE: "Not finite",
};

/** Return the short name of a verdict. */
export const verdictName = (verdict) => VERDICTS[verdict] ?? "Unknown verdict";

/** Describe why the map of an explanation cannot be read, or return "". */
export function warning({ verdict, verdictMessage = "" }) {
  if (verdict === "VERDICT_OK") return "";
  return [verdictName(verdict), verdictMessage].filter(Boolean).join(": ");
}

/** Format a probability, 0 to 1, as a percentage. */
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

/** Format a count and its noun: count(1, "row") is "1 row". */
export function count(value, noun) {
  return `${Number(value).toLocaleString("en")} ${noun}${Number(value) === 1 ? "" : "s"}`;
}

/** Describe the cost in an EstimateCostResponse: {text, allowed}. */
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

/** Return the name of a class or prediction: "tabby", or "class 7" if it has no label. */
export const className = ({ label, classIndex = 0 }) => label || `class ${classIndex}`;

/** Return the name of the method of a map, and of the input's channel if the map is of one. */
export const methodName = ({ method = "", inputChannel }) => (inputChannel === undefined ? method : `${method}, channel ${inputChannel}`);

/** Return the name of an explained target: "tabby", "class 7", "tabby, not tiger cat". */
export function targetName({ target = {}, contrast }) {
  return className(target) + (contrast ? `, not ${className(contrast)}` : "");
}
