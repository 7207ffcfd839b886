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
# The first element of each kind that has text. A kind is a tag with its class, and those of the element around it: what
# its colours and its markup depend on.
FIRST_OF_KINDS = """
  const first = {};
  for (const node of document.querySelectorAll("body *"))
    if ([...node.childNodes].some((child) => child.nodeType === Node.TEXT_NODE && child.data.trim()))
      first[[node.parentElement, node].map((each) => `${each.tagName}.${each.className}`).join(" > ")] ??= node;
"""
KINDS = f"() => {{ {FIRST_OF_KINDS} return Object.keys(first) }}"
CONTRAST = f"""async (kinds) => {{
  {FIRST_OF_KINDS}
  const options = {{ resultTypes: ["violations"], runOnly: ["color-contrast"] }};
  return (await axe.run(kinds.map((kind) => first[kind]), options)).violations;
}}"""

pytestmark = [
    pytest.mark.slow,  # every page is opened
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


def violations(page, part, **options):
    options |= {"resultTypes": ["violations"]}
    found = page.evaluate("async ([part, options]) => (await axe.run(part, options)).violations", [part, options])
    return first_nodes(found)


def first_nodes(found):
    return {rule["id"]: rule["nodes"][0]["html"][:300] for rule in found}


def covering(kinds):
    """Return pages that together have all kinds of elements, each with those that it adds, the most for its size."""
    chosen, missing = {}, set().union(*kinds.values())
    while missing:
        name = max(kinds, key=lambda name: len(kinds[name] & missing) / (SITE / name).stat().st_size)
        chosen[name] = sorted(kinds[name] & missing)
        missing -= kinds[name]
    return chosen


@pytest.mark.timeout(900)
def test_pages_are_accessible_and_never_scroll_sideways_on_a_narrow_screen(opened, address):
    page, faults, wide, kinds = opened("index.html"), {}, {}, {}

    def show(name):
        page.goto(f"{address}/{name}")
        page.add_script_tag(url=f"{address}/{AXE.name}")

    def note(name, found):
        if found:
            faults[name] = found

    for name in PAGES:
        page.set_viewport_size(DESKTOP)
        show(name)
        kinds[name] = set(page.evaluate(KINDS))
        note(name, violations(page, "article", runOnly=OF_CONTENT))
        page.set_viewport_size(NARROW)
        width = page.evaluate("document.documentElement.scrollWidth")
        if width != NARROW["width"]:
            wide[name] = width
    page.set_viewport_size(DESKTOP)
    for name, new in covering(kinds).items():
        show(name)
        note(f"{name} (all rules)", violations(page, "html", rules={"color-contrast": {"enabled": False}}))
        for scheme in ("dark", "light"):  # dark mode changes nothing but colours
            page.emulate_media(color_scheme=scheme)
            note(f"{name} ({scheme})", first_nodes(page.evaluate(CONTRAST, new)))

    assert (faults, wide) == ({}, {})


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
