"""Perturbation: maps from the scores of edited images.

A method is a generator. It yields edits of the image, at most 64 at a time, receives their scores [n,T] for the T
targets, and returns the maps [T,h,w]. Hidden pixels become zero, which in the normalised input is the mean colour of
the training set. S(x) is the score of the image x: a class's logit, unless another target is requested, where the
papers use its probability.

The random numbers of an edit depend on the seed and the edit's index alone.
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
"""The largest number of edits to yield at a time, and so to hold in memory."""

Exploration = Generator[list[Edit], Array, Array]

Numbers = NDArray[Any]


def occlusion(scene: Scene, *, window: float, stride: float, **_parameters: float | str) -> Exploration:
    """Hide one square window of the image after another, and measure how far the score falls.

    M_ij = the mean of S(x) − S(x with window w hidden) over the windows w that contain pixel ij.

    Zeiler and Fergus 2014, section 4.2. Hidden pixels are zero in the normalised input, the mean colour of the training
    set. A window or stride below 1 is a share of the image's shorter side; from 1 on it is in pixels. The stride is at
    most the window, so that every pixel is covered. The last window of a row or column may reach beyond the edge.
    """
    _, height, width = scene.image.shape
    drops, counts = np.zeros((len(scene.scores), height, width)), np.zeros((height, width))
    for window_masks in _chunks(_window_masks(height, width, window, stride)):
        scores = yield [Edit(1 - mask) for mask in window_masks]
        drops += np.tensordot(scene.scores - scores, np.stack(window_masks), (0, 0))
        counts += np.sum(window_masks, 0)
    return (drops / counts).astype(np.float32)


def windows(*, height: int, width: int, window: float, stride: float, **_parameters: float | str) -> int:
    """Return the number of windows that occlusion hides."""
    side, step = _window_and_stride(height, width, window, stride)
    return len(range(0, height - side + step, step)) * len(range(0, width - side + step, step))


def rise(scene: Scene, *, samples: float, cells: float, probability: float, seed: float, divisor: str) -> Exploration:
    """Compare the mean score of random parts of the image that show a pixel with that of all parts.

    M = Σ_q S_q m_q / Σ_q m_q − 1/n Σ_q S_q, with S_q = S(x ⊙ m_q) for n masks m_q.

    A mask is a grid of cells × cells, each 1 with probability p and else 0, resized bilinearly and shifted at random by
    less than a cell. M estimates E[S | the pixel is shown] − E[S], which is zero for a pixel that does not matter.

    Petsiuk et al. 2018, section 3. Their own map is Σ_q S_q m_q / (n p), with `divisor` = expected. In that map, a
    constant that all scores share becomes a pattern of the masks. Logits share a large constant, unlike the paper's
    probabilities.
    """
    size, count = scene.image.shape[1:], int(samples)
    total, mask_sum, mean = np.zeros((len(scene.scores), *size)), np.zeros(size), np.zeros(len(scene.scores))
    all_masks = (_random_mask(size, int(cells), probability, _generator(seed, index)) for index in range(count))
    for masks in _chunks(all_masks):
        scores = yield [Edit(mask) for mask in masks]
        total += np.tensordot(scores, np.stack(masks), (0, 0))
        mask_sum += np.sum(masks, 0)
        mean += scores.sum(0) / count
    if divisor == "expected":
        return (total / (count * probability)).astype(np.float32)
    conditional_mean = total / np.maximum(mask_sum, np.finfo(np.float32).tiny)
    return (conditional_mean - mean[:, None, None]).astype(np.float32)


def drise(scene: Scene, **parameters: float | str) -> Exploration:
    """Compare, as RISE does, how well an object is still detected in random parts of the image.

    M = Σ_q w_q m_q / Σ_q m_q − 1/n Σ_q w_q, with w_q = max over p of IoU(t, p) · cos(t, p) · O_p, for the objects p
    that are detected in x ⊙ m_q and the explained object t.

    IoU is the intersection over union of two boxes, cos the cosine of the angle between their vectors of class
    probabilities, and O the objectness. Detectors return one class and one score for each object. So cos is 1 for the
    class of t and 0 for others, and O_p is the score of p. If nothing of the class of t overlaps it, w_q is 0. The
    objects p are those that the model returns, by its own thresholds. The masks m_q and `divisor` are those of rise.

    Petsiuk et al. 2021, section 3. The paper's map is Σ_q w_q m_q; with `divisor` = expected it is divided by n p.
    """
    return (yield from rise(scene, **cast("Any", parameters)))


def samples(*, samples: float, **_parameters: float | str) -> int:
    """Return the parameter `samples`."""
    return int(samples)


def scorecam(scene: Scene, *, top_channels: float, **_parameters: float | str) -> Exploration:
    """Weight each feature map by the score of the image masked with it.

    L = Σ_k w_k A_k, with w = softmax over k of S(x ⊙ H_k), where H_k is A_k resized to the pixels bilinearly and then
    min-max normalised.

    Wang et al. 2020, arXiv:1910.01279. S is a class's logit, unless another target is requested, where other papers use
    the probability. The score of their baseline is the same for all k and cancels in the softmax. A feature map with
    the same value everywhere gets no weight. With `top_channels` only the feature maps with the largest standard
    deviation over the grid are used.
    """
    channels = _most_varied(scene, top_channels)
    scores = yield from _score(Edit(mask) for mask in _channel_masks(scene, channels))
    return _weighted_sum(scene, channels, _softmax(scores, _is_constant(scene, channels)))


def sscam(
    scene: Scene, *, top_channels: float, samples: float, noise: float, seed: float, **_parameters: float | str
) -> Exploration:
    """Weight each feature map by the mean score of the image masked with noisy versions of it.

    L = Σ_k w_k A_k, with w = softmax over k of 1/n Σ_q S(x ⊙ (H_k + ε_q)), where ε_q is drawn from N(0, σ²).

    H_k is as in Score-CAM, σ = noise, and n = samples. Wang et al. 2020, arXiv:2006.14255.
    """
    channels, copies = _most_varied(scene, top_channels), int(samples)
    masks = (mask for mask in _channel_masks(scene, channels) for _ in range(copies))
    noisy_masks = (
        (
            torch.from_numpy(mask)
            + noise * torch.randn(mask.shape, generator=_generator(seed, index), dtype=torch.float32)
        ).numpy()
        for index, mask in enumerate(masks)
    )
    scores = yield from _score(Edit(mask) for mask in noisy_masks)
    return _weighted_sum(scene, channels, _softmax(_mean_over_copies(scores, copies), _is_constant(scene, channels)))


def iscam(scene: Scene, *, top_channels: float, samples: float, **_parameters: float | str) -> Exploration:
    """Weight each feature map by the mean score of the masked image as it fades in.

    L = Σ_k w_k A_k, with w = softmax over k of 1/n Σ_q S(x ⊙ q/n H_k) for q = 1 to n, and H_k as in Score-CAM.

    Naidu et al. 2020, arXiv:2010.03023. torchcam adds up the shares q/n, and so ends at (n+1)/2 times the image.
    """
    channels, copies = _most_varied(scene, top_channels), int(samples)
    faded_masks = (
        np.float32((index + 1) / copies) * mask for mask in _channel_masks(scene, channels) for index in range(copies)
    )
    scores = yield from _score(Edit(mask) for mask in faded_masks)
    return _weighted_sum(scene, channels, _softmax(_mean_over_copies(scores, copies), _is_constant(scene, channels)))


def ablationcam(scene: Scene, *, top_channels: float, **_parameters: float | str) -> Exploration:
    """Weight each feature map by how far the score falls without it.

    L = Σ_k w_k A_k, with w_k = (S − S_k) / |S|, where S_k is the score with A_k set to zero.

    Desai and Ramaswamy 2020, except for the absolute value: without it a negative S would reverse the map's sign. If S
    is 0, w_k is S − S_k. With `top_channels` only the feature maps with the largest standard deviation over the grid
    are used.
    """
    channels = _most_varied(scene, top_channels)
    scores = yield from _score(Edit(silenced=int(channel)) for channel in channels)
    scale = np.abs(scene.scores)
    return _weighted_sum(scene, channels, (scene.scores - scores) / np.where(scale == 0, 1, scale))


def channels_tried(*, channels: int, top_channels: float, **_parameters: float | str) -> int:
    """Return the number of a layer's channels that are used, with one edit each."""
    return min(channels, int(top_channels)) if top_channels else channels


