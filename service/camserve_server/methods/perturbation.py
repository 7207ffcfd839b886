"""Perturbation: maps from the scores of edited images.

A method is a generator: it yields some edits of the image, at most 64 at a time, is sent their scores [n,T] for the T
targets, and returns the maps [T,h,w]. What it hides of the image becomes zero, which in the normalised input is the
mean colour of what the model was trained on. A score is the target's logit, where a paper has its probability.

Whatever is drawn for an edit depends on the seed and the edit's index alone.
"""

import math
from collections.abc import Generator, Iterable, Iterator
from itertools import islice
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional

from camserve_server.methods.kinds import Array, Scene
from camserve_server.methods.values import Edit

AT_ONCE = 64
"""Edits at a time at most: what is held of them in memory."""

Exploring = Generator[list[Edit], Array, Array]

Numbers = NDArray[Any]


def occlusion(scene: Scene, *, window: float, stride: float, **_parameters: float | str) -> Exploring:
    """Hide one square window of the image after another; see how far the score falls.

    M_ij = mean of S(x) − S(x with window w hidden) over the windows w that hold pixel ij. Zeiler and Fergus 2014,
    section 4.2. Window and stride below 1 are shares of the image's shorter side, from 1 on pixels; a stride is at most
    the window, so that no pixel is left out. The last window of a row or column may reach beyond the edge.
    """
    _, height, width = scene.image.shape
    fallen, covered = np.zeros((len(scene.scores), height, width)), np.zeros((height, width))
    for holes in _pieces(_holes(height, width, window, stride)):
        scores = yield [Edit(1 - hole) for hole in holes]
        fallen += np.tensordot(scene.scores - scores, np.stack(holes), (0, 0))
        covered += np.sum(holes, 0)
    return (fallen / covered).astype(np.float32)


def windows(*, height: int, width: int, window: float, stride: float, **_parameters: float | str) -> int:
    """Return how many windows occlusion hides."""
    side, step = _window(height, width, window, stride)
    return len(range(0, height - side + step, step)) * len(range(0, width - side + step, step))


def rise(scene: Scene, *, samples: float, cells: float, probability: float, seed: float, divisor: str) -> Exploring:
    """Show random parts of the image; take for each pixel the mean score of those that show it, less that of all.

    M = Σ_i S_i m_i / Σ_i m_i − 1/n Σ_i S_i with S_i = S(x ⊙ m_i), where the mask m_i is a grid of cells×cells cells,
    each 1 with probability p or else 0, brought to the pixels bilinearly and shifted at random by less than a cell. It
    estimates E[S | the pixel is shown] − E[S], Petsiuk et al. 2018, section 3, from the zero at which a pixel does not
    matter. Their own map is Σ_i S_i m_i / (n p) (divisor "expected"): with it what all scores have in common makes a
    pattern of the masks, and logits, unlike their probabilities, have much in common.
    """
    size = scene.image.shape[1:]
    total, shown, mean = np.zeros((len(scene.scores), *size)), np.zeros(size), np.zeros(len(scene.scores))
    drawn = (_random_mask(size, int(cells), probability, _dice(seed, index)) for index in range(int(samples)))
    for masks in _pieces(drawn):
        scores = yield [Edit(mask) for mask in masks]
        total += np.tensordot(scores, np.stack(masks), (0, 0))
        shown += np.sum(masks, 0)
        mean += scores.sum(0) / int(samples)
    if divisor == "expected":
        return (total / (int(samples) * probability)).astype(np.float32)
    seen = total / np.maximum(shown, np.finfo(np.float32).tiny)
    return (seen - mean[:, None, None]).astype(np.float32)


