"""Write the section of docs/gallery.md on methods that need a transformer, with a small one that is trained here.

    python docs/generate/transformer.py    # some minutes on two cores, most of them training

Trained transformers need a download. This one learns which of six photos a collage contains, but not where. It is
served like any custom model, by its factory `toy`, and its maps of collages are compared with the known truth: the
evidence for the cat is where the cat is.
"""

import io
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import combinations
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors.torch import save_file
from skimage import data
from sklearn.datasets import load_sample_image
from timm.models import VisionTransformer
from torch import Tensor, nn
from torch.nn import functional
from torchvision.transforms import v2

import camserve
from camserve_server import running
from camserve_server.methods import METHODS, Attention
from camserve_server.models.source import DEFAULT_PREPROCESS

FOLDER = Path(__file__).parent.parent
PICTURES = FOLDER / "images" / "gallery"
PAGE = FOLDER / "gallery.md"

LABELS = ("cat", "coffee", "rocket", "astronaut", "temple", "flower")
SHOWN = LABELS[:4]
COMPARED = ("gradcam", *(name for name, method in METHODS.items() if isinstance(method, Attention)))
CHANCE = 0.25

SIDE, PATCH = 128, 16
TILE = SIDE // 2
STEPS, BATCH, RATE = 900, 32, 1e-3
VIEWS = 100  # crops of each photo for the collages
PICTURE_SIDE = 160  # pixels

HEADING = "## On a transformer"

TEXT = """\
{heading}

Some methods explain a transformer's attention, which the embedded model does not have. Their pictures are of a small
vision transformer (ViT), and of collages for which the correct place is known: the evidence for the cat should be in
the cat's quadrant. A map can miss it because of the method or because of the model.

The pictures explain this collage for the targets {shown}.
The area outside the model's crop stays uncoloured.

![The collage: {shown}](images/gallery/collage.jpg)

*In its quadrant* is the share of the map's positive values in the target's quadrant (`energy_in_box`). *Peak* is the
share of maps with their maximum there (`pointing_game`). Both are means over {count} collages, one for each set of four
photos, and over the four photos as targets. Chance is {chance:.2f}. `attention_rollout` has exactly that, because its
map is the same for every target. This is a small test of one toy model: [choosing](choosing.md#vision-transformers)
says what follows from it.

| method | in its quadrant ↑ | peak ↑ | {shown} |
|---|---|---|---|
{rows}

Trained transformers need a download, and the maps of random weights would mean nothing. So `make gallery` trains the
model itself: {blocks} blocks, {width} channels and a class token, with inputs of {side}×{side} pixels in patches of
{patch}. It sees {collages:,} collages of two by two in {steps} steps, made of {crops} crops, mirrored and
recoloured. It learns which of {photos} photos a collage contains ({labels}),
but not where. camserve serves it like any custom model: from a factory function and a file of weights.

In {correct} of the {count} collages, the model's four most probable classes are the four photos. It was trained on
these photos, so the results do not show that it would recognise another cat. Böhle et al. (2021, arXiv:2104.00032)
proposed this test, and Rao et al. (2022, arXiv:2205.10435) named it the grid pointing game.
"""


def toy() -> nn.Module:
    """Return the untrained transformer."""
    return VisionTransformer(
        img_size=SIDE, patch_size=PATCH, embed_dim=128, depth=4, num_heads=4, num_classes=len(LABELS)
    )


def photographs() -> dict[str, np.ndarray]:
    """Return the photo of each label, RGB [H,W,3]."""
    pictures = data.chelsea(), data.coffee(), data.rocket(), data.astronaut()
    return dict(zip(LABELS, (*pictures, *map(load_sample_image, ("china.jpg", "flower.jpg"))), strict=True))


