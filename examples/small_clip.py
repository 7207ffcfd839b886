"""A small model in the manner of CLIP: an image and a text get an embedding each. For docs/tutorials/clip.md.

It is trained in some seconds on one core, on scenes of four coloured balls. The captions of a scene say which balls it
has, but not where.
"""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn import functional
from torchvision.models import VisionTransformer

from camserve_server.models import Preprocess, Source, TextTower

COLOURS = {
    "red": (225, 60, 50),
    "green": (60, 190, 70),
    "blue": (60, 90, 230),
    "yellow": (235, 215, 60),
    "white": (245, 245, 245),
    "black": (15, 15, 15),
}
CAPTIONS = [f"a {colour} ball" for colour in COLOURS]
WORDS = ["a", "ball", *COLOURS]
SIDE, WIDTH = 48, 48
SCALE = 10.0
"""Factor of the cosine of two embeddings. CLIP learns it; here it is fixed."""


def draw(colours: list[str], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Return a photo of four balls, uint8 [48,48,3]: top left, top right, bottom left, bottom right."""
    photo = rng.normal(120, 12, (SIDE, SIDE, 3))
    half = SIDE // 2
    for place, colour in enumerate(colours):
        radius = rng.uniform(7, 9)
        top, left = rng.uniform(radius + 1, half - 1 - radius, 2) + half * np.array(divmod(place, 2))
        photo[np.hypot(np.arange(SIDE)[:, None] - top, np.arange(SIDE)[None] - left) < radius] = COLOURS[colour]
    return photo.clip(0, 255).astype(np.uint8)


class Texts(nn.Module):
    """The text encoder: the sum of an embedding for each word. Words that it does not know count nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(len(WORDS), 32)

    def forward(self, texts: list[str]) -> Tensor:
        """Return the embeddings of texts [n,32]."""
        numbers = [[WORDS.index(word) for word in text.split() if word in WORDS] for text in texts]
        return torch.stack([self.words(torch.tensor(each, dtype=torch.long)).sum(0) for each in numbers])


def image_side() -> VisionTransformer:
    """Return the image encoder: a vision transformer with 36 patches and two blocks."""
    images = VisionTransformer(SIDE, 8, 2, 4, WIDTH, 2 * WIDTH, num_classes=32)
    nn.init.normal_(images.heads.head.weight, std=WIDTH**-0.5)  # torchvision's zeros would have no direction
    return images


def train(steps: int = 150, seed: int = 1) -> tuple[VisionTransformer, TextTower]:
    """Return an image encoder and a text encoder, trained together like CLIP.

    Args:
        steps: the number of steps, of 32 scenes each.
        seed: of the scenes and the weights.
    """
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    images, texts = image_side(), Texts()
    optimizer = torch.optim.AdamW([*images.parameters(), *texts.parameters()])
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, steps, pct_start=0.2)
    for _ in range(steps):
        scenes = [list(rng.permutation(list(COLOURS))[:4]) for _ in range(32)]
        pixels = torch.from_numpy(np.stack([draw(scene, rng) for scene in scenes])).permute(0, 3, 1, 2) / 127.5 - 1
        present = torch.tensor([[float(colour in scene) for colour in COLOURS] for scene in scenes])
        logits = SCALE * functional.normalize(images(pixels)) @ functional.normalize(texts(CAPTIONS)).T
        # Both ways, as in CLIP: the captions of each image, and the images of each caption.
        loss = functional.cross_entropy(logits, present / present.sum(1, keepdim=True))
        loss = loss + functional.cross_entropy(logits.T, present.T / present.T.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        nn.utils.clip_grad_norm_(images.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    return images.eval(), TextTower(texts.eval(), scale=SCALE)


def build() -> Source:
    """Return the model to serve, by --model clip=small_clip:build; it is trained when the server starts."""
    images, text = train()
    preprocess = Preprocess((SIDE, SIDE), SIDE, "bilinear", (0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
    return Source(images, preprocess, labels=tuple(CAPTIONS), task="embed", text=text)