def samples(*, samples: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`."""
    return int(samples)


def scorecam(scene: Scene, *, top_channels: float, **_parameters: float | str) -> Exploring:
    """Weigh each feature map by the score of the image seen through it.

    L = Σ_k w_k A_k with w = softmax over k of S(x ⊙ H_k), where H_k is A_k brought to the pixels bilinearly, then
    scaled to 0..1. Wang et al. 2020, arXiv:1910.01279; their baseline's score, the same for all k, cancels in the
    softmax. Feature maps that are flat get no weight. With top_channels only those that vary most are tried.
    """
    channels = _most_varied(scene, top_channels)
    scores = yield from _scored(Edit(mask) for mask in _channel_masks(scene, channels))
    return _summed(scene, channels, _softmax(scores, _flat(scene, channels)))


def sscam(
    scene: Scene, *, top_channels: float, samples: float, noise: float, seed: float, **_parameters: float | str
) -> Exploring:
    """Weigh each feature map by the mean score of the image seen through noisy versions of it.

    L = Σ_k w_k A_k with w = softmax over k of 1/n Σ_i S(x ⊙ (H_k + N(0, σ²))), H_k as in Score-CAM and σ = noise. Wang
    et al. 2020, arXiv:2006.14255.
    """
    channels, copies = _most_varied(scene, top_channels), int(samples)
    masks = (mask for mask in _channel_masks(scene, channels) for _ in range(copies))
    noisy = (
        (torch.from_numpy(mask) + noise * torch.randn(mask.shape, generator=_dice(seed, index))).numpy()
        for index, mask in enumerate(masks)
    )
    scores = yield from _scored(Edit(one) for one in noisy)
    return _summed(scene, channels, _softmax(_mean_of(scores, copies), _flat(scene, channels)))


def iscam(scene: Scene, *, top_channels: float, samples: float, **_parameters: float | str) -> Exploring:
    """Weigh each feature map by the mean score of the image as it is faded in through it.

    L = Σ_k w_k A_k with w = softmax over k of 1/n Σ_i S(x ⊙ i/n H_k), i = 1 to n, H_k as in Score-CAM. Naidu et al.
    2020, arXiv:2010.03023. (torchcam adds the shares up as it goes, and so ends at (n+1)/2 times the image.)
    """
    channels, copies = _most_varied(scene, top_channels), int(samples)
    faded = (
        np.float32((index + 1) / copies) * mask for mask in _channel_masks(scene, channels) for index in range(copies)
    )
    scores = yield from _scored(Edit(one) for one in faded)
    return _summed(scene, channels, _softmax(_mean_of(scores, copies), _flat(scene, channels)))


def ablationcam(scene: Scene, *, top_channels: float, **_parameters: float | str) -> Exploring:
    """Weigh each feature map by how far the score falls without it.

    L = Σ_k w_k A_k with w_k = (S − S_k) / |S|, where S_k is the score with A_k set to zero. Desai and Ramaswamy 2020,
    but for the absolute value: a negative S would turn the map over. With top_channels only the feature maps that vary
    most are tried.
    """
    channels = _most_varied(scene, top_channels)
    scores = yield from _scored(Edit(silenced=int(channel)) for channel in channels)
    scale = np.abs(scene.scores)
    return _summed(scene, channels, (scene.scores - scores) / np.where(scale == 0, 1, scale))


def channels_tried(*, channels: int, top_channels: float, **_parameters: float | str) -> int:
    """Return how many of a layer's channels are tried, one edit each."""
    return min(channels, int(top_channels)) if top_channels else channels


def channels_sampled(*, channels: int, top_channels: float, samples: float, **_parameters: float | str) -> int:
    """Return how many edits a number of samples for each channel takes."""
    return channels_tried(channels=channels, top_channels=top_channels) * int(samples)


def _pieces(items: Iterable[Array]) -> Iterator[list[Array]]:
    """Cut into lists of at most 64."""
    iterator = iter(items)
    while piece := list(islice(iterator, AT_ONCE)):
        yield piece


def _scored(edits: Iterator[Edit]) -> Exploring:
    """Try edits; return their scores [n,T]."""
    scores = []
    while piece := list(islice(edits, AT_ONCE)):
        scores.append((yield piece))
    return np.concatenate(scores)


def _window(height: int, width: int, window: float, stride: float) -> tuple[int, int]:
    """Return the side of a window and the stride, in pixels."""
    shorter = min(height, width)
    side, step = (max(1, round(size if size >= 1 else size * shorter)) for size in (window, stride))
    side = min(side, shorter)
    return side, min(step, side)


def _holes(height: int, width: int, window: float, stride: float) -> Iterator[Array]:
    """Yield for each window where it is, [H,W]: 1 inside."""
    side, step = _window(height, width, window, stride)
    for top in range(0, height - side + step, step):
        for left in range(0, width - side + step, step):
            hole = np.zeros((height, width), np.float32)
            hole[top : top + side, left : left + side] = 1
            yield hole


def _random_mask(size: tuple[int, ...], cells: int, probability: float, dice: torch.Generator) -> Array:
    """Draw one mask of RISE, [H,W]."""
    grid = (torch.rand((cells, cells), generator=dice) < probability).float()
    cell = [math.ceil(side / cells) for side in size]
    large = _onto(grid[None], [(cells + 1) * side for side in cell])[0]
    top, left = (int(torch.randint(side, (), generator=dice)) for side in cell)
    return np.ascontiguousarray(large[top : top + size[0], left : left + size[1]])


def _channel_masks(scene: Scene, channels: Numbers) -> Iterator[Array]:
    """Yield each channel's feature map, brought to the pixels and scaled to 0..1, [H,W]; zeros if it is flat."""
    for channel in channels:
        (large,) = _onto(torch.from_numpy(_activations(scene)[channel][None]), scene.image.shape[1:])
        width = large.max() - large.min()
        yield np.asarray((large - large.min()) / width if width > 0 else np.zeros_like(large), np.float32)


def _onto(maps: torch.Tensor, size: Iterable[int]) -> Array:
    """Bring maps [n,h,w] to another grid, bilinearly between the cells' centres."""
    found = functional.interpolate(maps[:, None], tuple(size), mode="bilinear", align_corners=False)
    return cast("Array", found[:, 0].numpy())


def _activations(scene: Scene) -> Array:
    return cast("Array", scene.activations)


def _most_varied(scene: Scene, top: float) -> Numbers:
    """Return the channels to try: all, or the `top` with the largest standard deviation over the grid."""
    activations = _activations(scene)
    if not top:
        return np.arange(len(activations))
    return np.sort(np.argsort(-activations.std((1, 2)), kind="stable")[: int(top)])


def _flat(scene: Scene, channels: Numbers) -> Numbers:
    """Tell which channels have one value everywhere."""
    return cast("Numbers", np.ptp(_activations(scene)[channels], (1, 2)) == 0)


def _mean_of(scores: Array, copies: int) -> Array:
    """Take the mean over the copies of each channel: [K·copies,T] to [K,T]."""
    return cast("Array", scores.reshape(-1, copies, scores.shape[1]).mean(1))


def _softmax(scores: Array, flat: Numbers) -> Array:
    """Return the softmax over channels of scores [K,T]; of flat channels zero."""
    powers = np.exp(scores - scores.max(0)) * ~flat[:, None]
    return cast("Array", powers / np.maximum(powers.sum(0), np.finfo(np.float32).tiny))


def _summed(scene: Scene, channels: Numbers, weights: Numbers) -> Array:
    """Add up the feature maps of some channels, weights [K,T], into maps [T,h,w]."""
    return cast("Array", np.tensordot(weights, _activations(scene)[channels], (0, 0)).astype(np.float32))


def _dice(seed: float, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed) * 100_003 + index)
