"""The view of a result in a notebook, in a browser without a network."""

import json
import re
import shutil
from pathlib import Path

import pytest

import camserve
import needs
from camserve_server import Explainer
from support import PHOTOS

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".browser/node_modules/axe-core/axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
LIBRARY = ROOT / "clients/python/camserve/page/lib"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=needs.CHROMIUM)]

PIXELS = """() => [...document.querySelectorAll(".camserve-picture canvas")].map((canvas) => {
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  let painted = 0;
  let sum = 0;
  for (let index = 0; index < data.length; index += 4) {
    painted += data[index + 3] > 0;
    sum += data[index] * 3 + data[index + 1] * 5 + data[index + 2] * 7;
  }
  return { painted, sum, opacity: Number(canvas.style.opacity) };
})"""


@pytest.fixture(scope="module")
def html():
    with Explainer("efficientnet_lite0") as explainer:
        targets = ["tabby", camserve.contrast("tabby", "tiger cat")]
        return explainer.explain(PHOTOS["chelsea"], targets=targets).html()


@pytest.fixture
def show(browser):
    """Function that shows HTML in a new page, and fails the test at its end if there was an error or a request."""
    troubles, contexts = [], []

    def run(content, width=800, **options):
        contexts.append(browser.new_context(viewport={"width": width, "height": 700}, offline=True, **options))
        page = contexts[-1].new_page()
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("console", lambda message: message.type == "error" and troubles.append(message.text))
        page.on("request", lambda request: request.url.startswith("data:") or troubles.append(request.url))
        page.set_content(f"<!doctype html><html lang=en><title>a notebook</title><main><h1>A</h1>{content}</main>")
        return page

    yield run
    for context in contexts:
        context.close()
    assert troubles == []


def changed(page, label, act):
    """Return the pixels of all maps before and after an action on a control."""
    before = page.evaluate(PIXELS)
    act(page.get_by_label(label))
    return before, page.evaluate(PIXELS)


def test_controls_change_the_drawing_of_all_maps(show, html):
    page = show(html)
    before, after = changed(page, "Opacity", lambda slider: slider.fill("20"))
    assert [each["opacity"] for each in after] == [0.2, 0.2]
    assert [each["sum"] for each in after] == [each["sum"] for each in before]

    before, after = changed(page, "Hide the weakest %", lambda slider: slider.fill("80"))
    assert all(0.1 < new["painted"] / old["painted"] < 0.3 for old, new in zip(before, after, strict=True))

    page.get_by_label("Hide the weakest %").fill("0")
    for label, act in (
        ("Values", lambda list_: list_.select_option("negative")),
        ("Values", lambda list_: list_.select_option("positive")),
        ("Colours", lambda list_: list_.select_option("viridis")),
        ("Smooth", lambda box: box.uncheck()),
    ):
        before, after = changed(page, label, act)
        assert all(old["sum"] != new["sum"] for old, new in zip(before, after, strict=True)), label

    before, after = changed(page, "Same scale", lambda box: box.check())
    assert sum(old["sum"] != new["sum"] for old, new in zip(before, after, strict=True)) == 1  # the weaker of two maps


def test_pointer_shows_the_values_of_all_maps_at_its_place(show, html):
    page = show(html)
    values = page.locator("figcaption output")
    assert all(text.startswith("peak ") for text in values.all_text_contents())

    page.locator(".camserve-picture").first.hover()
    assert all(re.fullmatch(r"here −?[\d.]+", text) for text in values.all_text_contents())
    assert page.locator(".camserve-mark:visible").count() == 2

    page.mouse.move(790, 5)
    assert all(text.startswith("peak ") for text in values.all_text_contents())


def test_arrow_keys_show_the_values_of_all_maps(show, html):
    page = show(html)
    values = page.locator("figcaption output")
    peak = values.first.text_content()

    page.locator(".camserve-picture").first.focus()
    seen = []
    for key in ("ArrowRight", "ArrowDown", "ArrowLeft"):
        page.keyboard.press(key)
        seen.append(values.all_text_contents())
        assert all(re.fullmatch(r"here −?[\d.]+", text) for text in seen[-1])
    assert len({tuple(texts) for texts in seen}) == 3

    page.keyboard.press("Tab")
    assert values.first.text_content() == peak


def test_overlays_are_shown_without_javascript(show, html):
    page = show(html, java_script_enabled=False)

    assert page.locator("figure img:visible").count() == 2


@pytest.mark.parametrize("width", [320, 1000])
def test_view_fits_and_has_no_barriers(show, html, width):
    if not AXE.exists():
        pytest.skip(needs.AXE)
    page = show(html, width)
    page.add_script_tag(content=AXE.read_text())

    assert page.evaluate("async () => (await axe.run()).violations") == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_chart_is_read_and_picked_with_the_keyboard(show):
    source = re.sub(r"^export ", "", (LIBRARY / "charts.js").read_text(), flags=re.MULTILINE)
    points = [{"x": x, "y": y, "label": f"layer{x}"} for x, y in enumerate([0.01, 1, 0, 100])]
    options = {"title": "Norms", "description": "By layer", "series": [{"name": "gradient", "points": points}]}
    page = show(f"<div id=chart></div><script>{source}\nwindow.lineChart = lineChart;</script>")
    page.evaluate(
        f"""() => {{
          const onPick = (series, point) => (window.picked = [series, point.label]);
          document.querySelector("#chart").append(lineChart({{ ...{json.dumps(options)}, logarithmic: true, onPick }}));
        }}"""
    )
    page.keyboard.press("Tab")
    for key in ("ArrowRight", "ArrowRight", "Enter"):
        page.keyboard.press(key)

    assert page.evaluate("window.picked") == ["gradient", "layer3"]  # that of zero has no place on a logarithmic axis
    assert page.locator(".chart-tip").text_content() == "gradient: layer3, 100"
    assert page.locator(".chart-point").count() == 3
    assert page.locator(".chart-line").get_attribute("d").count("M") == 2  # a gap
    if AXE.exists():
        page.add_script_tag(content=AXE.read_text())
        assert page.evaluate("async () => (await axe.run()).violations") == []
