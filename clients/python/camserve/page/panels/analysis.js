/** The analysis below the maps: a tab for each question. */
import { byId, fill, h } from "../dom.js";
import { on, state } from "../state.js";
import { comparePanel } from "./compare.js";
import { depthPanel } from "./depth.js";
import { evaluatePanel } from "./evaluate.js";
import { sharePanel } from "./share.js";

const TABS = [
  ["compare", "Compare maps", comparePanel],
  ["layers", "Layers", depthPanel],
  ["evaluate", "Which to believe", evaluatePanel],
  ["share", "Save and share", sharePanel],
];

const tabs = TABS.map(([id, title]) => h("button", { role: "tab", id: `tab-${id}`, "aria-controls": `panel-${id}`, onclick: () => select(id), onkeydown: move }, title));
const panels = TABS.map(([id]) => h("div", { role: "tabpanel", id: `panel-${id}`, "aria-labelledby": `tab-${id}`, class: "panel" }));

export function analysisPanel() {
  TABS.forEach(([, , build], index) => fill(panels[index], build()));
  fill(byId("analysis"), h("div.tabs", { role: "tablist", "aria-label": "Analysis" }, tabs), panels);
  select("compare");
  showPresence();
}

function select(id) {
  TABS.forEach(([name], index) => {
    const isOn = name === id;
    tabs[index].setAttribute("aria-selected", String(isOn));
    tabs[index].tabIndex = isOn ? 0 : -1;
    panels[index].hidden = !isOn;
  });
}

function move(event) {
  const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
  if (!step) return;
  event.preventDefault();
  const next = (tabs.indexOf(event.target) + step + tabs.length) % tabs.length;
  select(TABS[next][0]);
  tabs[next].focus();
}

/** Hide the analysis while there is nothing to analyse. */
function showPresence() {
  byId("analysis").hidden = !state.photo && !state.receipt;
}

on(["photo", "receipt"], showPresence);
on("receipt", () => state.receipt && select("share"));
