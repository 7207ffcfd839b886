"""Make the pictures of the page: docs/images/page.jpg, page-layers.jpg, page-evaluate.jpg and page-narrow.jpg.

    PYTHONPATH=tests python docs/generate/page_pictures.py    # less than a minute; needs Chromium (make browser)

The page is served with the embedded model, and explains its own sample photo of a cat.
"""

import io
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, sync_playwright

from support import serving

IMAGES = Path(__file__).parent.parent / "images"
WIDE = {"width": 1280, "height": 1300}
NARROW = {"width": 320, "height": 1800}
TIMEOUT = 100_000  # milliseconds that a step may take
SETTLED = "count => document.querySelectorAll('.cell').length === count && !document.querySelector('.rows.stale')"


def main() -> None:
    """Make every picture."""
    with (
        serving(models=("efficientnet_lite0",), http_address="0") as served,
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser,
    ):
        address = f"http://127.0.0.1:{served.http_port}/"
        for picture in (compare, layers, evaluate, narrow):
            picture(browser, address)


def compare(browser: Browser, address: str) -> None:
    """Three maps with contour lines and regions, and the difference of two of them."""
    with opened(browser, address) as page:
        add_method(page, "layercam", maps=2)
        add_method(page, "integrated_gradients", maps=3)
        page.get_by_role("slider", name="Contour lines").fill("4")
        page.get_by_label("Regions", exact=True).check()
        page.get_by_text("Rank correlation").wait_for()
        save(page.screenshot(), "page", width=1000)


def layers(browser: Browser, address: str) -> None:
    """The chart of all layers, and the channels of one, two of which are switched off."""
    with opened(browser, address, color_scheme="dark") as page:
        page.get_by_role("tab", name="Layers").click()
        page.get_by_role("button", name="Measure all layers").click()
        page.locator(".chart-point").first.wait_for()
        page.get_by_label("Layer", exact=True).fill("conv_head")
        page.get_by_role("button", name="Show features").click()
        page.get_by_text("conv_head: 16 of").wait_for()
        for channel in (0, 3):
            page.locator(".channel").nth(channel).click()
        page.get_by_text("conv_head without channel").wait_for()
        settle(page, maps=1)
        page.get_by_text("Without interventions").wait_for()
        save(page.screenshot(full_page=True), "page-layers", width=760)


def evaluate(browser: Browser, address: str) -> None:
    """The values and curves of metrics for two maps."""
    with opened(browser, address, color_scheme="dark") as page:
        add_method(page, "layercam", maps=2)
        page.get_by_role("tab", name="Which to believe").click()
        page.get_by_role("button", name="Evaluate").click()
        page.get_by_role("table").wait_for()
        save(page.locator("#analysis").screenshot(), "page-evaluate", width=560)


def narrow(browser: Browser, address: str) -> None:
    """The page on a narrow screen."""
    with opened(browser, address) as page:
        page.set_viewport_size(NARROW)
        add_method(page, "layercam", maps=2)
        page.evaluate("document.querySelector('#controls .groups').parentElement.open = false; scrollTo(0, 0)")
        save(page.screenshot(), "page-narrow", width=320)


@contextmanager
def opened(browser: Browser, address: str, color_scheme: str = "light") -> Iterator[Page]:
    """Open the page and explain its sample photo of a cat."""
    page = browser.new_page(viewport=WIDE, color_scheme=color_scheme)
    page.set_default_timeout(TIMEOUT)
    page.goto(address)
    page.wait_for_selector("[data-status=ready]")
    page.get_by_role("button", name="Cat").click()
    settle(page, maps=1)
    yield page
    page.close()


def add_method(page: Page, name: str, maps: int) -> None:
    """Add a method, and wait for its map."""
    page.get_by_label("Find a method").wait_for(state="attached")
    page.evaluate("document.querySelector('#controls .groups').parentElement.open = true")
    page.get_by_role("checkbox", name=name, exact=True).check()
    settle(page, maps)
    page.evaluate("document.querySelector('#controls .groups').parentElement.open = false")


def settle(page: Page, maps: int) -> None:
    """Wait until a number of maps is drawn, and nothing is computed."""
    page.wait_for_function(SETTLED, arg=maps)


def save(png: bytes, name: str, width: int) -> None:
    """Save a screenshot as a JPEG file of this width."""
    picture = Image.open(io.BytesIO(png)).convert("RGB")
    height = round(picture.height * width / picture.width)
    picture.resize((width, height), Image.Resampling.LANCZOS).save(IMAGES / f"{name}.jpg", quality=85, optimize=True)


if __name__ == "__main__":
    main()
