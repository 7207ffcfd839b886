/** List of cases: all have their place and their name, but only those near the viewport have a card. */
import { byId, h } from "../../page/dom.js";

const NEAR = "600px 0px"; // beyond the viewport, so that a card is there before it is seen

/** Call one function when an element comes near the viewport, and another when it has left. */
export function watcher(enter, leave = () => {}) {
  const tell = ({ target, isIntersecting, boundingClientRect }) => (isIntersecting ? enter(target) : leave(target, boundingClientRect));
  return new IntersectionObserver((changes) => changes.forEach(tell), { rootMargin: NEAR });
}

/**
 * Return a list: {node, show, redraw, goToStart, go}.
 *
 * @param entries all cases
 * @param build function that returns the card of a case: {node, draw}
 */
export function caseList(entries, build) {
  const node = h("ol.cases");
  const items = entries.map(itemOf);
  const cards = cardsIn(new Map(items.map((item, index) => [item, entries[index]])), build);
  const near = watcher(cards.add, cards.leave);
  for (const item of items) near.observe(item);
  addEventListener("resize", () => items.forEach((item) => (item.style.minHeight = "")));
  return {
    node,
    show(shown) {
      const fragment = new DocumentFragment();
      for (const { index } of shown) fragment.append(items[index]);
      node.replaceChildren(fragment);
    },
    redraw: cards.redraw,
    goToStart() {
      const title = byId("cases-title");
      title.scrollIntoView();
      title.focus({ preventScroll: true });
    },
    go: ({ index }) => {
      items[index].scrollIntoView();
      items[index].focus({ preventScroll: true });
    },
  };
}

/** Keep the cards of the items near the viewport: {add, leave, redraw}. */
function cardsIn(entries, build) {
  const cards = new Map();
  const away = new Set();
  const remove = (item) => {
    if (item.contains(document.activeElement)) return; // it goes when the focus is elsewhere
    cards.get(item).node.remove();
    cards.delete(item);
    away.delete(item);
  };
  const add = (item) => {
    away.delete(item);
    away.forEach(remove);
    if (cards.has(item)) return;
    cards.set(item, build(entries.get(item)));
    item.append(cards.get(item).node);
    item.style.minHeight = "";
  };
  const leave = (item, { height }) => {
    if (!cards.has(item)) return;
    if (height) item.style.minHeight = `${height}px`; // nothing moves when the card is gone
    away.add(item);
    remove(item);
  };
  return { add, leave, redraw: (draw) => cards.forEach(draw) };
}

function itemOf({ image, change }) {
  const badge = change === "same" ? null : h("span.badge", { class: `badge ${change.split(" ")[0]}` }, change);
  return h("li.case", { tabindex: "-1" }, h("h3", `${image} `, badge));
}

const byName = new Intl.Collator("en", { numeric: true });
const number = (name, sign, size = (value) => value) => ({ numbers }) => (numbers[name] === null ? Infinity : sign * size(numbers[name]));

/** Orders of the cases: [key, description, function whose value ascends]. */
export const ORDERS = [
  ["worst", "worst first", ({ index }) => index],
  ["image", "name of the photo", null],
  ["spearman", "lowest rank correlation", number("spearman", 1)],
  ["iou", "least overlap", number("iou", 1)],
  ["shift", "largest shift", number("shift", -1)],
  ["position", "nearest to randomised weights", number("position", -1)],
  ["ssim", "lowest SSIM", number("ssim", 1)],
  ["pearson", "lowest Pearson’s correlation", number("pearson", 1)],
  ["kl", "largest KL divergence", number("kl", -1)],
  ["score_change", "largest change of the score", number("score_change", -1, Math.abs)],
  ["probability_change", "largest change of the probability", number("probability_change", -1, Math.abs)],
  ["box_change", "largest change of the evidence in the box", number("box_change", -1, Math.abs)],
];

/** Return cases in an order; those without its number come last, and equal ones stay worst first. */
export function sorted(entries, key) {
  const value = ORDERS.find(([order]) => order === key)[2];
  const compare = value ? (a, b) => ascending(value(a), value(b)) : (a, b) => byName.compare(a.image, b.image);
  return [...entries].sort((a, b) => compare(a, b) || a.index - b.index);
}

const ascending = (a, b) => (a < b ? -1 : a > b ? 1 : 0);

/** Return true if a case is selected: an empty value selects all, and `group` is a set of indices or null. */
export function isSelected(entry, { change, method, image, label, group }) {
  const contains = (texts, part) => texts.some((text) => text?.toLowerCase().includes(part.toLowerCase()));
  return (
    (!change || entry.change === change) &&
    (!method || entry.method === method) &&
    (!group || group.has(entry.index)) &&
    contains([entry.image], image) &&
    contains([entry.target, ...entry.predictions], label)
  );
}
