"""Make the pictures of photos, of a notebook and of a report in docs/images: cat-maps, evaluation, notebook and diff.

`make pictures` calls it: a minute or two. It needs Chromium (`make browser`).
"""

import io
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from benchmarks.diff import toy
from PIL import Image
from playwright.sync_api import Browser, Locator, sync_playwright
from safetensors.torch import save_file

import camserve
from camserve_server import Explainer

ROOT = Path(__file__).parent.parent.parent
IMAGES = ROOT / "docs" / "images"
CAT = IMAGES / "cat.jpg"  # skimage.data.chelsea(), CC0, saved by Pillow with quality=96, subsampling=0, optimize=True
BOX = (100, 20, 400, 290)  # of the cat: left, top, right, bottom
GAP = 8  # white pixels between photos
MODELS = """
from safetensors.torch import load_file

from benchmarks.diff.toy import SIDE, Toy
from camserve_server.models import Preprocess, Source


def build(version):
    network = Toy()
    network.load_state_dict(load_file(f"{version}.safetensors"))
    preprocess = Preprocess((SIDE, SIDE), (SIDE, SIDE), "bilinear", (0.5,) * 3, (0.5,) * 3)
    return Source(network, preprocess, labels=tuple(f"class {index}" for index in range(6)))


def v1():
    return build("v1")


def v2():
    return build("v2")
"""


def main() -> None:
    """Make every picture."""
    with (
        sync_playwright() as playwright,
        playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"]) as browser,
    ):
        with Explainer("efficientnet_lite0") as explainer:
            methods_of_the_cat(explainer)
            evaluation(explainer)
            notebook(explainer, browser)
        report(browser)


def methods_of_the_cat(explainer: Explainer) -> None:
    """The photo, Grad-CAM and SmoothGrad side by side."""
    result = explainer.explain(CAT, methods=["gradcam", "smoothgrad"])
    tiles = [Image.open(CAT).convert("RGB"), *(each.image.convert("RGB") for each in result.explanations)]
    white = np.full((tiles[0].height, GAP, 3), 255, np.uint8)
    row = [part for tile in tiles for part in (np.asarray(tile), white)][:-1]
    save(Image.fromarray(np.hstack(row)), "cat-maps")


def evaluation(explainer: Explainer) -> None:
    """The maps and metrics of docs/evaluation.md."""
    found = explainer.evaluate(
        CAT,
        methods=["gradcam", "layercam", "guided_backprop", "random"],
        metrics=["insertion", ("road", {"steps": 9}), "randomisation", "pointing_game"],
        box=BOX,
    )
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "evaluation.png"
        found.save(path)
        save(Image.open(path).convert("RGB"), "evaluation")


def notebook(explainer: Explainer, browser: Browser) -> None:
    """A result as a notebook displays it, with the pointer on one of its maps."""
    targets = ["tabby", camserve.contrast("tabby", "tiger cat")]
    page = browser.new_page(viewport={"width": 700, "height": 460})
    page.set_content(f"<main style='font-family: sans-serif'>{explainer.explain(CAT, targets=targets).html()}</main>")
    page.locator(".camserve-picture canvas").first.hover(position={"x": 200, "y": 180})
    save(screenshot(page.locator("main")), "notebook")
    page.close()


def report(browser: Browser) -> None:
    """A case of a report of `camserve-server diff`: the new model looks at a patch."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        compare_toys(folder)
        page = browser.new_page(viewport={"width": 980, "height": 900})
        page.goto((folder / "report" / "index.html").as_uri())
        page.evaluate("document.querySelector('.case').scrollIntoView()")
        case = page.locator(".case", has_text="looks elsewhere").first
        case.scroll_into_view_if_needed()
        case.locator(".body canvas").first.wait_for()
        save(screenshot(case), "diff")
        page.close()


def compare_toys(folder: Path) -> None:
    """Train a toy network and a copy that has learnt to look at a patch, and compare them."""
    old = toy.trained(0)
    new = toy.patch_learnt(old, 0)
    (folder / "shapes.py").write_text(MODELS, encoding="utf-8")
    for version, network in (("v1", old), ("v2", new)):
        save_file(network.state_dict(), folder / f"{version}.safetensors")
    (folder / "photos").mkdir()
    photos, classes = toy.scenes(30, 7)
    for index, photo in enumerate(toy.with_patch(photos, classes, 7)):
        Image.fromarray(photo).save(folder / "photos" / f"scene{index:03}.png")
    command = [str(Path(sys.executable).with_name("camserve-server")), "diff", "photos", "-o", "report"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    words = [*command, "--baseline", "shapes:v1", "--candidate", "shapes:v2"]
    done = subprocess.run(words, cwd=folder, env=environment, check=False)  # noqa: S603 -- our own program
    if done.returncode != 1:
        raise SystemExit("the models do not differ")


def screenshot(element: Locator) -> Image.Image:
    """Return a picture of an element of a page."""
    return Image.open(io.BytesIO(element.screenshot())).convert("RGB")


def save(picture: Image.Image, name: str) -> None:
    """Save a picture in docs/images."""
    picture.save(IMAGES / f"{name}.jpg", quality=85, optimize=True)


if __name__ == "__main__":
    main()
