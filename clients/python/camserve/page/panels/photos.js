/** The photo: drop, paste, choose, samples, and the row of recent photos. */
import { byId, debounced, fileButton, fill, h, labelled, PHOTO_TYPES, problem } from "../dom.js";
import { ask, changed, on, state } from "../state.js";
import { openReceipt } from "./receipts.js";
import { marksOf } from "./marks.js";

const SAMPLES = [
  ["chelsea.webp", "Cat"],
  ["coffee.webp", "Coffee"],
  ["rocket.webp", "Rocket"],
];
const MOST_PHOTOS = 12; // older ones are forgotten, so that a long session needs no memory
const THUMBNAIL = 96; // pixels

const stage = h("div.stage");
const tray = h("ul.tray", { "aria-label": "Photos" });
const values = h("div");
const messages = h("div", { "data-field": "image" });

export function photosPanel() {
  const samples = SAMPLES.map(([file, name]) =>
    h("button.sample", { onclick: () => takeSample(file) }, h("img", { src: `samples/${file}`, alt: "", width: 60, height: 40 }), name),
  );
  fill(
    byId("photo"),
    h("h2", { id: "photo-title" }, "Photo"),
    stage,
    h("div.row", fileButton("Choose photos", `${PHOTO_TYPES},.tif,.tiff,.npy,.json`, take, { id: "files", multiple: true, classes: "button primary" }), h("span.hint", "or drop or paste them anywhere")),
    messages,
    values,
    tray,
    h("div.samples", { role: "group", "aria-label": "Sample photos" }, samples),
    h("p.hint", "The server computes with the photo and forgets it. Nothing is stored there."),
    h("div", { id: "predictions" }),
  );
  listen();
  showPhoto();
}

function listen() {
  const body = document.body;
  body.addEventListener("dragover", (event) => {
    event.preventDefault();
    body.classList.add("dropping");
  });
  body.addEventListener("dragleave", (event) => event.relatedTarget || body.classList.remove("dropping"));
  body.addEventListener("drop", (event) => {
    event.preventDefault();
    body.classList.remove("dropping");
    take([...event.dataTransfer.files]);
  });
  body.addEventListener("paste", (event) => {
    if (event.clipboardData.files.length) take([...event.clipboardData.files]);
  });
}

async function takeSample(name) {
  const response = await fetch(`samples/${name}`);
  take([new File([await response.blob()], name, { type: "image/webp" })]);
}

/** Take over files: photos are added and the first one is explained, a receipt is opened. */
async function take(files) {
  fill(messages);
  const receipts = files.filter(({ name, type }) => type === "application/json" || name.endsWith(".json"));
  if (receipts.length) await openReceipt(receipts[0]);
  const photos = files.filter((file) => !receipts.includes(file));
  const read = (await Promise.all(photos.map(readFile))).filter(Boolean);
  if (!read.length) return;
  state.photos = [...read, ...state.photos].slice(0, MOST_PHOTOS);
  show(read[0]);
}

async function readFile(file) {
  const photo = { file, name: file.name, url: null, picture: null, thumbnail: h("canvas", { width: THUMBNAIL, height: THUMBNAIL }) };
  try {
    if (isForServer(new Uint8Array(await file.slice(0, 32).arrayBuffer()))) return { ...photo, isDrawn: true };
    const size = await paintThumbnail(photo.thumbnail, file);
    return { ...photo, ...size, picture: file };
  } catch {
    messages.append(problem(`${file.name || "The file"} is not a photo that this browser can show.`));
    return null;
  }
}

/** Return true for the first bytes of a TIFF, an NPY file or a PNG of 16 bits: the server draws their pictures. */
function isForServer(bytes) {
  const text = String.fromCharCode(...bytes);
  return /^(II[*+]\0|MM\0[*+]|\x93NUMPY)/.test(text) || (text.startsWith("\x89PNG") && bytes[24] === 16);
}

async function paintThumbnail(canvas, picture) {
  const bitmap = await createImageBitmap(picture, { imageOrientation: "from-image" });
  const { width, height } = bitmap;
  const side = Math.min(width, height);
  canvas.getContext("2d").drawImage(bitmap, (width - side) / 2, (height - side) / 2, side, side, 0, 0, THUMBNAIL, THUMBNAIL);
  bitmap.close();
  return { width, height };
}

function show(photo) {
  forget(state.photo);
  state.photo = photo;
  fill(values, photo.isDrawn ? valueFields() : null);
  showPhoto();
  changed("photo");
}

/** Free the address of a photo's picture. */
function forget(photo) {
  if (photo?.url) URL.revokeObjectURL(photo.url);
  if (photo) photo.url = null;
}

function showPhoto() {
  const { photo } = state;
  fill(tray, state.photos.length > 1 ? state.photos.map(trayItem) : null);
  if (!photo?.picture) return fill(stage, h("div.drop", photo ? `The server draws ${photo.name}.` : [h("strong", "Drop a photo here"), "It is explained at once."]));
  photo.url = URL.createObjectURL(photo.picture);
  const image = h("img", { src: photo.url, alt: `Photo ${photo.name}` });
  fill(stage, h("div.picture", image, marksOf(photo)));
  stage.firstChild.style.aspectRatio = `${photo.width} / ${photo.height}`;
}

function trayItem(photo) {
  const pressed = String(photo === state.photo);
  return h("li", h("button", { "aria-pressed": pressed, "aria-label": photo.name, title: photo.name, onclick: () => show(photo) }, photo.thumbnail));
}

/** Return the fields for a photo whose values are not colours. */
function valueFields() {
  const { bands, window, valueRange } = state.ask;
  return h(
    "details.all",
    { open: Boolean(bands.length || window || valueRange) },
    h("summary", "Values and bands"),
    numbers("Bands to show", "rendering.bands", bands, "One, or three for red, green and blue.", (list) => ask({ bands: list })),
    numbers("Window to show", "rendering.window", Object.values(window ?? {}), "Its centre and its width.", ([centre, width]) => ask({ window: width === undefined ? null : { centre, width } })),
    numbers("Values for the model", "value_range", Object.values(valueRange ?? {}), "Those that it takes as 0 and 1.", ([minimum, maximum]) => ask({ valueRange: maximum === undefined ? null : { minimum, maximum } })),
  );
}

function numbers(label, name, given, hint, take) {
  const oninput = debounced(({ target }) => take((target.value.match(/[-+.\de]+/g) ?? []).map(Number).filter(Number.isFinite)), 300);
  const field = labelled(label, h("input", { value: given.join(", "), placeholder: "automatic", oninput }), { hint });
  field.dataset.field = name;
  return field;
}

on("picture", () => {
  const { photo } = state;
  forget(photo);
  paintThumbnail(photo.thumbnail, photo.picture);
  showPhoto();
});
