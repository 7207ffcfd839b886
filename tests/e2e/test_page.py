"""The page in a browser, against real servers: what it shows equals what the Python client receives."""

import base64
import contextlib
import io
import shutil
from pathlib import Path

import numpy as np
import pytest
from playwright.sync_api import sync_playwright

import camserve
import needs
from camserve_server.api import auth, tokens
from support import PHOTOS, rows_waiting, serving, wait_until

ROOT = Path(__file__).parents[2]
CHROMIUM = shutil.which("chromium")
AXE = ROOT / ".browser/node_modules/axe-core/axe.min.js"
TIMEOUT = 100_000  # milliseconds until a step of a test has failed; less than pytest's own timeout
NARROW = {"width": 320, "height": 700}
SETTLED = "document.querySelectorAll('.cell').length === {} && !document.querySelector('.rows.stale')"
PIXELS = "[...document.querySelectorAll('.cell canvas.map')].map((canvas) => canvas.toDataURL())"
DROP = """([name, type, data]) => {
  const bytes = Uint8Array.from(atob(data), (letter) => letter.charCodeAt(0));
  const dataTransfer = new DataTransfer();
  dataTransfer.items.add(new File([bytes], name, { type }));
  document.body.dispatchEvent(new DragEvent("drop", { dataTransfer, bubbles: true }));
}"""

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=needs.CHROMIUM)]


@pytest.fixture(scope="module")
def served():
    models = ("efficientnet_lite0", "vit=timm:vit_tiny_patch16_224?weights=none")
    with serving(models=models, http_address="0") as server:
        yield server


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address) as client:
        yield client


@pytest.fixture(scope="module")
def chromium():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watch:
    """Record of what a page does: errors in its console, and requests."""

    def __init__(self, page, port):
        self.errors, self.requests, self.origin = [], [], f"http://127.0.0.1:{port}/"
        page.on("console", self._message)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.requests.append(request.url))

    def _message(self, message):
        if message.type in ("error", "warning"):
            self.errors.append(f"{message.text} {message.location}")

    @property
    def foreign(self):
        """The requests to other origins."""
        return [url for url in self.requests if not url.startswith((self.origin, "blob:", "data:"))]


@pytest.fixture
def opened(chromium, served):
    """Function that opens the page; at the end it must have written no error, and asked no other origin."""
    with contextlib.ExitStack() as stack:

        def start(port=served.http_port, fragment="", script="", expected=(), **options):
            context = chromium.new_context(viewport={"width": 1280, "height": 900}, accept_downloads=True, **options)
            stack.callback(context.close)
            context.set_default_timeout(TIMEOUT)
            if script:
                context.add_init_script(script)
            page = context.new_page()
            page.watch = Watch(page, port)
            stack.callback(check, page.watch, expected)
            page.goto(f"{page.watch.origin}{fragment}")
            return page

        yield start


def check(watch, expected):
    assert [error for error in watch.errors if not any(part in error for part in expected)] == []
    assert watch.foreign == []


@pytest.fixture
def page(opened):
    page = opened()
    page.wait_for_selector("[data-status=ready]")
    return page


def explained(page, maps=1):
    wait_until(lambda: page.evaluate(SETTLED.format(maps)))


def drop(page, path):
    page.evaluate(DROP, [path.name, "image/png", base64.b64encode(path.read_bytes()).decode()])


def choose_photo(page, name="chelsea", maps=1):
    page.set_input_files("#files", PHOTOS[name])
    explained(page, maps)


def add_method(page, name, maps=None):
    page.get_by_label("Find a method").wait_for(state="attached")
    page.evaluate("document.querySelector('#controls .groups').parentElement.open = true")
    page.get_by_role("checkbox", name=name, exact=True).check()
    if maps:
        explained(page, maps)


def labels_shown(page):
    return page.locator(".prediction .name").all_text_contents()


def set_slider(page, name, value):
    page.get_by_role("slider", name=name).fill(str(value))


def saved(page, button):
    with page.expect_download() as download:
        page.get_by_role("button", name=button).click()
    return Path(download.value.path()).read_bytes()


def test_dropped_photo_shows_the_clients_predictions(page, client):
    truth = client.explain(PHOTOS["chelsea"], overlay=None).predictions
    drop(page, PHOTOS["chelsea"])
    explained(page)
    assert labels_shown(page)[0] == "Egyptian cat"
    assert labels_shown(page) == [prediction.label for prediction in truth]
    shown = page.locator(".prediction .value").all_text_contents()
    assert shown == [f"{100 * prediction.probability:.1f} %" for prediction in truth]


def test_saved_numbers_equal_the_clients_map(page, client):
    truth = client.explain(PHOTOS["chelsea"], overlay=None).explanations[0].heatmap
    choose_photo(page)
    page.get_by_role("tab", name="Save and share").click()
    assert np.array_equal(np.load(io.BytesIO(saved(page, "Numbers (.npy)"))), truth)
    rows = np.loadtxt(io.StringIO(saved(page, "Numbers (CSV)").decode()), delimiter=",", dtype=np.float32)
    assert np.array_equal(rows, truth)


