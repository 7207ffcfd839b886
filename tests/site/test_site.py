"""The built site in a browser: `make test-site` builds it first."""

import shutil
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

import needs

ROOT = Path(__file__).parents[2]
SITE = ROOT / "docs/_build/html"
AXE = ROOT / ".browser/node_modules/axe-core/axe.min.js"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PAGES = sorted(path.relative_to(SITE).as_posix() for path in SITE.rglob("*.html") if path.parts[-2] != "_static")
DESKTOP, NARROW = {"width": 1280, "height": 900}, {"width": 320, "height": 640}
# Rules of axe that the text of a page can break. A few pages are checked with all rules, for the template.
OF_CONTENT = [
    *("duplicate-id-aria", "empty-heading", "heading-order", "image-alt", "link-name"),
    *("scrollable-region-focusable", "svg-img-alt"),
]
# Shows the text of another page in the open page, as its own scripts would.
# Returns the kinds of elements of the other page with its sidebars. To open each page takes five times as long.
SHOW_TEXT = """async (url) => {
  const other = new DOMParser().parseFromString(await (await fetch(url)).text(), "text/html");
  const kinds = Object.keys(firstOfKinds(other));
  history.replaceState(null, "", url);
  document.querySelector("article").replaceWith(document.adoptNode(other.querySelector("article")));
  document.dispatchEvent(new Event("DOMContentLoaded"));
  await Promise.allSettled([...document.images].map((image) => image.decode()));
  return kinds;
}"""
# The first element of each kind that has text. A kind is a tag with its class, and those of the element around it: what
# its colours and its markup depend on.
FIRST_OF_KINDS = """() => {
  window.firstOfKinds = (root) => {
    const first = {};
    for (const node of root.querySelectorAll("body *"))
      if ([...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()))
        first[[node.parentElement, node].map((each) => `${each.tagName}.${each.className}`).join(" > ")] ??= node;
    return first;
  };
}"""
KINDS = "() => Object.keys(firstOfKinds(document))"
CONTRAST = """async (kinds) => {
  const first = firstOfKinds(document), options = { resultTypes: ["violations"], runOnly: ["color-contrast"] };
  return (await axe.run(kinds.map((kind) => first[kind]), options)).violations;
}"""

pytestmark = [
    pytest.mark.slow,  # a browser shows the text of every page
    pytest.mark.skipif(not PAGES, reason=needs.SITE),
    pytest.mark.skipif(CHROMIUM is None, reason=needs.CHROMIUM),
    pytest.mark.skipif(not AXE.exists(), reason=needs.AXE),
]


class Quiet(SimpleHTTPRequestHandler):
    """The site, and axe beside it, which the browser then compiles once."""

    def translate_path(self, path):
        return str(AXE) if path == f"/{AXE.name}" else super().translate_path(path)

    def log_message(self, *_):
        pass


@pytest.fixture(scope="module")
def address():
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=SITE)) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def window(browser, address):
    """Window of all tests, whose pages share what is loaded, and the troubles of its pages: errors, other hosts."""
    context, troubles = browser.new_context(), []
    context.on("weberror", lambda error: troubles.append(str(error.error)))
    context.on("request", lambda request: request.url.startswith((address, "data:")) or troubles.append(request.url))
    yield context, troubles
    context.close()


@pytest.fixture
def opened(window, address):
    """Function that opens the site in a new page; requests to other hosts and errors fail the test at its end."""
    context, troubles = window
    troubles.clear()
    pages = []

    def run(path, viewport=DESKTOP, **media):
        page = context.new_page()
        pages.append(page)
        page.set_viewport_size(viewport)
        page.emulate_media(**media)
        page.goto(f"{address}/{path}")
        return page

    yield run
    for page in pages:
        page.close()
    assert troubles == []


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("integrated gradients", "methods.html"),
        ("Explainer", "api/server.html"),
        ("ALL_NEGATIVE", "reference/errors.html"),
        ("p99", "metrics.html"),
        ("CAMSERVE_TOKENS_FILE", "reference/settings.html"),
        ("token", "access.html"),
    ],
)
def test_search_finds_the_page_of_a_subject(opened, words, wanted):
    page = opened("search.html")
    page.get_by_role("textbox", name="Search").first.fill(words)
    page.keyboard.press("Enter")
    page.locator("#search-results li a").first.wait_for()
    page.get_by_text("Search finished").wait_for()
    found = page.locator("#search-results li > a").evaluate_all("links => links.map((link) => link.pathname)")

    assert f"/{wanted}" in found[:10]


