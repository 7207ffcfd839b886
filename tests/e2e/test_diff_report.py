"""The report of a diff in a browser: a file that asks for nothing else, and serves everybody."""

import contextlib
import re
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import needs
from camserve import Verdict
from camserve.diff import html
from camserve.diff.html import Pictures
from camserve.diff.values import Group
from client.diff import reports
from support import wait_until

ROOT = Path(__file__).parents[2]
AXE = ROOT / ".browser/node_modules/axe-core/axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
TIMEOUT = 500_000  # milliseconds until a step of a test has failed; less than pytest's own timeout
MOST_CARDS = 12  # near a viewport of 900 pixels
EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(1)><!-- ' \" &"

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason=needs.CHROMIUM)]

SHOWN = "[...document.querySelectorAll('.case h3')].map((title) => title.firstChild.data.trim())"
BUILT = "document.querySelectorAll('.case .body').length"
FIRST_BUILT = "document.querySelectorAll('.case:nth-child(-n+3) .body').length"
FOCUSED = """() => {
  const node = document.activeElement;
  const name = node.labels?.[0]?.textContent ?? node.ariaLabel ?? node.textContent;
  return [name, getComputedStyle(node.closest(".picture") ?? node).outlineStyle];
}"""
CANVASES = "[...document.querySelectorAll('.case .body')[0].querySelectorAll('canvas')].map((one) => one.toDataURL())"


@pytest.fixture(scope="module")
def small():
    return reports.report_of(10)


@pytest.fixture(scope="module")
def file(tmp_path_factory, small):
    """A report of ten photos, by two methods."""
    path = tmp_path_factory.mktemp("report") / "index.html"
    html.write(path, small, reports.pictures_of)
    return path


class Watch:
    """Record of what a page does: errors in its console, and requests for anything but its own file."""

    def __init__(self, page):
        self.errors, self.requests, self.own = [], [], None
        page.on("console", lambda message: message.type in ("error", "warning") and self.errors.append(message.text))
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("dialog", self._dialog)
        page.on("request", lambda request: request.url == self.own or self.requests.append(request.url))

    def _dialog(self, dialog):
        self.errors.append(dialog.message)
        dialog.dismiss()

    def start(self, own):
        """Forget what was, and expect requests for the page's own file."""
        self.errors, self.requests, self.own = [], [], own


def new_page(browser, script="", **options):
    window = browser.new_context(offline=True, **options)
    window.set_default_timeout(TIMEOUT)
    window.add_init_script(script)
    page = window.new_page()
    page.watch = Watch(page)
    return page


@pytest.fixture(scope="module")
def tab(browser):
    """A tab that tests use in turn: a new one is a new process, which compiles the report's code again."""
    page = new_page(browser)
    yield page
    page.context.close()


@pytest.fixture
def show(browser, tab):
    """Function that opens a report; at the end the page must have asked for nothing, and written no error."""
    with contextlib.ExitStack() as stack:

        def run(path, width=1280, scheme="light", expected=False, script="", **options):
            own = script or options
            page = new_page(browser, script, **options) if own else tab
            stack.callback(page.context.close if own else partial(page.goto, "about:blank"))
            if not expected:
                stack.callback(check, page.watch)
            page.set_viewport_size({"width": width, "height": 900})
            page.emulate_media(color_scheme=scheme)
            page.mouse.move(0, 0)
            page.watch.start(path.as_uri())
            page.goto(path.as_uri())
            return page

        yield run


def check(watch):
    assert watch.errors == []
    assert [url for url in watch.requests if not url.startswith("data:image/jpeg;")] == []


def to_cases(page):
    """Scroll to the list, and wait for its first card."""
    page.evaluate("document.querySelector('.case').scrollIntoView()")
    page.wait_for_selector(".case .body")


def names(cases):
    return [case.image for case in cases]


def test_photos_and_maps_are_shown_without_a_request(show, file, small):
    page = show(file)
    to_cases(page)

    assert page.get_by_role("heading", level=1).text_content() == "resnet50-v2 looks elsewhere than resnet50"
    assert page.evaluate(SHOWN) == names(small.cases)
    wait_until(lambda: page.evaluate("document.querySelector('.case img').naturalWidth === 200"))
    assert page.locator(".case .body").first.locator("canvas").count() == 4


