"""Measure the web page in headless Chromium: the time until it can be used, and the frames of its sliders."""

import itertools
import statistics
import time
from collections.abc import Callable
from contextlib import closing
from shutil import which
from typing import Any

from benchmarks.results import Part, Table
from benchmarks.scale import Scale
from benchmarks.serving import reserved_port, serving

CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
INTERACTIVE = 0.5  # seconds until the page can be used, on loopback
FRAMES = 50.0  # a second, while a slider moves
MAPS = 12
CANVAS = (320, 240)
SECONDS = 1.0  # of each slider, in every round
OPENINGS, ROUNDS = 15, 5  # at least

READY = """() => document.querySelector("input[type=file]")
  && document.querySelector("#connection").textContent.includes("Connected")"""

SLIDE = """async ([size, slider, base, maps, [width, height], seconds]) => {
  const { drawMap } = await import("./lib/draw.js");
  const photo = { width: 640, height: 480, seen: { left: 80, top: 0, right: 560, bottom: 480 } };
  const random = () => new Float32Array(size * size).map(() => Math.random() - 0.3);
  const drawn = Array.from({ length: maps }, () => {
    const canvas = Object.assign(document.createElement("canvas"), { width, height });
    document.body.prepend(canvas);
    const map = { height: size, width: size, data: random() };
    drawMap(canvas, map, photo, base, { inputSize: [224, 224] }); // the page shows the maps before a slider moves
    return { canvas, map };
  });
  const values = {
    opacity: () => ({}),
    threshold: (share) => ({ threshold: { quantile: share } }),
    contours: (share) => ({ contourLines: Math.round(8 * share) }),
  };
  let frames = 0;
  const start = performance.now();
  await new Promise((done) => requestAnimationFrame(function frame(now) {
    const share = (Math.sin(frames / 20) + 1) / 2;
    for (const { canvas, map } of drawn) {
      if (slider === "opacity") canvas.style.opacity = share;
      else drawMap(canvas, map, photo, { ...base, ...values[slider](share) }, { inputSize: [224, 224] });
    }
    frames++;
    if (now - start < 1000 * seconds) requestAnimationFrame(frame);
    else done();
  }));
  const found = (1000 * frames) / (performance.now() - start);
  drawn.forEach(({ canvas }) => canvas.remove());
  return found;
}"""

LOOKS: dict[str, dict[str, object]] = {
    "plain": {},
    "signed": {"sign": "both"},
    "faded, with lines": {"fade": True, "contourLines": 4},
}


def measure(scale: Scale, *, say: Callable[[str], None] = print) -> Part:
    """Measure the page of a server; without Chromium, return an empty part."""
    part = Part("page")
    program = next(filter(None, map(which, CHROMIUM)), None)
    if program is None:
        say("page: Chromium is not installed")
        return part
    with reserved_port() as port, serving((scale.spec(scale.models[0]),), "--http-address", f"127.0.0.1:{port}"):
        _measure_page(part, scale, program, f"http://127.0.0.1:{port}/", say)
    return part


def _measure_page(part: Part, scale: Scale, program: str, address: str, say: Callable[[str], None]) -> None:
    from playwright.sync_api import sync_playwright  # noqa: PLC0415 -- only a machine with Chromium needs it

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=program, args=["--no-sandbox"])
        _open(browser, address)  # a browser that has just started is slower
        seconds = statistics.median(_open(browser, address) for _ in range(max(OPENINGS, scale.rounds)))
        say(f"page: interactive after {seconds:.2f} s")
        page = browser.new_page()
        page.goto(address)
        rows = list(_sliders(page))
        browser.close()
    title = f"Frames a second of {MAPS} maps of {CANVAS[0]} by {CANVAS[1]} pixels, while a slider moves"
    part.tables.append(Table(title, ("slider", "look", "7 by 7 cells", "224 by 224 cells"), rows))
    part.at_most("seconds until the page can be used", INTERACTIVE, seconds, " s")
    part.at_least("frames a second, slowest slider", FRAMES, min(float(cell) for row in rows for cell in row[2:]))
    say(f"page: {rows}")


def _open(browser: Any, address: str) -> float:
    """Return the seconds until a page in a fresh profile shows its controls and the server's models."""
    with closing(browser.new_context()) as context:
        page = context.new_page()
        start = time.perf_counter()
        page.goto(address)
        page.wait_for_function(READY, polling=10)
        return time.perf_counter() - start


def _sliders(page: Any) -> list[tuple[str, str, str, str]]:
    """Return the rows of the table: the median of rounds in which the sliders take turns."""
    sliders = list(itertools.product(("opacity", "threshold", "contours"), LOOKS))
    found: dict[tuple[str, str, int], list[float]] = {}
    for _ in range(ROUNDS):
        for (slider, look), size in itertools.product(sliders, (7, 224)):
            frames = page.evaluate(SLIDE, [size, slider, LOOKS[look], MAPS, CANVAS, SECONDS])
            found.setdefault((slider, look, size), []).append(frames)
    medians = {key: f"{statistics.median(values):.1f}" for key, values in found.items()}
    return [(slider, look, medians[slider, look, 7], medians[slider, look, 224]) for slider, look in sliders]
