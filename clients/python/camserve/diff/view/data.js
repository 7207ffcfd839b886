/** Data of the report: it lies in elements of the page, and each is parsed when it is shown. */
import { bytesOf, readPhoto } from "../../page/lib/maps.js";

const TOP = 127; // stands for the largest absolute value of a map
const NOT_FINITE = -128;

const read = (id) => JSON.parse(document.getElementById(id)?.textContent ?? "null");

/** Return {sources, groups}: the names of both sides, and the groups of findings. */
export const readReport = () => read("report");

/** Return what the list is sorted and filtered by, for each case, worst first. */
export const readEntries = () => read("index").map((entry, index) => ({ ...entry, index }));

/** Return the address of a photo, or null. */
export function photoUrl(photo) {
  const data = read(`photo-${photo}`);
  return data && `data:image/jpeg;base64,${data}`;
}

/** Return the answers, the maps and the photo's geometry of a case. */
export function readCase(index) {
  const { photos, maps, ...rest } = read(`case-${index}`);
  return { ...rest, photos: photos.map(readPhoto), maps: maps.map(decode) };
}

function decode({ height, width, scale, data }) {
  const integers = new Int8Array(bytesOf(data).buffer);
  const value = (integer) => (integer === NOT_FINITE ? NaN : (integer * scale) / TOP);
  return { height, width, data: Float32Array.from(integers, value) };
}