def channels_sampled(*, channels: int, top_channels: float, samples: float, **_parameters: float | str) -> int:
    """Return the number of edits for `samples` edits of each channel."""
    return channels_tried(channels=channels, top_channels=top_channels) * int(samples)


def _chunks(items: Iterable[Array]) -> Iterator[list[Array]]:
    """Yield lists of at most `AT_ONCE` items."""
    iterator = iter(items)
    while chunk := list(islice(iterator, AT_ONCE)):
        yield chunk


def _score(edits: Iterator[Edit]) -> Exploration:
    """Yield edits, `AT_ONCE` at a time; return the scores [n,T] of all."""
    scores = []
    while chunk := list(islice(edits, AT_ONCE)):
        scores.append((yield chunk))
    return np.concatenate(scores)


def _window_and_stride(height: int, width: int, window: float, stride: float) -> tuple[int, int]:
    """Return the side of a window and the stride, in pixels."""
    shorter = min(height, width)
    side, step = (max(1, round(size if size >= 1 else size * shorter)) for size in (window, stride))
    side = min(side, shorter)
    return side, min(step, side)


def _window_masks(height: int, width: int, window: float, stride: float) -> Iterator[Array]:
    """Yield a mask [H,W] for each window: 1 inside, 0 outside."""
    side, step = _window_and_stride(height, width, window, stride)
    for top in range(0, height - side + step, step):
        for left in range(0, width - side + step, step):
            mask = np.zeros((height, width), np.float32)
            mask[top : top + side, left : left + side] = 1
            yield mask


