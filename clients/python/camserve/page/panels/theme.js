/** The switch between light and dark; at first the page looks as the system does. */
import { byId } from "../dom.js";

const KEY = "camserve-theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

const now = () => document.documentElement.dataset.theme ?? (dark.matches ? "dark" : "light");

function set(theme) {
  document.documentElement.dataset.theme = theme;
  try {
    localStorage.setItem(KEY, theme);
  } catch {
    // A browser that stores nothing forgets the choice.
  }
  show();
}

function show() {
  const button = byId("theme");
  const [text, other] = now() === "dark" ? ["☀ Light", "light"] : ["☾ Dark", "dark"];
  button.textContent = text;
  button.setAttribute("aria-label", `Switch to ${other} colours`);
}

/** Make the button work, and restore the choice of an earlier visit. */
export function themeButton() {
  byId("theme").addEventListener("click", () => set(now() === "dark" ? "light" : "dark"));
  dark.addEventListener("change", show);
  try {
    const stored = localStorage.getItem(KEY);
    if (stored === "light" || stored === "dark") document.documentElement.dataset.theme = stored;
  } catch {
    // See above.
  }
  show();
}
