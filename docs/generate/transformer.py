"""Writes the part of docs/gallery.md on methods that need a transformer: a small one, trained here, is shown collages.

    python docs/generate/transformer.py    # some minutes on two cores, most of them training

Trained transformers cannot be had without a download. This one learns which of six photos parts of a collage are from;
it is not told where. Served as anyone's own model, by its factory `toy`, it is asked about collages of which the truth
is known: what speaks for the cat is where the cat is.
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
from camserve_server.models.sources import USUAL

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
VIEWS = 100  # of each photo, to make collages of
DRAWN = 160  # pixels of a picture's side

HEADING = "## On a transformer"

TEXT = """\
{heading}

The embedded model has no attention, trained transformers cannot be had without a download, and one with random weights
would draw nonsense. So this is a toy that `make gallery` trains itself: a vision transformer of {blocks} blocks,
{width} channels and a class token, which sees {side}×{side} pixels in patches of {patch}. In {steps} steps on
{collages:,} collages of two by two, made of {crops} crops, mirrored and recoloured, it learns which of {photos}
photos are there ({labels}); nobody tells it where. It is served as anyone's own model is: by a factory
and a file of weights.

Here it looks at collages of four of the photos. It has seen them in training, so nothing here says whether it would
know another cat; but what speaks for the cat should be in the cat's quarter, and where that is is known. A map can miss
it by the method's fault or by the model's. The pictures are this collage, asked for {shown};
what the model's own crop leaves out stays uncoloured.

![The collage: {shown}](images/gallery/collage.jpg)

The numbers are means over {count} collages, every four of the photos, and in each every photo as the target. *In its
quarter* is the share of the map's positive values there (`energy_in_box`), *peak* the share of maps whose hottest place
is there (`pointing_game`). Chance is {chance:.2f}, and `attention_rollout` has exactly that: it does not look at the
target, so that one map is shared out among four quarters. In {right} of the {count} collages the model's four most
probable classes are the four photos. The game is Böhle et al.'s (2021, arXiv:2104.00032), and has its name, the grid
pointing game, from Rao et al. (2022, arXiv:2205.10435).

| method | in its quarter ↑ | peak ↑ | {shown} |
|---|---|---|---|
{rows}
"""


def toy() -> nn.Module:
    """Return the transformer, untrained."""
    return VisionTransformer(
        img_size=SIDE, patch_size=PATCH, embed_dim=128, depth=4, num_heads=4, num_classes=len(LABELS)
    )


def photographs() -> dict[str, np.ndarray]:
    """Return what there is of each label: RGB [H,W,3]."""
    pictures = data.chelsea(), data.coffee(), data.rocket(), data.astronaut()
    return dict(zip(LABELS, (*pictures, *map(load_sample_image, ("china.jpg", "flower.jpg"))), strict=True))


@contextmanager
def repeatable() -> Iterator[None]:
    """Inside, chance is seeded, and sums are made in one order: by one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            yield
    finally:
        torch.set_num_threads(threads)


def views() -> Tensor:
    """Return random parts of each photo, mirrored and recoloured: uint8 [labels,VIEWS,3,TILE,TILE]."""
    change = v2.Compose(
        [
            v2.RandomResizedCrop(TILE, scale=(0.2, 1)),
            v2.RandomHorizontalFlip(),
            v2.ColorJitter(0.4, 0.4, 0.4, 0.1),
            v2.RandomGrayscale(0.2),
        ]
    )
    # Parts are cut out of photos that are not much larger than them: a large one costs as much again for every part.
    photos = [v2.functional.resize(torch.tensor(one).movedim(2, 0), [2 * TILE]) for one in photographs().values()]
    return torch.stack([torch.stack([change(photo) for _ in range(VIEWS)]) for photo in photos])


def put_together(tiles: Tensor) -> Tensor:
    """Make collages [n,3,2t,2t] of tiles [n,4,3,t,t], row by row."""
    return tiles.unflatten(1, (2, 2)).permute(0, 3, 1, 4, 2, 5).flatten(4, 5).flatten(2, 3)


def train() -> nn.Module:
    """Teach the transformer which photos a collage is of; any may be there more than once."""
    parts, normalise = views(), v2.Normalize(USUAL.mean, USUAL.std)
    model = toy()
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, STEPS, pct_start=0.2)
    for _ in range(STEPS):
        labels = torch.randint(len(LABELS), (BATCH, 4))
        collages = put_together(parts[labels, torch.randint(VIEWS, (BATCH, 4))])
        there = functional.one_hot(labels, len(LABELS)).amax(1)
        loss = functional.binary_cross_entropy_with_logits(model(normalise(collages / 255)), there.float())
        optimiser.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model


