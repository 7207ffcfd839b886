/** The maps side by side: one row for each model and target, one column for each method and layer. */
import { byId, fill, framed, h } from "../dom.js";
import { scaleOf } from "../lib/draw.js";
import { progress, targetName } from "../lib/words.js";
import { changed, on, state } from "../state.js";
import { cancel, explain, isStale } from "../run.js";
import { sentence } from "../server.js";
import { Cell, moveCursor } from "./cell.js";
import { lookBar, styleOf } from "./look.js";

let shown = []; // Cell

const status = h("div.run", { role: "status" });
const rows = h("div.rows");

export function gridPanel() {
  fill(byId("maps"), lookBar(), status, rows);
  showRows();
}

/** Draw the controls again, after a link or receipt changed the style. */
export function resetLook() {
  byId("maps").querySelector(".look").replaceWith(lookBar());
}

function showRows() {
  for (const cell of shown) cell.release();
  shown = state.cells.map((cell) => new Cell(cell, { onpick: pick }));
  fill(rows, state.cells.length ? groups() : emptyState(), failures());
  drawAll();
  showPicks();
}

function groups() {
  const several = new Set(state.cells.map(({ model }) => model)).size > 1;
  const byTitle = new Map();
  for (const cell of shown) {
    const { model, explanation } = cell.content;
    const title = targetName(explanation) + (several ? ` · ${model}` : "");
    byTitle.set(title, [...(byTitle.get(title) ?? []), cell]);
  }
  const sections = [...byTitle].map(([title, cells]) => h("section.group", h("h2", title), h("div.cells", cells.map(({ node }) => node))));
  const isFlat = [...byTitle.values()].every((cells) => cells.length === 1);
  return isFlat ? h("div.singles", sections) : sections;
}

function emptyState() {
  if (state.run.status === "running") return h("div.cells", h("div.skeleton.map"), h("div.skeleton.map"));
  if (state.photo) return null;
  return h("div.empty", h("p", h("strong", "Choose a photo, and its map appears here.")), h("p", "Then add methods, targets, layers or models to see their maps side by side."));
}

function failures() {
  const failed = state.results.filter(({ error }) => error);
  const several = state.ask.models.length > 1;
  return failed.map(({ model, error }) => {
    const text = several ? `${model}: ${error.message}` : sentence(error.message);
    const id = error.requestId ? h("small.hint", `Request ${error.requestId} in the server's log.`) : null;
    return h("div.problem", { role: "alert" }, h("p", text), id, h("button", { onclick: explain }, "Try again"));
  });
}

function showStatus() {
  const { status: now, progress: done } = state.run;
  const isRunning = now === "running";
  rows.classList.toggle("stale", isRunning);
  if (isRunning) return showProgress(done);
  const note = now === "cancelled" ? "Cancelled." : isStale() && state.cells.length ? "The maps do not show the present choice yet." : "";
  fill(status, note ? h("p.hint", note) : null);
}

function showProgress(done) {
  const { share, text } = progress(done ?? {});
  const bar = status.querySelector("progress");
  if (!bar) {
    const fresh = h("progress", { max: 1, "aria-label": "Progress" });
    fill(status, fresh, h("span"), h("button", { onclick: cancel }, "Cancel"));
    return showProgress(done);
  }
  if (done?.rowsTotal) bar.value = share;
  status.querySelector("span").textContent = done?.rowsTotal ? text : "Computing…";
}

/** Draw all cells: they may share a scale, among those of one sign. */
function drawAll() {
  const maps = (cell) => state.cells.filter((other) => styleOf(other).sign === styleOf(cell).sign).map(({ map }) => map);
  for (const { content } of shown) content.scale = scaleOf(content.map, styleOf(content), maps(content), content.inputSize);
  for (const cell of shown) cell.draw();
}

function pick(id) {
  const { picks } = state;
  state.picks = picks.includes(id) ? picks.filter((other) => other !== id) : [...picks.slice(-1), id];
  changed("picks");
}

function showPicks() {
  for (const cell of shown) cell.showPick(state.picks.indexOf(cell.content.id));
}

on("results", () => {
  showRows();
  moveCursor(null);
});
on("photo", showRows);
on("style", framed(drawAll));
on("picks", showPicks);
on("run", () => {
  showStatus();
  if (!state.cells.length && !state.results.length) fill(rows, emptyState());
});
on("cursor", () => {
  for (const cell of shown) cell.showCursor();
});
