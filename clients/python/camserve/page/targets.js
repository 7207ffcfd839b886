/** Targets of explanations as the API's JSON: what to ask about a prediction or a class. */
import { className } from "./lib/words.js";
import { ask, mainTask, state } from "./state.js";

/** Return the target that a prediction of a model of some task is. */
export function targetOf(prediction, task) {
  const { classIndex = 0, box } = prediction;
  if (task === "segment") return { segment: { className: { classIndex } } };
  if (task === "detect") return { detection: { className: { classIndex }, ...(box ? { box } : {}) } };
  return { classIndex };
}

export const isSame = (one, other) => JSON.stringify(one) === JSON.stringify(other);

/** Return true if a prediction is among the targets. */
export const isAsked = (prediction) => state.ask.targets.some((target) => isSame(target, targetOf(prediction, mainTask())));

/** Return the class that a target explains, or null if it is none. */
export function classOf(target) {
  const name = target.contrast?.why ?? target.finer?.why ?? target.segment?.className ?? target.detection?.className ?? target;
  return name.classIndex ?? null;
}

/** Ask about a class or object: only it, it too, or why the first target and not it. */
export function choose(prediction, mode) {
  const { targets } = state.ask;
  const target = targetOf(prediction, mainTask());
  if (mode === "contrast") return contrast(prediction);
  if (mode === "add") {
    const others = targets.filter((other) => !isSame(other, target));
    return ask({ targets: others.length < targets.length ? others : [...targets, target] });
  }
  return ask({ targets: [target] });
}

function contrast({ classIndex = 0 }) {
  const why = state.ask.targets.map(classOf).find((index) => index !== null) ?? explained();
  if (why === undefined || why === classIndex) return;
  ask({ targets: [{ contrast: { why: { classIndex: why }, whyNot: { classIndex } } }] });
}

function explained() {
  const { target } = state.cells[0]?.explanation ?? {};
  return target && (target.classIndex ?? 0);
}

/** Return the target of a part, given as a mask, for the class that is explained now. */
export function maskOf(mask) {
  const classIndex = classOf(state.ask.targets[0] ?? {}) ?? explained() ?? 0;
  return { segment: { className: { classIndex }, mask } };
}

/** Return the name of a target, with the labels of a model. */
export function nameOf(target, labels = []) {
  const name = ({ classIndex, label } = {}) => className({ classIndex, label: label || labels[classIndex] });
  if (target.contrast) return `${name(target.contrast.why)}, not ${name(target.contrast.whyNot)}`;
  if (target.finer) return `${name(target.finer.why)}, against similar classes`;
  if (target.similarity) return "similarity to another photo";
  if (target.text) return target.text;
  if (target.segment) return name(target.segment.className) + (target.segment.mask ? " in a mask" : "");
  if (target.detection) return name(target.detection.className);
  return name(target) + (target.softmax ? " (probability)" : "");
}
