"""Write docs/gallery.md and its pictures: every method on the same photos, through a server and a client.

    python docs/generate/gallery.py            # all methods: some minutes on two cores
    python docs/generate/gallery.py gradcam    # only the pictures of the named methods

The photos are scikit-image's. The model is the embedded one, with its ImageNet weights. Methods that it does not
support (attention needs a transformer) are listed with the reason, and shown with the transformer of transformer.py.
"""

import io
import sys
import time
from pathlib import Path

from PIL import Image
from skimage import data
from transformer import HEADING, section

import camserve
from camserve_server import running

FOLDER = Path(__file__).parent.parent
PICTURES = FOLDER / "images" / "gallery"
PHOTOS = ("chelsea", "coffee", "rocket")
HEIGHT = 160

HEAD = """\
# Gallery

The gallery shows what the maps of every method look like, to compare them at a glance. [Methods](methods.md) says what
each one computes, and [choosing](choosing.md) which to use: a map that looks convincing can still be wrong.

`make gallery` draws the pictures of three photos, with the default parameters of each method and the embedded
efficientnet_lite0. They explain the class that it predicts: {classes}.
A picture is [blank](glossary.md#blank) if nothing in the map is positive.

"""


def main(requested: list[str]) -> None:
    """Draw the pictures of the requested methods; or of all methods, and write the page."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    photos = {name: getattr(data, name)() for name in PHOTOS}
    with running(models=["efficientnet_lite0"]) as address, camserve.Client(address, timeout=1800) as client:
        results = [client.explain(photo) for photo in photos.values()]
        names = [method.name for method in client.methods()]
        notes = {name: note for name in names if (note := draw(client, name, photos, requested))}
    if requested:
        return
    classes = ", ".join(f"{result.predictions[0].label} ({name})" for name, result in zip(PHOTOS, results, strict=True))
    rows = [f"| [`{name}`](methods.md#{name}) | {cell(name, notes)} |" for name in names]
    page = HEAD.format(classes=classes) + "\n".join(["| method | picture |", "|---|---|", *rows]) + "\n\n" + section()
    (FOLDER / "gallery.md").write_text(page, encoding="utf-8")


def draw(client: camserve.Client, method: str, photos: dict[str, object], requested: list[str]) -> str:
    """Draw a method's overlays on all photos side by side; return the reason if the model does not support it."""
    if requested and method not in requested:
        return ""
    start = time.perf_counter()
    try:
        maps = [client.explain(photo, methods=method, heatmap=False).explanations[0] for photo in photos.values()]
    except camserve.FailedPrecondition as error:
        return str(error.message)
    overlays = [Image.open(io.BytesIO(explanation.overlay)) for explanation in maps]
    resized = [
        overlay.resize((round(overlay.width * HEIGHT / overlay.height), HEIGHT), Image.Resampling.LANCZOS)
        for overlay in overlays
    ]
    strip = Image.new("RGB", (sum(part.width for part in resized) + 4 * (len(resized) - 1), HEIGHT), "white")
    left = 0
    for part in resized:
        strip.paste(part, (left, 0))
        left += part.width + 4
    strip.save(PICTURES / f"{method}.jpg", quality=80, optimize=True)
    verdicts = [explanation.verdict.value for explanation in maps]
    print(f"{method}: {time.perf_counter() - start:.1f} s, {verdicts}", file=sys.stderr)
    return ""


def cell(method: str, notes: dict[str, str]) -> str:
    """Return a method's cell of the table: its picture, or the reason for its absence."""
    if "detector" in notes.get(method, ""):
        return notes[method]
    if method in notes:
        return f"{notes[method]}; [a transformer has](#{HEADING.removeprefix('## ').lower().replace(' ', '-')})"
    return f"![{method}](images/gallery/{method}.jpg)"


if __name__ == "__main__":
    main(sys.argv[1:])
