/** Save and share: the picture and numbers of a map, its receipt, a link, and the request as code. */
import { choice, debounced, download, fileButton, fill, h, labelled, say } from "../dom.js";
import { receiptText } from "../lib/receipt.js";
import { asCurl, asPython, renderingOf } from "../lib/snippets.js";
import { methodName } from "../lib/words.js";
import { changed, hasKey, link, on, requestFor, state } from "../state.js";
import { api } from "../server.js";
import { titleOf } from "./cell.js";
import { styleOf } from "./look.js";
import { csvOf, npyOf, pictureOf } from "./exports.js";
import { openReceipt, receiptReport } from "./receipts.js";

const saving = h("div.stack");
const code = h("div.stack");
const linked = h("button", { onclick: copyLink }, "Copy the link");

export function sharePanel() {
  return [
    saving,
    h("h3", "Link and receipt"),
    h("div.row", linked, fileButton("Open a receipt", ".json,application/json", ([file]) => openReceipt(file))),
    h("p.hint", "The link restores everything but the photo. A receipt has what is needed to compute a map again and to compare it."),
    hasKey() ? h("p.hint", "The link lacks the key of this page, which nobody else should know. To use it, put what follows # after the address of a page.") : null,
    receiptReport(),
    code,
  ];
}

function current() {
  return state.cells.find(({ id }) => id === state.picks.at(-1)) ?? state.cells[0];
}

function show() {
  const cell = current();
  fill(saving, cell ? savingOf(cell) : h("p.hint", "There is no map to save yet."));
  showCode();
}

function savingOf(cell) {
  const options = state.cells.map((option) => [option.id, titleOf(option)]);
  const pick = (id) => {
    state.picks = [...state.picks.filter((other) => other !== id), id].slice(-2);
    changed("picks");
  };
  const name = fileName(cell);
  const receipt = () => download(`${name}.receipt.json`, receiptText(cell.response, cell.index, cell.request) ?? "", "application/json");
  const buttons = [
    ["Picture (PNG)", async () => download(`${name}.png`, await pictureOf(cell), "image/png")],
    ["Numbers (.npy)", () => download(`${name}.npy`, npyOf(cell.map), "application/octet-stream")],
    ["Numbers (CSV)", () => download(`${name}.csv`, csvOf(cell.map), "text/csv")],
    ["Receipt (JSON)", receipt],
  ];
  return [labelled("Map", choice(options, cell.id, pick)), h("div.row", buttons.map(([text, onclick]) => h("button", { onclick }, text)))];
}

function fileName({ source, explanation }) {
  const stem = (source.name || "photo").replace(/\.[^.]*$/, "");
  return [stem, methodName(explanation), explanation.layer].filter(Boolean).join(".").replace(/[^\w.-]+/g, "_");
}

function showCode() {
  const [model] = state.ask.models;
  if (!model) return;
  const cell = current();
  const asked = requestFor(model);
  const { bands, window } = asked.rendering;
  const rendering = { ...renderingOf(cell ? styleOf(cell) : state.style, state.view), bands, window };
  const request = { ...asked, maxPredictions: undefined, rendering };
  const options = { photo: state.photo?.name || "photo.jpg", token: api.token !== "" };
  const own = hasKey() ? {} : { address: location.href.split("#")[0].replace(/\/[^/]*$/, "") };
  const python = asPython(request, { ...options, address: `${location.hostname}:50051` });
  fill(code, snippet("As Python", python, "The port is that of gRPC; 50051 unless the server was told another one."), snippet("As curl", asCurl(request, { ...options, ...own }), hasKey() ? "The address is that of the server's HTTP; http://localhost:8080 unless it has another one." : ""));
}

function snippet(title, text, hint = "") {
  const copy = h("button", { "aria-label": `Copy ${title}`, onclick: () => put(text, copy) }, "Copy");
  return h("section", h("div.line", h("h3", title), copy), h("pre", { tabindex: "0", "aria-label": title }, h("code", text)), hint ? h("p.hint", hint) : null);
}

function copyLink() {
  put(link(), linked);
}

async function put(text, button) {
  const before = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
    say("Copied");
  } catch {
    button.textContent = "This browser does not allow it";
  }
  setTimeout(() => (button.textContent = before), 1500);
}

on(["results", "picks"], show);
on(["ask", "photo"], showCode);
on("style", debounced(showCode, 300));