@contextmanager
def repeatable() -> Iterator[None]:
    """Seed the random numbers and use one thread, so that sums are computed in one order."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def views() -> Tensor:
    """Return random crops of each photo, mirrored and recoloured, uint8 [labels,VIEWS,3,TILE,TILE]."""
    augment = v2.Compose(
        [
            v2.RandomResizedCrop(TILE, scale=(0.2, 1)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomGrayscale(0.2),
        ]
    )
    # The photos are first reduced to little more than a crop's size, because cropping a large photo takes longer.
    photos = [v2.functional.resize(torch.tensor(photo).movedim(2, 0), [2 * TILE]) for photo in photographs().values()]
    return torch.stack([torch.stack([augment(photo) for _ in range(VIEWS)]) for photo in photos])


def put_together(tiles: Tensor) -> Tensor:
    """Join tiles [n,4,3,t,t] to collages [n,3,2t,2t], row by row."""
    return tiles.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def train() -> nn.Module:
    """Train the transformer to tell the photos of a collage, in which a photo may occur more than once."""
    parts, normalise = views(), v2.Normalize(DEFAULT_PREPROCESS.mean, DEFAULT_PREPROCESS.std)
    model = toy()
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS, pct_start=0.2)
    for _ in range(STEPS):
        labels = torch.randint(len(LABELS), (BATCH, 4))
        collages = put_together(parts[labels, torch.randint(VIEWS, (BATCH, 4))])
        present = functional.one_hot(labels, len(LABELS)).amax(1)
        loss = functional.binary_cross_entropy_with_logits(model(normalise(collages / 255)), present.float())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model


@contextmanager
def served() -> Iterator[camserve.Client]:
    """Train the transformer and serve it; yield a client."""
    start = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        weights, labels = Path(folder, "toy.safetensors"), Path(folder, "labels.txt")
        with repeatable():
            save_file(train().state_dict(), weights)
        labels.write_text("\n".join(LABELS), encoding="utf-8")
        print(f"the transformer is trained: {time.perf_counter() - start:.0f} s", file=sys.stderr)
        model = f"toy=transformer:toy?weights={weights}&labels={labels}&size={SIDE}&task=multilabel"
        with running(models=model) as address, camserve.Client(address, timeout=600) as client:
            yield client


def collage(names: Sequence[str], photos: Mapping[str, np.ndarray]) -> Image.Image:
    """Return a collage of the central squares of four photos, row by row."""
    picture = Image.new("RGB", (2 * PICTURE_SIDE, 2 * PICTURE_SIDE))
    for place, name in enumerate(names):
        photo = Image.fromarray(photos[name])
        margins = [(length - min(photo.size)) / 2 for length in photo.size]
        middle = (*margins, *(length - margin for length, margin in zip(photo.size, margins, strict=True)))
        tile = photo.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS, box=middle)
        picture.paste(tile, quarter(place)[:2])
    return picture


def quarter(place: int) -> tuple[int, int, int, int]:
    """Return the box of tile 0 to 3 of a collage: left, top, right, bottom."""
    left, top = place % 2 * PICTURE_SIDE, place // 2 * PICTURE_SIDE
    return left, top, left + PICTURE_SIDE, top + PICTURE_SIDE


def play_pointing_game(client: camserve.Client) -> tuple[dict[tuple[str, str], float], int, int]:
    """Play the grid pointing game with every set of four photos, in seeded order.

    Returns:
        The mean of each metric, by method and metric; the number of collages; and the number of collages whose four
        most probable classes are their photos.
    """
    random, photos, correct = np.random.default_rng(0), photographs(), 0
    values = defaultdict(list)
    collages = [random.permutation(labels).tolist() for labels in combinations(LABELS, 4)]
    for names in collages:
        picture = collage(names, photos)
        predictions = client.explain(picture, model="toy", methods="gradcam", heatmap=False, overlay=None).predictions
        correct += {prediction.label for prediction in predictions[:4]} == set(names)
        for place, name in enumerate(names):
            for reading in evaluate(client, picture, name, place):
                values[reading.explanation.method, reading.metric].append(reading.value)
    return {key: float(np.mean(numbers)) for key, numbers in values.items()}, len(collages), correct


def evaluate(client: camserve.Client, picture: Image.Image, name: str, place: int) -> Sequence[camserve.Reading]:
    """Evaluate every method's map for one photo of a collage against the photo's quarter."""
    metrics, box = ("energy_in_box", ("pointing_game", {"tolerance": 0})), quarter(place)
    options = {"model": "toy", "methods": COMPARED, "targets": [name], "heatmap": False, "overlay": None}
    return client.evaluate(picture, metrics=metrics, box=box, **options).readings


def draw(client: camserve.Client) -> None:
    """Draw the collage and, for each method, a strip of overlays, one for each target."""
    picture = collage(SHOWN, photographs())
    thumbnail = picture.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
    thumbnail.save(PICTURES / "collage.jpg", quality=85, optimize=True)
    for method in COMPARED:
        explanations = client.explain(picture, model="toy", methods=method, targets=SHOWN, heatmap=False).explanations
        strip = Image.new("RGB", (len(SHOWN) * (PICTURE_SIDE + 4) - 4, PICTURE_SIDE), "white")
        for place, explanation in enumerate(explanations):
            overlay = Image.open(io.BytesIO(explanation.overlay))
            overlay = overlay.resize((PICTURE_SIDE, PICTURE_SIDE), Image.Resampling.LANCZOS)
            strip.paste(overlay, (place * (PICTURE_SIDE + 4), 0))
        strip.save(PICTURES / f"{picture_name(method)}.jpg", quality=80, optimize=True)


def picture_name(method: str) -> str:
    """Return the name of a method's picture; methods for every model also have one in the gallery's table."""
    return method if isinstance(METHODS[method], Attention) else f"{method}_transformer"


def section() -> str:
    """Train the model, draw and evaluate its maps, and return the page's section."""
    with served() as client:
        draw(client)
        means, count, correct = play_pointing_game(client)
    model = toy()
    return TEXT.format(
        heading=HEADING,
        blocks=len(model.blocks),
        width=model.embed_dim,
        side=SIDE,
        patch=PATCH,
        steps=STEPS,
        collages=STEPS * BATCH,
        crops=VIEWS * len(LABELS),
        photos=len(LABELS),
        labels=", ".join(LABELS),
        shown=", ".join(SHOWN),
        count=count,
        chance=CHANCE,
        correct=correct,
        rows="\n".join(row(method, means) for method in COMPARED),
    )


def row(method: str, means: Mapping[tuple[str, str], float]) -> str:
    """Return a method's row of the table."""
    share, peak = (means[method, metric] for metric in ("energy_in_box", "pointing_game"))
    picture = f"![{method}](images/gallery/{picture_name(method)}.jpg)"
    return f"| [`{method}`](methods.md#{method}) | {share:.2f} | {peak:.2f} | {picture} |"


def main() -> None:
    """Replace the page's section."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(before + section(), encoding="utf-8")


if __name__ == "__main__":
    main()
