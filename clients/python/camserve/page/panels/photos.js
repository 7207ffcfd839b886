/** The photo: drop, paste, choose, samples, and the row of recent photos. */
import { byId, fileButton, fill, h, PHOTO_TYPES, problem } from "../dom.js";
import { changed, state } from "../state.js";
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
const messages = h("div", { "data-field": "image" });

export function photosPanel() {
  const samples = SAMPLES.map(([file, name]) =>
    h("button.sample", { onclick: () => takeSample(file) }, h("img", { src: `samples/${file}`, alt: "", width: 60, height: 40 }), name),
  );
  fill(
    byId("photo"),
    h("h2", { id: "photo-title" }, "Photo"),
    stage,
    h("div.row", fileButton("Choose photos", `${PHOTO_TYPES},.json`, take, { id: "files", multiple: true, classes: "button primary" }), h("span.hint", "or drop or paste them anywhere")),
    messages,
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
  try {
    const bitmap = await createImageBitmap(file, { imageOrientation: "from-image" });
    const thumbnail = thumbnailOf(bitmap);
    const { width, height } = bitmap;
    bitmap.close();
    return { file, name: file.name, width, height, thumbnail, url: null };
  } catch {
    messages.append(problem(`${file.name || "The file"} is not a photo that this browser can show.`));
    return null;
  }
}

function thumbnailOf(bitmap) {
  const canvas = h("canvas", { width: THUMBNAIL, height: THUMBNAIL });
  const side = Math.min(bitmap.width, bitmap.height);
  const [left, top] = [(bitmap.width - side) / 2, (bitmap.height - side) / 2];
  canvas.getContext("2d").drawImage(bitmap, left, top, side, side, 0, 0, THUMBNAIL, THUMBNAIL);
  return canvas;
}

function show(photo) {
  if (state.photo?.url) URL.revokeObjectURL(state.photo.url);
  if (state.photo) state.photo.url = null;
  state.photo = photo;
  photo.url = URL.createObjectURL(photo.file);
  showPhoto();
  changed("photo");
}

function showPhoto() {
  const { photo } = state;
  if (!photo) {
    fill(stage, h("div.drop", h("strong", "Drop a photo here"), "It is explained at once."));
    return;
  }
  const image = h("img", { src: photo.url, alt: `Photo ${photo.name}` });
  fill(stage, h("div.picture", image, marksOf(photo)));
  stage.firstChild.style.aspectRatio = `${photo.width} / ${photo.height}`;
  fill(tray, state.photos.length > 1 ? state.photos.map(trayItem) : null);
}

function trayItem(photo) {
  const pressed = String(photo === state.photo);
  return h("li", h("button", { "aria-pressed": pressed, "aria-label": photo.name, title: photo.name, onclick: () => show(photo) }, photo.thumbnail));
}
