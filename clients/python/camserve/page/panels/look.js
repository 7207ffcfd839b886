/** The controls of the drawing: every change is drawn in the browser, without a request. */
import { checkbox, choice, h, labelled } from "../dom.js";
import { COLORMAPS } from "../lib/colormaps.js";
import { MOST_HIDDEN, MOST_LINES } from "../lib/link.js";
import { changed, restyle, state } from "../state.js";

const SIGNS = [
  ["", "Automatic"],
  ["positive", "Evidence for"],
  ["negative", "Evidence against"],
  ["both", "For and against"],
  ["absolute", "Strength"],
];

function slider(label, value, [least, most, step], unit, onchange) {
  const output = h("output", value + unit);
  const oninput = ({ target }) => {
    output.textContent = target.value + unit;
    onchange(Number(target.value));
  };
  const range = h("input", { type: "range", min: least, max: most, step, value, oninput });
  const field = labelled(label, range);
  field.firstChild.append(" ", output);
  return field;
}

function threshold(share) {
  restyle({ threshold: share ? { quantile: share / 100 } : null });
}

function view(change) {
  Object.assign(state.view, change);
  changed("style");
}

export function lookBar() {
  const { style } = state;
  const hidden = Math.round(100 * (style.threshold?.quantile ?? 0));
  const colormaps = [["", "Automatic"], ...COLORMAPS.map((name) => [name, name.replaceAll("_", " ")])];
  return h(
    "div.look",
    { role: "group", "aria-label": "Look of the maps" },
    slider("Opacity", Math.round(100 * style.opacity), [0, 100, 1], " %", (value) => restyle({ opacity: value / 100 })),
    slider("Hide weakest", hidden, [0, 100 * MOST_HIDDEN, 1], " %", threshold),
    labelled("Show", choice(SIGNS, style.sign ?? "", (sign) => restyle({ sign: sign || null }))),
    labelled("Colours", choice(colormaps, style.colormap ?? "", (name) => restyle({ colormap: name || null }))),
    slider("Contour lines", style.contourLines, [0, MOST_LINES, 1], "", (contourLines) => restyle({ contourLines })),
    h(
      "div",
      { class: "switches" },
      checkbox("Same scale", style.scale === "shared", (shared) => restyle({ scale: shared ? "shared" : "map" })),
      checkbox("Smooth", style.smooth, (smooth) => restyle({ smooth })),
      checkbox("Fade", style.fade, (fade) => restyle({ fade })),
      checkbox("Regions", state.view.regions, (regions) => view({ regions })),
      checkbox("Peak", state.view.peak, (peak) => view({ peak })),
    ),
  );
}

/** Signed maps are drawn with both signs unless the user chooses: a cut one hides half of the answer. */
const SIGNED_METHODS = ["integrated_gradients", "gradient_shap", "input_x_gradient"];

/** Return the style of a cell: the sign "Automatic" depends on what the map answers. */
export function styleOf({ explanation }) {
  const { style } = state;
  const { contrast, finer, similarity } = explanation.resolvedTarget ?? {};
  const isSigned = contrast || finer || similarity || SIGNED_METHODS.includes(explanation.method);
  return style.sign || !isSigned ? style : { ...style, sign: "both" };
}