def test_policy_stops_what_a_report_would_fetch(show, file):
    page = show(file, expected=True)
    page.evaluate("document.body.append(Object.assign(new Image(), { src: 'http://127.0.0.1:9/x.png' }))")

    wait_until(lambda: page.evaluate("document.images.length") and page.watch.errors)
    assert "Content Security Policy" in page.watch.errors[0]


def test_watch_sees_a_request(show, tmp_path):
    path = tmp_path / "index.html"
    path.write_text("<!doctype html><img src=other.png>")
    page = show(path, expected=True)

    assert [url.rpartition("/")[2] for url in page.watch.requests] == ["other.png"]


def violations(page):
    page.add_script_tag(content=AXE.read_text())
    return [
        (each["id"], each["nodes"][0]["html"]) for each in page.evaluate("async () => (await axe.run()).violations")
    ]


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [320, 1280])
def test_report_fits_and_has_no_barriers(show, file, width, scheme):
    if not AXE.exists():
        pytest.skip(needs.AXE)
    page = show(file, width, scheme)
    page.evaluate("document.querySelectorAll('details').forEach((node) => (node.open = true))")
    to_cases(page)

    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert violations(page) == []


def test_barrier_is_found(show, file):
    if not AXE.exists():
        pytest.skip(needs.AXE)
    page = show(file)
    to_cases(page)
    page.evaluate("document.querySelector('.wipe').removeAttribute('aria-label')")

    assert [name for name, _ in violations(page)] == ["label"]


def test_keys_reach_every_control_in_order_and_show_the_focus(show, file):
    page = show(file)
    to_cases(page)
    page.locator(".wipe").nth(1).wait_for()  # a card is drawn when it comes near the window
    page.locator("#cases-title").focus()
    reached = []
    for _ in range(11):
        page.keyboard.press("Tab")
        reached.append(page.evaluate(FOCUSED))

    names, outlines = zip(*reached, strict=True)
    fields = ("Finding", "Class of the finding", "Method", "Name of the photo", "Label", "Order")
    assert names[:9] == (*fields, "Opacity of the maps", "Colours", "Show all cases")
    assert [name.partition(": photo")[0] for name in names[9:]] == ["Slide between A and B"] * 2
    assert "none" not in outlines


def chosen(page, label, text):
    """Choose the entry of a list that starts with a text, with the arrow keys."""
    entries = page.get_by_label(label, exact=True)
    texts = entries.locator("option").all_text_contents()
    entries.press("Home")
    for _ in range(next(index for index, entry in enumerate(texts) if entry.startswith(text))):
        page.keyboard.press("ArrowDown")


def test_list_is_sorted_with_the_keyboard(show, file, small):
    page = show(file)
    orders = {tuple(range(20))}
    for text, value, sign in (
        ("lowest rank", lambda case: case.comparison.spearman, 1),
        ("least", lambda case: case.comparison.iou, 1),
        ("largest sh", lambda case: case.comparison.shift, -1),
        ("largest change of the sc", lambda case: abs(case.comparison.score_change), -1),
    ):
        chosen(page, "Order", text)
        keys = [sign * float(f"{value(case):.5g}") for case in small.cases]
        order = sorted(range(len(keys)), key=keys.__getitem__)  # equal ones stay worst first
        assert page.evaluate(SHOWN) == [small.cases[index].image for index in order]
        orders.add(tuple(order))
    assert len(orders) >= 4  # worst first is the order of the rank correlations

    chosen(page, "Order", "name")
    assert page.evaluate(SHOWN) == [f"photo-{number // 2}.jpg" for number in range(20)]


def status(page, text):
    page.get_by_role("status").get_by_text(text, exact=True).wait_for()


def test_list_is_filtered_with_the_keyboard(show, file, small):
    page = show(file)
    status(page, "20 cases")
    chosen(page, "Class of the finding", "pred")
    status(page, "4 of 20 cases")
    page.get_by_label("Label").focus()
    page.keyboard.type("LYNX")
    lynx = [case for case in small.cases if case.candidate.prediction.label == "lynx"]
    status(page, f"{len(lynx)} of 20 cases")
    assert page.evaluate(SHOWN) == names(lynx)

    page.get_by_role("button", name="Show all cases").press("Enter")
    status(page, "20 cases")
    assert page.get_by_label("Label").input_value() == ""
    page.get_by_label("Name of the photo").focus()
    page.keyboard.type("to-7")
    status(page, "2 of 20 cases")
    chosen(page, "Method", "smooth")
    status(page, "1 of 20 cases")
    assert page.evaluate(SHOWN) == ["photo-7.jpg"]


