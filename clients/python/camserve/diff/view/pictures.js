/** Pictures of a case: each map over the photo, where only one map is strong, and a wipe from one map to the other. */
import { h } from "../../page/dom.js";
import { align, HOTTEST, overlap } from "../../page/lib/compare.js";
import { drawMap } from "../../page/lib/draw.js";
import { onPixels, scalePhoto } from "../../page/lib/maps.js";

/** Colours and names of the parts of an overlap. */
export const PARTS = [["#2f7de0", "only A"], ["#e2552d", "only B"], ["#f3c545", "both"]];

/** Their colours as pixels of an ImageData; the first is that of neither map. */
const PIXELS = [0, ...PARTS.map(([colour]) => pixelOf(colour))];

function pixelOf(colour) {
  const [red, green, blue] = [1, 3, 5].map((start) => parseInt(colour.slice(start, start + 2), 16));
  return (0xff000000 | (blue << 16) | (green << 8) | red) >>> 0;
}

/** Return the size of a canvas for a photo whose longer side has so many pixels. */
export function sizeOf({ width, height }, side) {
  const scale = side / Math.max(width, height);
  return { width: Math.max(1, Math.round(width * scale)), height: Math.max(1, Math.round(height * scale)) };
}

/** Return a picture: a photo, if there is one, below other elements. */
export function pictureOf(url, { width, height }, ...layers) {
  const picture = h("div.picture", url ? h("img", { src: url, alt: "" }) : null, layers);
  picture.style.aspectRatio = `${width} / ${height}`;
  picture.style.setProperty("--ratio", width / height);
  return picture;
}

/** Draw a map over its photo. */
export function drawEvidence(canvas, map, photo, colormap) {
  drawMap(canvas, map, photo, { sign: "positive", colormap });
}

/** Draw where two maps are hottest, on the coarser grid of both; return the shares of the parts, as in `PARTS`. */
export function drawOverlap(canvas, maps, photos) {
  const { box, coarse } = align(...maps.map((map, index) => ({ map, photo: photos[index] })));
  const mask = overlap(...coarse, HOTTEST);
  paint(canvas, mask, scalePhoto({ ...photos[0], seen: box }, canvas.width, canvas.height));
  return PARTS.map((_, part) => mask.data.filter((value) => value === part + 1).length / mask.data.length);
}

function paint(canvas, mask, display) {
  const context = canvas.getContext("2d");
  const image = context.createImageData(canvas.width, canvas.height);
  const pixels = new Uint32Array(image.data.buffer);
  const field = onPixels({ ...mask, data: Float32Array.from(mask.data) }, display, false);
  for (let y = 0, index = 0; y < field.height; y++) {
    const start = (field.top + y) * canvas.width + field.left;
    for (let x = 0; x < field.width; x++, index++) pixels[start + x] = PIXELS[field.data[index]];
  }
  context.putImageData(image, 0, 0);
}

/** Draw the left part of one canvas, up to a share of its width, and the right part of another. */
export function drawWipe(canvas, left, right, share) {
  const { width, height } = canvas;
  const context = canvas.getContext("2d");
  const edge = Math.round(share * width);
  context.clearRect(0, 0, width, height);
  if (edge > 0) context.drawImage(left, 0, 0, edge, height, 0, 0, edge, height);
  if (edge < width) context.drawImage(right, edge, 0, width - edge, height, edge, 0, width - edge, height);
}
