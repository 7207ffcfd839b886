/** Elements, and small things that every panel needs. */

/** Types of photos that the server decodes. */
export const PHOTO_TYPES = "image/jpeg,image/png,image/webp,image/bmp";

const isThere = (value) => (value ?? false) !== false;

/**
 * Create an element: h("p.hint", {id: "x"}, "text"). Classes come after the tag, and attributes may be left out. Names
 * that start with "on" are listeners, which must be functions; true and false set or leave out an attribute. Children are nodes or text: text is
 * never parsed as HTML, so labels from a server are safe.
 */
export function h(selector, ...children) {
  const [tag, ...classes] = selector.split(".");
  const node = document.createElement(tag);
  node.classList.add(...classes);
  const attributes = children[0]?.constructor === Object ? children.shift() : {};
  for (const [name, value] of Object.entries(attributes)) {
    if (!isThere(value)) continue;
    if (typeof value === "function") node.addEventListener(name.slice(2), value);
    else if (!/^on/i.test(name)) node.setAttribute(name, value === true ? "" : String(value));
  }
  return fill(node, children);
}

const FOCUSABLE = "button, input, select, summary, [tabindex]";

/** Replace the children of an element. The focus stays at the same control: the one with the same number. */
export function fill(node, ...children) {
  const focused = node.contains(document.activeElement) ? [...node.querySelectorAll(FOCUSABLE)].indexOf(document.activeElement) : -1;
  node.replaceChildren(...children.flat(Infinity).filter(isThere));
  if (focused >= 0) node.querySelectorAll(FOCUSABLE)[focused]?.focus({ preventScroll: true });
  return node;
}

export const byId = (id) => document.getElementById(id);

let lastId = 0;

/** Return an id that no other element has. */
export const newId = (prefix = "x") => `${prefix}-${++lastId}`;

/** Return a control with its label, and the text that explains it. */
export function labelled(label, control, { hint = "", inline = false } = {}) {
  control.id ||= newId("field");
  const help = hint ? h("small.hint", { id: `${control.id}-hint` }, hint) : null;
  if (help) control.setAttribute("aria-describedby", help.id);
  const name = h("label", { for: control.id }, label);
  return h("div", { class: inline ? "field inline" : "field" }, inline ? [control, name] : [name, control], help);
}

/** Return a select with options [value, text]. */
export function choice(options, value, onchange) {
  const items = options.map(([key, text]) => h("option", { value: key, selected: key === value }, text));
  return h("select", { onchange: ({ target }) => onchange(target.value) }, items);
}

export const searchField = (label, attributes) => h("input", { type: "search", placeholder: label, "aria-label": label, ...attributes });

/** Return a hidden file input, and the label that opens it; `take` is called with the chosen files. */
export function fileButton(text, accept, take, { id = newId("file"), multiple = false, classes = "button" } = {}) {
  const onchange = () => {
    const files = [...input.files];
    input.value = "";
    take(files);
  };
  const input = h("input.unseen", { type: "file", id, accept, multiple, onchange });
  return [input, h("label", { class: classes, for: id }, text)];
}

export const removeButton = (label, onclick) => h("button.remove", { "aria-label": label, onclick }, "×");

export const chip = (name, field, remove) => h("li.chip", { "data-field": field }, h("span", name), removeButton(`Remove ${name}`, remove));

/** Return a checkbox with its label. */
export function checkbox(label, checked, onchange, { hint = "" } = {}) {
  const box = h("input", { type: "checkbox", checked, onchange: ({ target }) => onchange(target.checked) });
  return labelled(label, box, { inline: true, hint });
}

/** Return a checkbox in a list, with its name and a hint; one that is refused says why. */
export function option(name, checked, onchange, { text = name, hint = "", title, disabled = false, refused = false } = {}) {
  const box = h("input", { type: "checkbox", checked, disabled: disabled && !checked, onchange: ({ target }) => onchange(name, target.checked) });
  const label = h("label", { title }, box, h("span", text));
  return h("div", { class: refused ? "option refused" : "option" }, label, hint && h("small.hint", hint));
}

/** Return a group of buttons of which one is pressed: options are [value, text]. */
export function segmented(label, options, value, onpick) {
  const buttons = options.map(([key, text]) =>
    h("button", { "aria-pressed": String(key === value), "data-value": key, onclick: () => pick(key) }, text),
  );
  const pick = (key) => {
    for (const button of buttons) button.setAttribute("aria-pressed", String(button.dataset.value === key));
    onpick(key);
  };
  return h("div.segmented", { role: "group", "aria-label": label }, buttons);
}

/** Say something to screen readers, without showing it. */
export function say(text) {
  byId("spoken").textContent = text;
}

/** Return a function that calls another one once, some milliseconds after its last call. */
export function debounced(call, milliseconds) {
  let timer = 0;
  return (...values) => {
    clearTimeout(timer);
    timer = setTimeout(() => call(...values), milliseconds);
  };
}

/** Return a function that calls another one at most once before the next frame. */
export function framed(call) {
  let waits = false;
  return () => {
    if (waits) return;
    waits = true;
    requestAnimationFrame(() => {
      waits = false;
      call();
    });
  };
}

/** Save text or bytes as a file. */
export function download(name, content, type) {
  const url = URL.createObjectURL(content instanceof Blob ? content : new Blob([content], { type }));
  const link = h("a", { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 1000);
}

/** Return a sample of a colour, for a legend. */
export function swatch(colour) {
  const node = h("span.swatch", { "aria-hidden": "true" });
  node.style.background = colour;
  return node;
}

/** Return a paragraph with an error in the server's words. */
export const problem = (text) => h("p.problem", { role: "alert" }, text);