def test_group_of_findings_filters_the_list(show, file, small):
    page = show(file)
    group = small.groups[0]
    button = page.get_by_role("button", name=f"Show only these cases: {group.title}")
    button.press("Enter")

    assert page.evaluate(SHOWN) == [small.cases[index].image for index in group.cases]
    status(page, f"{len(group.cases)} of 20 cases")
    assert button.get_attribute("aria-pressed") == "true"
    assert page.evaluate("document.activeElement.id") == "cases-title"

    button.press("Enter")
    status(page, "20 cases")


def test_picture_of_a_group_leads_to_its_case(show, file, small):
    page = show(file)
    second = list(dict.fromkeys(small.cases[index].image for index in small.groups[0].cases))[1]
    page.locator("[data-group='0'] .small").nth(1).press("Enter")

    assert page.evaluate("document.activeElement.querySelector('h3').textContent").startswith(second)
    page.wait_for_selector(".case:focus .body")


def test_slider_wipes_from_one_map_to_the_other(show, file):
    page = show(file)
    to_cases(page)
    slider = page.locator(".wipe").first
    a, b, _, half = page.evaluate(CANVASES)
    assert len({a, b, half}) == 3

    slider.press("Home")
    assert page.evaluate(CANVASES)[3] == b
    slider.press("End")
    assert page.evaluate(CANVASES)[3] == a
    slider.press("PageDown")
    assert page.evaluate(CANVASES)[3] not in (a, b)


def test_opacity_is_that_of_all_maps(show, file):
    page = show(file)
    to_cases(page)
    page.get_by_label("Opacity of the maps").fill("25")

    opacities = page.evaluate("[...document.querySelectorAll('canvas')].map((one) => getComputedStyle(one).opacity)")
    assert set(opacities) == {"0.25"}


def test_colours_change_all_maps_near_the_viewport(show, file):
    page = show(file)
    to_cases(page)
    before = page.evaluate(CANVASES)
    page.get_by_label("Colours").select_option("viridis")
    after = page.evaluate(CANVASES)

    assert [old != new for old, new in zip(before, after, strict=True)] == [True, True, False, True]


def test_shares_of_the_overlap_agree_with_the_number(show, file, small):
    page = show(file)
    to_cases(page)
    first = next(case for case in small.cases if case.comparison.iou > 0.3)
    page.get_by_label("Name of the photo").fill(first.image)
    page.get_by_label("Method").select_option(first.method)
    status(page, "1 of 20 cases")
    page.wait_for_selector(".case .parts li")

    texts = page.locator(".parts li").all_text_contents()
    only_a, only_b, both = (float(re.findall(r"[\d.]+", text)[0]) for text in texts)
    assert both / (only_a + only_b + both) == pytest.approx(first.comparison.iou, abs=0.02)
    assert f"{100 * first.comparison.iou:.1f}" in page.locator(".facts").text_content()


PAINTED_COLUMNS = """() => {
  const canvas = document.querySelectorAll(".case canvas")[2];
  const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
  const alphas = data.filter((_, index) => index % 4 === 3);
  const isPainted = (column) => alphas.some((alpha, index) => alpha && index % canvas.width === column);
  return Array.from({ length: canvas.width }, (_, column) => column).filter(isPainted);
}"""


def test_overlap_is_painted_only_where_both_models_see(show, tmp_path):
    photos = [replace(reports.WHOLE, seen=reports.Box(*edges)) for edges in ((0, 0, 150, 150), (50, 0, 200, 150))]
    heatmaps = (reports.blob(7, 0.5, 0.5), reports.blob(14, 0.5, 0.5))
    report = reports.report([reports.case_of(0)])
    html.write(tmp_path / "index.html", report, lambda _: Pictures(b"", tuple(photos), heatmaps))
    page = show(tmp_path / "index.html")
    to_cases(page)

    columns = [200 / 256 * column for column in page.evaluate(PAINTED_COLUMNS)]  # in pixels of the photo
    assert 50 <= min(columns) < 75
    assert 125 < max(columns) <= 150