def _random_mask(size: tuple[int, ...], cells: int, probability: float, generator: torch.Generator) -> Array:
    """Draw one mask of RISE, [H,W]."""
    grid = (torch.rand((cells, cells), generator=generator, dtype=torch.float32) < probability).float()
    cell_sides = [math.ceil(side / cells) for side in size]
    enlarged = _resize(grid[None], [(cells + 1) * side for side in cell_sides])[0]
    top, left = (int(torch.randint(side, (), generator=generator)) for side in cell_sides)
    return np.ascontiguousarray(enlarged[top : top + size[0], left : left + size[1]])


def _channel_masks(scene: Scene, channels: Numbers) -> Iterator[Array]:
    """Yield H_k [H,W]: each feature map resized to the pixels and scaled to 0..1; zeros for a constant one."""
    for channel in channels:
        (resized,) = _resize(torch.from_numpy(_activations(scene)[channel][None]), scene.image.shape[1:])
        spread = resized.max() - resized.min()
        yield np.asarray((resized - resized.min()) / spread if spread > 0 else np.zeros_like(resized), np.float32)


def _resize(maps: torch.Tensor, size: Iterable[int]) -> Array:
    """Resize maps [n,h,w] to another grid, bilinearly between the cells' centres."""
    resized = functional.interpolate(maps[:, None], tuple(size), mode="bilinear", align_corners=False)
    return cast("Array", resized[:, 0].numpy())


def _activations(scene: Scene) -> Array:
    return cast("Array", scene.activations)


def _most_varied(scene: Scene, top: float) -> Numbers:
    """Return the channels to use: all, or the `top` with the largest standard deviation over the grid."""
    activations = _activations(scene)
    if not top:
        return np.arange(len(activations))
    return np.sort(np.argsort(-activations.std((1, 2)), kind="stable")[: int(top)])


def _is_constant(scene: Scene, channels: Numbers) -> Numbers:
    """Return which channels have one value everywhere, bool [K]."""
    return cast("Numbers", np.ptp(_activations(scene)[channels], (1, 2)) == 0)


def _mean_over_copies(scores: Array, copies: int) -> Array:
    """Return the mean score of each channel [K,T], given those of its copies [K·copies,T]."""
    return cast("Array", scores.reshape(-1, copies, scores.shape[1]).mean(1))


def _softmax(scores: Array, is_constant: Numbers) -> Array:
    """Return the softmax over channels of scores [K,T], with weight zero for constant channels."""
    exponentials = np.exp(scores - scores.max(0)) * ~is_constant[:, None]
    return cast("Array", exponentials / np.maximum(exponentials.sum(0), np.finfo(np.float32).tiny))


def _weighted_sum(scene: Scene, channels: Numbers, weights: Numbers) -> Array:
    """Return Σ_k w_k A_k [T,h,w] over these channels, with weights [K,T]."""
    return cast("Array", np.tensordot(weights, _activations(scene)[channels], (0, 0)).astype(np.float32))


def _generator(seed: float, index: int) -> torch.Generator:
    return torch.Generator().manual_seed(int(seed) * 100_003 + index)
