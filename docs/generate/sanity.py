"""Draw docs/images/sanity.jpg: maps of the embedded model, and of the same network with random last layers.

`python docs/generate/sanity.py` writes it. The columns are the photo, Grad-CAM, guided backpropagation and edges. The
rows are the trained network and the network with random last layers, both for the trained network's predicted class.
"""

import copy
from pathlib import Path

import torch
from PIL import Image, ImageDraw, ImageFont
from skimage import data
from torch import nn

from camserve_server import Explainer, models

PICTURE = Path(__file__).parent.parent / "images" / "sanity.jpg"
LAST_LAYERS = ("blocks.6", "conv_head", "bn2", "classifier")
METHODS = ("gradcam", "guided_backprop", "edges")
WIDTH, HEIGHT, LABEL = 270, 180, 26  # pixels of a picture, and of the line below it


def main() -> None:
    """Write the picture."""
    loaded = models.load(models.parse("efficientnet_lite0"))
    preprocess = loaded.info.preprocess
    photo = Image.fromarray(data.chelsea())
    rows = {"trained": loaded.module, "random last layers": randomised(loaded.module)}
    sheet = Image.new("RGB", (WIDTH * (1 + len(METHODS)), (HEIGHT + LABEL) * len(rows)), "white")
    target: int | None = None
    for row, (name, network) in enumerate(rows.items()):
        with Explainer(network, crop=1.0, mean=preprocess.mean, std=preprocess.std, accelerate=False) as explainer:
            result = explainer.explain(photo, methods=METHODS, targets=target)
        target = result.explanations[0].target.class_index
        pictures = [photo, *(each.image for each in result.explanations)]
        for column, (method, picture) in enumerate(zip(("", *METHODS), pictures, strict=True)):
            paste(sheet, picture, column, row, f"{method}, {name}" if method else "photo")
    sheet.save(PICTURE, quality=75)


def randomised(network: nn.Module) -> nn.Module:
    """Return a copy of a network whose last parameters are drawn with their own means and standard deviations."""
    result = copy.deepcopy(network)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in result.named_parameters():
        if not name.startswith(LAST_LAYERS):
            continue
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = noise * parameter.std(correction=0) + parameter.mean()
    return result


def paste(sheet: Image.Image, picture: Image.Image, column: int, row: int, label: str) -> None:
    """Paste a picture and its label into a column and row of the sheet."""
    left, top = column * WIDTH, row * (HEIGHT + LABEL)
    sheet.paste(picture.convert("RGB").resize((WIDTH, HEIGHT)), (left, top))
    ImageDraw.Draw(sheet).text((left + 8, top + HEIGHT + 4), label, fill="black", font=ImageFont.load_default(15))


if __name__ == "__main__":
    main()