def prepare(page, address):
    page.add_script_tag(url=f"{address}/{AXE.name}")
    page.evaluate(FIRST_OF_KINDS)


def violations(page, part, **options):
    options |= {"resultTypes": ["violations"]}
    found = page.evaluate("async ([part, options]) => (await axe.run(part, options)).violations", [part, options])
    return first_nodes(found)


def first_nodes(found):
    return {rule["id"]: rule["nodes"][0]["html"][:300] for rule in found}


def excess_width(page):
    page.set_viewport_size(NARROW)
    return page.evaluate("document.documentElement.scrollWidth") - NARROW["width"]


def covering(kinds):
    """Return pages that together have all kinds of elements, the most for its size first."""
    chosen, missing = [], set().union(*kinds.values())
    while missing:
        chosen.append(max(kinds, key=lambda name: len(kinds[name] & missing) / (SITE / name).stat().st_size))
        missing -= kinds[chosen[-1]]
    return chosen


@pytest.fixture(scope="module")
def kinds_and_faults_of_texts(window, address):
    """The kinds of elements of each page, and what is wrong with its text."""
    (context, troubles), kinds, faults = window, {}, {}
    page = context.new_page()
    page.goto(f"{address}/index.html")
    prepare(page, address)
    page.evaluate("document.querySelectorAll('aside').forEach((sidebar) => sidebar.remove())")
    for name in PAGES:
        kinds[name] = set(page.evaluate(SHOW_TEXT, f"{address}/{name}"))
        faults[name] = violations(page, "article", runOnly=OF_CONTENT), excess_width(page)
    page.close()
    assert troubles == []
    return kinds, faults


@pytest.mark.timeout(900)
def test_text_of_every_page_is_accessible_and_fits_a_narrow_screen(kinds_and_faults_of_texts):
    assert {name: fault for name, fault in kinds_and_faults_of_texts[1].items() if fault != ({}, 0)} == {}


@pytest.mark.timeout(900)
def test_pages_with_all_kinds_of_elements_are_accessible(opened, address, kinds_and_faults_of_texts):
    page, faults, checked = opened("index.html"), {}, set()
    for name in covering(kinds_and_faults_of_texts[0]):
        page.set_viewport_size(DESKTOP)
        page.goto(f"{address}/{name}")
        prepare(page, address)
        faults[name] = violations(page, "html", rules={"color-contrast": {"enabled": False}})
        new = set(page.evaluate(KINDS)) - checked
        for scheme in ("dark", "light"):  # dark mode changes nothing but colours
            page.emulate_media(color_scheme=scheme)
            faults[f"{name} ({scheme})"] = first_nodes(page.evaluate(CONTRAST, sorted(new)))
        faults[f"{name} (width)"] = excess_width(page)
        checked |= new

    assert {name: fault for name, fault in faults.items() if fault} == {}


def test_dark_mode_follows_the_system(opened):
    colours = [
        opened("index.html", color_scheme=scheme).evaluate("getComputedStyle(document.body).backgroundColor")
        for scheme in ("light", "dark")
    ]

    assert colours[0] != colours[1]


def test_code_has_a_button_that_copies_it(opened):
    page = opened("start/notebook.html")

    assert page.locator("div.highlight button.copybtn").count() == page.locator("div.highlight").count()


def test_link_to_a_photo_has_its_name_as_text(opened):
    page = opened("start/notebook.html")

    assert page.locator("a[href$='cat.jpg']").first.inner_text() == "cat.jpg"
