/** A map as a file: the picture with its colour bar, and its raw numbers. */
import { h } from "../dom.js";
import { barValues, drawColorBar, drawMap } from "../lib/draw.js";
import { number } from "../lib/words.js";
import { titleOf } from "./cell.js";
import { styleOf } from "./look.js";

const LONGEST = 2048; // pixels
const FONT = "14px system-ui, sans-serif";
const MARGIN = 12;
const BAR = 14;
const FOOT = 84; // pixels for the title, the colour bar and its values

/** Draw a map over its photo, with its title and colour bar; return a PNG as a Blob. */
export async function pictureOf(cell) {
  const bitmap = await createImageBitmap(cell.source.picture, { imageOrientation: "from-image" });
  const shrink = Math.min(1, LONGEST / Math.max(bitmap.width, bitmap.height));
  const [width, height] = [bitmap.width, bitmap.height].map((side) => Math.max(1, Math.round(side * shrink)));
  const canvas = h("canvas", { width, height: height + FOOT });
  const context = canvas.getContext("2d");
  context.fillStyle = "#fff";
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.drawImage(bitmap, 0, 0, width, height);
  bitmap.close();
  const style = styleOf(cell);
  const heat = h("canvas", { width, height });
  drawMap(heat, cell.map, cell.photo, style, { scale: cell.scale, inputSize: cell.inputSize });
  context.globalAlpha = style.opacity;
  context.drawImage(heat, 0, 0);
  context.globalAlpha = 1;
  drawFoot(context, cell, style, width, height);
  return new Promise((resolve) => canvas.toBlob(resolve, "image/png"));
}

function drawFoot(context, cell, style, width, top) {
  const bar = h("canvas", { width: width - 2 * MARGIN, height: BAR });
  drawColorBar(bar, style);
  context.drawImage(bar, MARGIN, top + 34);
  context.fillStyle = "#1a1f29";
  context.font = FONT;
  context.fillText(titleOf(cell), MARGIN, top + 23, width - 2 * MARGIN);
  const values = barValues(style, cell.scale).map(number);
  values.forEach((text, index) => {
    context.textAlign = ["left", "center", "right"][index];
    context.fillText(text, MARGIN + (index * (width - 2 * MARGIN)) / 2, top + 66);
  });
}

/** Return a map as a .npy file of version 1.0: float32, little-endian, row by row. */
export function npyOf({ height, width, data }) {
  const description = `{'descr': '<f4', 'fortran_order': False, 'shape': (${height}, ${width}), }`;
  const padded = `${description.padEnd(Math.ceil((11 + description.length) / 64) * 64 - 11)}\n`;
  const bytes = new Uint8Array(10 + padded.length + 4 * data.length);
  bytes.set([0x93, ...[..."NUMPY"].map((letter) => letter.charCodeAt(0)), 1, 0, padded.length & 255, padded.length >> 8]);
  bytes.set([...padded].map((letter) => letter.charCodeAt(0)), 10);
  const view = new DataView(bytes.buffer, 10 + padded.length);
  data.forEach((value, index) => view.setFloat32(4 * index, value, true));
  return bytes;
}

/** Return a map as CSV: a line for each row of its grid. */
export function csvOf({ height, width, data }) {
  const rows = Array.from({ length: height }, (_, row) => Array.from(data.subarray(row * width, (row + 1) * width)).join(","));
  return `${rows.join("\n")}\n`;
}