def test_two_methods_lie_side_by_side(page):
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    assert page.locator(".cell .name").all_text_contents() == ["gradcam", "layercam"]
    first, second = (page.locator(".cell").nth(index).bounding_box() for index in range(2))
    assert first["y"] == second["y"]
    one, other = page.evaluate(PIXELS)
    assert one != other


def test_hover_shows_the_values_of_all_maps(page):
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    page.locator(".cell .stage").first.hover()
    values = page.locator(".cell .value").all_text_contents()
    assert all(values)
    assert values[0] != values[1]


def test_look_changes_pixels_without_a_request(page):
    choose_photo(page)
    page.wait_for_load_state("networkidle")
    before = len(page.watch.requests)
    seen = [page.evaluate(PIXELS)]
    for change in (
        lambda: page.get_by_label("Show", exact=True).select_option("both"),
        lambda: set_slider(page, "Hide weakest", 60),
        lambda: set_slider(page, "Contour lines", 4),
        lambda: page.get_by_label("Smooth", exact=True).uncheck(),
        lambda: page.get_by_label("Fade", exact=True).check(),
        lambda: page.get_by_label("Colours", exact=True).select_option("viridis"),
    ):
        change()
        seen.append(wait_until(lambda: (now := page.evaluate(PIXELS)) not in seen and now))
    picture = page.locator(".cell .stage").screenshot()
    set_slider(page, "Opacity", 0)
    wait_until(lambda: page.locator(".cell .stage").screenshot() != picture)
    assert len(page.watch.requests) == before


def test_automatic_sign_and_contrast_show_evidence_against(page, client):
    truth = client.explain(PHOTOS["chelsea"], targets=camserve.contrast("Egyptian cat", "tiger cat"), overlay=None)
    choose_photo(page)
    page.get_by_role("button", name="Contrast", exact=True).click()
    page.locator(".prediction", has_text="tiger cat").click()
    page.get_by_role("heading", name="Egyptian cat, not tiger cat").wait_for()
    assert page.locator(".cell figcaption > small").text_content().endswith(f"score {truth.explanations[0].score:.3g}")
    low, middle, high = page.locator(".cell .ticks span").all_text_contents()
    assert (low, middle) == (f"−{high}", "0")
    assert float(high) == pytest.approx(np.abs(truth.explanations[0].heatmap).max(), rel=0.01)


def test_class_is_found_by_its_label_with_the_keyboard(page):
    choose_photo(page)
    finder = page.get_by_role("combobox", name="Find a class")
    finder.press_sequentially("siamese")
    page.get_by_role("option", name="Siamese cat").wait_for()
    finder.press("Enter")
    page.get_by_role("heading", name="Siamese cat").wait_for()
    assert page.locator("#controls .chip span").all_text_contents() == ["Siamese cat"]


def test_models_and_layers_lie_side_by_side(page):
    choose_photo(page)
    page.get_by_role("checkbox", name="vit", exact=True).check()
    explained(page, maps=2)
    page.get_by_text("Choose layers").click()
    page.get_by_role("searchbox", name="Find a layer").fill("conv_head")
    page.get_by_role("checkbox", name="conv_head").check()
    wait_until(lambda: "conv_head" in page.locator(".cell figcaption > small").first.text_content())
    assert page.get_by_role("heading", name="· vit").is_visible()


def test_methods_that_do_not_fit_cannot_be_chosen(page):
    page.get_by_text("Add methods", exact=True).click()
    assert page.get_by_role("checkbox", name="chefer", exact=True).is_disabled()
    assert page.get_by_role("checkbox", name="guided_backprop", exact=True).is_enabled()
    page.get_by_role("checkbox", name="vit", exact=True).check()
    page.get_by_role("checkbox", name="efficientnet_lite0", exact=True).uncheck()
    wait_until(page.get_by_role("checkbox", name="chefer", exact=True).is_enabled)
    assert page.get_by_role("checkbox", name="guided_backprop", exact=True).is_disabled()


def test_comparison_of_a_map_with_itself_is_perfect(page):
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    facts = page.locator(".facts dd")
    assert float(facts.first.text_content()) < 1
    page.get_by_role("checkbox", name="layercam", exact=True).uncheck()
    explained(page)
    page.get_by_role("checkbox", name="vit", exact=True).check()
    explained(page, maps=2)
    page.get_by_role("button", name="Overlap").click()
    assert page.locator(".legend li").count() == 3