@contextmanager
def served() -> Iterator[camserve.Client]:
    """Train the transformer and serve it, as its owner would: yield a client."""
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        weights, labels = Path(folder, "toy.safetensors"), Path(folder, "labels.txt")
        with repeatable():
            save_file(train().state_dict(), weights)
        labels.write_text("\n".join(LABELS), encoding="utf-8")
        print(f"the transformer is trained: {time.perf_counter() - began:.0f} s", file=sys.stderr)
        model = f"toy=transformer:toy?weights={weights}&labels={labels}&size={SIDE}&task=multilabel"
        with running(models=model) as address, camserve.Client(address, timeout=600) as client:
            yield client


def collage(names: Sequence[str], photos: Mapping[str, np.ndarray]) -> Image.Image:
    """Put the middles of four photos together, row by row."""
    whole = Image.new("RGB", (2 * DRAWN, 2 * DRAWN))
    for place, name in enumerate(names):
        photo = Image.fromarray(photos[name])
        margins = [(length - min(photo.size)) / 2 for length in photo.size]
        middle = (*margins, *(length - margin for length, margin in zip(photo.size, margins, strict=True)))
        tile = photo.resize((DRAWN, DRAWN), Image.Resampling.LANCZOS, box=middle)
        whole.paste(tile, quarter(place)[:2])
    return whole


def quarter(place: int) -> tuple[int, int, int, int]:
    """Return where the tile 0 to 3 of a collage is: left, top, right, bottom."""
    left, top = place % 2 * DRAWN, place // 2 * DRAWN
    return left, top, left + DRAWN, top + DRAWN


def judge(client: camserve.Client) -> tuple[dict[tuple[str, str], float], int, int]:
    """Play the grid pointing game with every four of the photos, in seeded order.

    Returns:
        The mean of each metric, by method and metric; how many collages there were, and of how many the four most
        probable classes are the photos.
    """
    chance, photos, right = np.random.default_rng(0), photographs(), 0
    found = defaultdict(list)
    fours = [chance.permutation(four).tolist() for four in combinations(LABELS, 4)]
    for names in fours:
        picture = collage(names, photos)
        likely = client.explain(picture, model="toy", methods="gradcam", heatmap=False, overlay=None).predictions[:4]
        right += {one.label for one in likely} == set(names)
        for place, name in enumerate(names):
            for one in pointed(client, picture, name, place):
                found[one.explanation.method, one.metric].append(one.value)
    return {key: float(np.mean(values)) for key, values in found.items()}, len(fours), right


def pointed(client: camserve.Client, picture: Image.Image, name: str, place: int) -> Sequence[camserve.Reading]:
    """Ask every method what speaks for one photo, and whether that is where it is."""
    metrics, box = ("energy_in_box", ("pointing_game", {"tolerance": 0})), quarter(place)
    asked = {"model": "toy", "methods": COMPARED, "targets": [name], "heatmap": False, "overlay": None}
    return client.evaluate(picture, metrics=metrics, box=box, **asked).readings


def draw(client: camserve.Client) -> None:
    """Draw the collage and, for every method, a strip of its overlays, one a target."""
    whole = collage(SHOWN, photographs())
    whole.resize((DRAWN, DRAWN), Image.Resampling.LANCZOS).save(PICTURES / "collage.jpg", quality=85, optimize=True)
    for method in COMPARED:
        found = client.explain(whole, model="toy", methods=method, targets=SHOWN, heatmap=False).explanations
        strip = Image.new("RGB", (len(SHOWN) * (DRAWN + 4) - 4, DRAWN), "white")
        for place, one in enumerate(found):
            overlay = Image.open(io.BytesIO(one.overlay)).resize((DRAWN, DRAWN), Image.Resampling.LANCZOS)
            strip.paste(overlay, (place * (DRAWN + 4), 0))
        strip.save(PICTURES / f"{pictured(method)}.jpg", quality=80, optimize=True)


def pictured(method: str) -> str:
    """Return the name of a method's picture; methods that every model answers have one of their own."""
    return method if isinstance(METHODS[method], Attention) else f"{method}_transformer"


def section() -> str:
    """Train, draw and judge; return the page's part."""
    with served() as client:
        draw(client)
        means, count, right = judge(client)
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
        right=right,
        rows="\n".join(row(method, means) for method in COMPARED),
    )


def row(method: str, means: Mapping[tuple[str, str], float]) -> str:
    """Write a method's row."""
    share, peak = (means[method, metric] for metric in ("energy_in_box", "pointing_game"))
    picture = f"![{method}](images/gallery/{pictured(method)}.jpg)"
    return f"| [`{method}`](methods.md#{method}) | {share:.2f} | {peak:.2f} | {picture} |"


def main() -> None:
    """Write the page's part anew."""
    before, _, _ = PAGE.read_text(encoding="utf-8").partition(HEADING)
    PAGE.write_text(before + section(), encoding="utf-8")


if __name__ == "__main__":
    main()
