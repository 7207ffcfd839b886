"""A small CLIP of transformers, trained in less than a minute, and scenes of four shapes with a caption each."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

Photos = NDArray[np.uint8]
"""Images, uint8 [N,H,W,3]."""

SIDE, PATCH = 48, 8
QUADRANT = SIDE // 2
COLOURS = {
    "red": (225, 60, 50), "green": (60, 190, 70), "blue": (60, 90, 230), "yellow": (235, 215, 60),
    "white": (245, 245, 245), "black": (15, 15, 15),
}  # fmt: skip
SHAPES = ("circle", "cross")
CAPTIONS = tuple(f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES)
HALF_BAR = 0.3  # of a cross's bars, in units of its radius
TOKENS = 8
STEPS, BATCH, RATE = 600, 32, 3e-3


@dataclass(frozen=True, slots=True)
class Scenes:
    """Scenes of four shapes of different colours, one in each quadrant.

    Attributes:
        photos: the images.
        captions: index of the caption of each quadrant, [N,4]: top left, top right, bottom left, bottom right.
    """

    photos: Photos
    captions: NDArray[np.int64]


def scenes(count: int, seed: int) -> Scenes:
    """Return scenes on a noisy grey background; size and place in the quadrant are random.

    Args:
        count: the number of scenes.
        seed: their seed.
    """
    rng = np.random.default_rng(seed)
    colours = rng.random((count, len(COLOURS))).argsort(1)[:, :4]
    captions = colours * len(SHAPES) + rng.integers(0, len(SHAPES), colours.shape)
    photos = rng.normal(120, 10, (count, SIDE, SIDE, 3))
    rows, columns = np.mgrid[:QUADRANT, :QUADRANT]
    for photo, chosen in zip(photos, captions, strict=True):
        for place, caption in enumerate(chosen):
            top, left = place // 2 * QUADRANT, place % 2 * QUADRANT
            radius = rng.uniform(8.5, 10)
            y, x = rng.uniform(radius + 1, QUADRANT - radius - 1, 2)
            inside = _shape(SHAPES[caption % len(SHAPES)], np.abs(rows - y) / radius, np.abs(columns - x) / radius)
            part = photo[top : top + QUADRANT, left : left + QUADRANT]
            part[inside] += np.array(list(COLOURS.values())[caption // len(SHAPES)]) - 120
    return Scenes(photos.clip(0, 255).astype(np.uint8), captions)


def _shape(name: str, y: NDArray[np.float64], x: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return the cells inside a shape, given their distances from its centre in units of its radius."""
    if name == "circle":
        return np.asarray(y**2 + x**2 <= 1, bool)
    return np.asarray((np.minimum(y, x) <= HALF_BAR) & (np.maximum(y, x) <= 1), bool)


def build() -> tuple[Any, Any]:
    """Return the untrained CLIP and its processor, whose tokenizer knows letters and the words of the captions."""
    import transformers  # noqa: PLC0415 -- an optional dependency, and seconds to import

    begin, end = "<|startoftext|>", "<|endoftext|>"
    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    merges = _merges(sorted({word for caption in CAPTIONS for word in caption.split()}))
    words = [*letters, *(letter + "</w>" for letter in letters), *dict.fromkeys(map("".join, merges)), begin, end]
    ids = {word: number for number, word in enumerate(words)}
    width = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 4, "attention_dropout": 0.0}
    special = {"bos_token_id": ids[begin], "eos_token_id": ids[end], "pad_token_id": ids[end]}
    config = transformers.CLIPConfig(
        text_config={
            **width, **special, "num_hidden_layers": 1, "vocab_size": len(words), "max_position_embeddings": TOKENS,
        },
        vision_config={**width, "num_hidden_layers": 2, "image_size": SIDE, "patch_size": PATCH},
        projection_dim=32,
    )  # fmt: skip
    sizes = {"size": {"shortest_edge": SIDE}, "crop_size": {"height": SIDE, "width": SIDE}}
    tokenizer = transformers.CLIPTokenizer(vocab=ids, merges=merges, model_max_length=TOKENS)
    images = transformers.CLIPImageProcessor(**sizes)
    return transformers.CLIPModel(config), transformers.CLIPProcessor(images, tokenizer)


def _merges(words: list[str]) -> list[tuple[str, str]]:
    """Return the merges that make each word one token, letter by letter."""
    merges: dict[tuple[str, str], None] = {}
    for word in words:
        parts = [*word[:-1], word[-1] + "</w>"]
        for end in range(1, len(parts)):
            merges["".join(parts[:end]), parts[end]] = None
    return list(merges)


def train(steps: int = STEPS) -> tuple[Any, Any]:
    """Return the CLIP, trained to tell which four captions a scene has, but not where, and its processor."""
    torch.manual_seed(0)
    model, processor = build()
    tokens = processor(text=list(CAPTIONS), return_tensors="pt", padding=True)
    optimiser = torch.optim.AdamW(model.parameters(), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, RATE, steps, pct_start=0.2)
    mean, std = (torch.tensor(getattr(processor.image_processor, name)) for name in ("image_mean", "image_std"))
    for step in range(steps):
        batch = scenes(BATCH, 1000 + step)
        pixels = ((torch.from_numpy(batch.photos) / 255 - mean) / std).permute(0, 3, 1, 2)
        logits: Tensor = model(pixel_values=pixels, **tokens).logits_per_image
        present = functional.one_hot(torch.from_numpy(batch.captions), len(CAPTIONS)).sum(1).float()
        # As in CLIP, both ways: each image's captions among all, and each caption's images among those of the batch.
        loss = functional.cross_entropy(logits, present / present.sum(1, keepdim=True))
        loss = loss + functional.cross_entropy(logits.T, present.T / present.T.sum(1, keepdim=True).clamp(min=1))
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]  # of torch
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        schedule.step()
    return model.eval(), processor


def save(folder: Path, steps: int = STEPS) -> Path:
    """Train the CLIP and save it in a folder, as `hf:` reads it."""
    model, processor = train(steps)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return folder