def test_chart_of_layers_shows_channels(page, client):
    choose_photo(page)
    page.get_by_role("tab", name="Layers").click()
    page.get_by_role("button", name="Measure all layers").click()
    point = page.locator(".chart-point[aria-label*='conv_head']").first
    point.focus()
    point.press("Enter")
    page.get_by_role("img", name="the channels of conv_head").wait_for()
    truth = client.features(PHOTOS["chelsea"], layer="conv_head", rank="gradient", picture="jpeg")
    assert f"16 of {truth.channel_count} channels" in page.locator("#panel-layers h3").text_content()
    source = page.get_by_role("img", name="the channels of conv_head").get_attribute("src")
    assert base64.b64decode(source.partition(",")[2]) == truth.picture.data


def test_readings_equal_the_clients(page, client):
    metrics, methods = ["deletion", "insertion", "sparseness"], ["gradcam", "layercam"]
    truth = client.evaluate(PHOTOS["chelsea"], metrics=metrics, methods=methods)
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    page.get_by_role("tab", name="Which to believe").click()
    page.get_by_role("button", name="Evaluate").click()
    page.get_by_role("table").wait_for()
    cells = [text.replace(" ★", "") for text in page.locator("tbody td").all_text_contents()]
    assert cells == [f"{reading.value:.3g}".ljust(5, "0") for reading in truth.readings]
    assert page.locator("#panel-evaluate .chart").count() == 2


def test_cancelled_rise_leaves_the_queue(page, served):
    choose_photo(page)
    add_method(page, "rise")
    samples = page.get_by_label("samples")
    page.get_by_text("Options and formula").last.click()
    samples.fill("8000")
    page.get_by_text("8,001 rows").wait_for()
    page.get_by_role("button", name="Explain", exact=True).last.click()
    page.get_by_text("of 8,001 rows").wait_for()
    page.get_by_role("button", name="Cancel").click()
    page.get_by_text("Cancelled.").wait_for()
    wait_until(lambda: rows_waiting(served) == 0)
    assert page.locator(".cell").count() == 1


def test_error_appears_at_its_field(opened):
    page = opened(expected=["status of 400"])
    choose_photo(page)
    add_method(page, "rise")
    page.get_by_text("Options and formula").last.click()
    page.get_by_label("samples").fill("0")
    page.locator(".field .violation").wait_for()
    assert page.locator(".violation").text_content() == "Samples is 1 to 16000, not 0."
    assert page.get_by_label("samples").get_attribute("aria-invalid") == "true"
    page.get_by_label("samples").fill("10")
    explained(page, maps=2)
    assert page.locator(".violation").count() == 0


def test_revoked_token_is_asked_for_again(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(auth, "RECHECK_INTERVAL", 0.0)
    (first, one), (second, other) = (tokens.new(name, ("explain", "observe")) for name in ("first", "second"))
    path = tmp_path / "tokens"
    path.write_text(one.line())
    with serving(models=("efficientnet_lite0",), http_address="0", tokens_file=str(path)) as served:
        page = opened(port=served.http_port, expected=["status of 401"])
        connect_with(page, first)
        choose_photo(page)
        path.write_text(other.line())
        page.locator(".prediction", has_text="tiger cat").click()
        connect_with(page, second)
        page.get_by_role("heading", name="tiger cat").wait_for()
        assert page.evaluate("[document.cookie, sessionStorage.length]") == ["", 0]
        assert first not in page.content()


def connect_with(page, secret):
    page.get_by_label("Token").fill(secret)
    page.get_by_role("button", name="Connect").click()
    page.wait_for_selector("[data-status=ready]")


@pytest.mark.skipif(not AXE.is_file(), reason=needs.AXE)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("viewport", [{"width": 1280, "height": 900}, NARROW], ids=["wide", "narrow"])
def test_accessibility_checker_finds_nothing(opened, scheme, viewport):
    page = opened(script=AXE.read_text(), color_scheme=scheme)
    page.set_viewport_size(viewport)
    page.wait_for_selector("[data-status=ready]")
    assert violations(page) == []
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    page.locator(".cell .stage").first.click()
    for tab in ("Compare maps", "Layers", "Which to believe", "Save and share"):
        page.get_by_role("tab", name=tab).click()
        if tab == "Layers":
            page.get_by_role("button", name="Measure all layers").click()
            page.locator(".chart-point").first.wait_for()
        if tab == "Which to believe":
            page.get_by_role("button", name="Evaluate").click()
            page.get_by_role("table").wait_for()
        assert violations(page) == [], tab


def violations(page):
    found = page.evaluate("async () => (await axe.run()).violations")
    return [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in found]


def test_narrow_page_never_scrolls_sideways(opened):
    page = opened()
    page.set_viewport_size(NARROW)
    choose_photo(page)
    add_method(page, "layercam", maps=2)
    page.get_by_text("Choose layers").click()
    for tab in ("Compare maps", "Layers", "Which to believe", "Save and share"):
        page.get_by_role("tab", name=tab).click()
        assert page.evaluate("document.documentElement.scrollWidth") == NARROW["width"], tab
