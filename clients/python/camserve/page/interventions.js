/** Interventions on the first model: changes to what its layers return. */
import { pythonIntervention } from "./lib/snippets.js";
import { ask, state } from "./state.js";

export const interventions = () => state.ask.interventions[state.ask.models[0]] ?? [];

function intervene(list) {
  ask({ interventions: { ...state.ask.interventions, [state.ask.models[0]]: list } });
}

export const withdraw = (one) => intervene(interventions().filter((other) => other !== one));

/** Return the intervention that switches some channels of a layer off, if there is one. */
const silenceOf = (layer) => interventions().find((one) => one.silence && one.layer === layer && !one.input && one.channels?.length);

export const isOff = (layer, channel) => silenceOf(layer)?.channels.includes(channel) ?? false;

/** Switch a channel of a layer off, or on again. */
export function toggleChannel(layer, channel) {
  const old = silenceOf(layer);
  const others = old?.channels.filter((other) => other !== channel) ?? [];
  const channels = isOff(layer, channel) ? others : [...others, channel];
  intervene([...interventions().filter((one) => one !== old), ...(channels.length ? [{ layer, channels, silence: true }] : [])]);
}

/** Return what an intervention does, in words or as the call of the Python client. */
export function nameOf(one) {
  const { layer, channels = [], input, silence } = one;
  return silence && !input && channels.length ? `${layer} without channel ${channels.join(", ")}` : pythonIntervention(one).replace("camserve.", "");
}