@pytest.fixture(scope="module")
def thousand(tmp_path_factory):
    """The cases of 1,000 photos, and their report."""
    report = reports.report_of(1000, methods=reports.METHODS[:1])
    path = tmp_path_factory.mktemp("report") / "index.html"
    html.write(path, report, reports.pictures_of)
    return report.cases, path


def test_thousand_photos_have_few_cards_at_a_time(show, thousand):
    cases, path = thousand
    page = show(path)
    to_cases(page)
    most = 0
    for part in range(1, 21):
        page.evaluate("(share) => scrollTo(0, share * document.documentElement.scrollHeight)", part / 20)
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        most = max(most, page.evaluate(BUILT))
    wait_until(lambda: page.evaluate("document.querySelector('.case:last-child .body')"))

    assert 0 < most <= MOST_CARDS
    assert page.locator(".case:last-child h3").text_content().startswith(cases[-1].image)
    assert page.locator(".case:first-child .body").count() == 0
    chosen(page, "Class of the finding", "looks")
    status(page, "200 of 1,000 cases")
    page.wait_for_selector(".case .body")
    assert page.evaluate(BUILT) <= MOST_CARDS


EVERYTHING_IS_NEAR = """window.IntersectionObserver = class {
  constructor(call) { this.call = call; }
  observe(target) { queueMicrotask(() => this.call([{ target, isIntersecting: true, boundingClientRect: {} }])); }
  unobserve() {}
};"""


def test_count_of_cards_sees_those_that_are_built_too_early(show, file):
    page = show(file, script=EVERYTHING_IS_NEAR)

    wait_until(lambda: page.evaluate(BUILT) > MOST_CARDS)


def test_card_stays_while_a_control_in_it_has_the_focus(show, thousand):
    page = show(thousand[1])
    to_cases(page)
    page.locator(".wipe").first.focus()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight / 2)")
    wait_until(lambda: page.evaluate(f"{BUILT} > 1") and page.evaluate(FIRST_BUILT) == 1)
    page.get_by_label("Order").focus()
    page.evaluate("scrollTo(0, document.documentElement.scrollHeight)")

    wait_until(lambda: page.evaluate(FIRST_BUILT) == 0)


def test_hostile_names_are_shown_as_text(show, tmp_path):
    case = reports.case_of(0)
    evil = replace(case, image=EVIL, method=EVIL, layer=EVIL, target=EVIL)
    report = reports.report([evil], groups=(Group(case.change, EVIL, (0,), 1),), reasons=(EVIL,))
    html.write(tmp_path / "index.html", report, lambda _: reports.pictures_of(case))
    page = show(tmp_path / "index.html")
    to_cases(page)

    assert page.evaluate(SHOWN) == [EVIL]
    assert page.locator(".about").text_content().startswith(f"{EVIL} on {EVIL} for “{EVIL}”.")
    assert page.locator("img:not([src^='data:image/jpeg;base64,'])").count() == 0
    assert page.locator(".reasons").text_content() == EVIL


def test_maps_that_cannot_be_read_are_said_to_be_and_not_drawn(show, tmp_path):
    case = reports.case_of(0)
    numbers = dict.fromkeys(("spearman", "shift", "ssim", "pearson", "kl"), np.nan)
    comparison = replace(case.comparison, iou_curve=(np.nan,) * 6, **numbers)
    bad = np.full((7, 7), np.nan, np.float32)
    answer = replace(case.candidate, verdict=Verdict.NON_FINITE)
    report = reports.report([replace(case, comparison=comparison, candidate=answer, position=np.nan)])
    html.write(tmp_path / "index.html", report, lambda _: Pictures(b"", (reports.WHOLE,) * 2, (bad, bad)))
    page = show(tmp_path / "index.html")
    to_cases(page)

    assert "not finite" in page.locator(".warning").text_content()
    assert "cannot be compared" in page.locator(".about").text_content()
    assert "NaN" not in page.locator(".case").text_content()
    assert page.locator(".case img").count() == 0


def test_summary_is_shown_without_javascript(show, file, small):
    page = show(file, java_script_enabled=False)

    assert page.get_by_role("heading", level=1).is_visible()
    for text in (*small.reasons, small.groups[0].title):
        assert page.get_by_text(text).first.is_visible()
    assert page.locator("noscript").inner_text().endswith("need JavaScript.")
    page.get_by_text("The checks as a table").click()
    rows = page.get_by_role("table", name="Checks by method and layer").get_by_role("row")
    assert rows.count() == 1 + len(small.checks)
