"""The formulas that docs/methods.md and the metrics state, each computed as written and compared with the code.

A case is a plain NumPy or torch version of the stated sentence, applied to random numbers. Formulas without a case fail
the tests, unless `TESTED_ELSEWHERE` names the test that covers them.
"""

import re
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from scipy import ndimage, stats
from sklearn.linear_model import Lasso

from camserve_server.imaging.values import Box, View
from camserve_server.jobs import LayerMaps, RawMap
from camserve_server.jobs.evaluate import make_metric_input
from camserve_server.jobs.fuse import fuse_layers
from camserve_server.methods import METHODS, Scene, formula
from camserve_server.metrics import METRICS
from camserve_server.targets import similarity_of_best
from camserve_server.targets.values import DetectionTarget

PAGE = (Path(__file__).parents[2] / "docs" / "methods.md").read_text(encoding="utf-8")

TESTED_ELSEWHERE = {
    "guided_backprop": "test_gradients.py: the engine applies the rule of each ReLU",
    "deconvnet": "test_gradients.py: the engine applies the rule of each ReLU",
    "guided_gradcam": "test_gradients.py: a request multiplies the maps of two passes",
}

CASES = defaultdict(list)

CHANNELS, HEIGHT, WIDTH = 6, 4, 5
IMAGE = (3, 20, 24)


def states(*names):
    """Register a case of these methods or metrics."""

    def register(case):
        for name in names:
            CASES[name].append(case)
        return case

    return register


def parameters(kind, name, **chosen):
    return {parameter.name: parameter.default for parameter in kind[name].parameters} | chosen


def assert_close(actual, expected, tolerance=1e-10):
    """Compare relative to the largest expected value; 1e-10 is for float64 and 1e-5 for float32."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * max(np.abs(expected).max(), 1e-30))


def generator(seed=0):
    return np.random.default_rng(seed)


# ---------------------------------------------------------------------------------------- maps of feature maps


def feature_maps(seed=0):
    """Activations and gradients [C,h,w], of both signs."""
    return generator(seed).normal(size=(2, CHANNELS, HEIGHT, WIDTH))


def cam(name, activations, gradients, **chosen):
    """The map [h,w] of one image, computed in a batch of two."""
    batch = [torch.from_numpy(np.stack([values, values[::-1]])) for values in (activations, gradients)]
    maps = METHODS[name].weigh(*batch, torch.zeros(2), **parameters(METHODS, name), **chosen)
    return (maps.sum(1) if maps.dim() == 4 else maps)[0]


def weighted_sum(weights, activations):
    return sum(weight * feature_map for weight, feature_map in zip(weights, activations, strict=True))


@states("gradcam")
def case_of_gradcam(name):
    activations, gradients = feature_maps()
    alpha = [gradient.sum() / (HEIGHT * WIDTH) for gradient in gradients]
    assert_close(cam(name, activations, gradients), weighted_sum(alpha, activations))


@states("hirescam")
def case_of_hirescam(name):
    activations, gradients = feature_maps()
    assert_close(cam(name, activations, gradients), weighted_sum(gradients, activations))


@states("layercam")
def case_of_layercam(name):
    activations, gradients = feature_maps()
    assert_close(cam(name, activations, gradients), weighted_sum(np.maximum(gradients, 0), activations))


@states("gradcam_elementwise")
def case_of_gradcam_elementwise(name):
    activations, gradients = feature_maps()
    assert_close(cam(name, activations, gradients), np.maximum(gradients * activations, 0).sum(0))


@states("xgradcam")
def case_of_xgradcam(name):
    activations, gradients = feature_maps()
    activations[2] = 0
    alpha = [
        (gradient * feature_map).sum() / feature_map.sum() if feature_map.any() else 0
        for feature_map, gradient in zip(activations, gradients, strict=True)
    ]
    assert_close(cam(name, activations, gradients), weighted_sum(alpha, activations))


def plus_plus_weights(first, second, third, activations, *, official=False):
    """w_k of Grad-CAM++ from g, g² and g³, or from their means."""
    weights = []
    for d1, d2, d3, feature_map in zip(first, second, third, activations, strict=True):
        cubic = np.maximum(d3 * feature_map.sum(), 0)  # counts as zero where it is negative
        alpha = np.divide(d2, 2 * d2 + cubic, out=np.zeros_like(d2), where=d2 != 0)
        if official:
            alpha /= alpha[d1 > 0].sum()
        weights.append((alpha * np.maximum(d1, 0)).sum())
    return weights


@states("gradcam_plus_plus")
def case_of_gradcam_plus_plus(name):
    activations, gradients = feature_maps()
    gradients[0, 0] = 0
    for variant in ("paper", "official"):
        weights = plus_plus_weights(gradients, gradients**2, gradients**3, activations, official=variant == "official")
        assert_close(
            METHODS[name]
            .weigh(*(torch.from_numpy(values[None]) for values in (activations, gradients)), None, variant=variant)
            .sum(1)[0],
            weighted_sum(weights, activations),
        )


@states("smoothgradcam_plus_plus")
def case_of_smoothgradcam_plus_plus(name):
    method, activations = METHODS[name], feature_maps()[0]
    copies = generator(1).normal(size=(7, CHANNELS, HEIGHT, WIDTH))  # the gradients at seven noisy copies
    terms = method.weigh(None, torch.from_numpy(copies), None, **parameters(METHODS, name))
    weights = plus_plus_weights(copies.mean(0), (copies**2).mean(0), (copies**3).mean(0), activations)
    assert_close(
        method.finish(terms.mean(0), features=torch.from_numpy(activations)), weighted_sum(weights, activations)
    )


@states("shapleycam")
def case_of_shapleycam(name):
    activations, gradients = feature_maps()
    size = activations.size
    hessian = generator(1).normal(size=(size, size))
    curvature = (hessian @ activations.ravel()).reshape(activations.shape)
    alpha = [(gradient - bend / 2).mean() for gradient, bend in zip(gradients, curvature, strict=True)]
    batch = torch.from_numpy(np.stack([curvature, curvature[::-1]]))
    assert_close(cam(name, activations, gradients, curvature=batch), weighted_sum(alpha, activations))


@states("fem")
def case_of_fem(name):
    activations, gradients = feature_maps()
    k = parameters(METHODS, name)["k"]
    activations[:, 1, 1] = 9
    weights = [
        np.count_nonzero(feature_map > feature_map.mean() + k * feature_map.std()) / (HEIGHT * WIDTH)
        for feature_map in activations
    ]
    assert any(weights)
    assert_close(cam(name, activations, gradients), weighted_sum(weights, activations), 1e-6)  # shares are float32


def projection(terms):
    """(T − T̄) v, of either sign."""
    matrix = terms.reshape(len(terms), -1).T
    matrix = matrix - matrix.mean(0)
    vector = np.linalg.svd(matrix)[2][0]
    return (matrix @ vector).reshape(terms.shape[1:]), vector


@states("eigencam")
def case_of_eigencam(name):
    activations, gradients = feature_maps()
    expected, vector = projection(activations)
    sign = np.sign(vector @ gradients.sum((1, 2)))
    actual = cam(name, activations, gradients)
    assert_close(actual, sign * expected)
    assert np.corrcoef(actual.ravel(), cam("gradcam", activations, gradients).ravel())[0, 1] > 0


@states("eigengradcam")
def case_of_eigengradcam(name):
    activations, gradients = feature_maps()
    expected, _ = projection(gradients * activations)
    sign = np.sign(np.corrcoef(expected.ravel(), (gradients * activations).sum(0).ravel())[0, 1])
    assert_close(cam(name, activations, gradients), sign * expected)


@states("kpcacam")
def case_of_kpcacam(name):
    activations, gradients = feature_maps()
    rows = activations.reshape(CHANNELS, -1).T
    rows = rows - rows.mean(0)
    gamma, count = 1 / CHANNELS, len(rows)
    kernels = {
        "sigmoid": lambda x, y: np.tanh(gamma * x @ y + 1),
        "rbf": lambda x, y: np.exp(-gamma * ((x - y) ** 2).sum()),
        "poly": lambda x, y: (gamma * x @ y + 1) ** 3,
        "cosine": lambda x, y: x @ y / np.linalg.norm(x) / np.linalg.norm(y),
        "linear": lambda x, y: x @ y,
    }
    centre = np.eye(count) - 1 / count
    batch = [torch.from_numpy(values[None]) for values in (activations, gradients)]
    grad_cam = cam("gradcam", activations, gradients).ravel()
    for kernel, function in kernels.items():
        values, vectors = np.linalg.eigh(centre @ [[function(x, y) for y in rows] for x in rows] @ centre)
        expected = np.sqrt(values[-1]) * vectors[:, -1]
        expected *= np.sign(np.corrcoef(expected, grad_cam)[0, 1])
        assert_close(METHODS[name].weigh(*batch, None, kernel=kernel)[0].ravel(), expected, 1e-8)
    assert_close(METHODS[name].weigh(*batch, None, kernel="linear")[0], cam("eigencam", activations, gradients), 1e-8)


# ---------------------------------------------------------------------------------------- gradients at the input


CUBIC = generator(7).normal(size=IMAGE)


def score(image):
    """S(x) = Σ a x³: a score whose gradient has a primitive."""
    return (CUBIC * np.asarray(image) ** 3).sum()


def gradient(image):
    return 3 * CUBIC * np.asarray(image) ** 2


def normal_image(seed=3):
    return generator(seed).normal(size=IMAGE)


def saliency(name, image, **chosen):
    """The map of a method, and the copies of the image that it makes."""
    method, options = METHODS[name], parameters(METHODS, name, **chosen)
    tensor = torch.from_numpy(image)
    copies = [method.copy(tensor, index, **options) for index in range(method.count(**options))]
    terms = torch.stack(
        [
            method.term(tensor, copy, torch.from_numpy(gradient(copy)), index, **options)
            for index, copy in enumerate(copies)
        ]
    )
    mean = torch.stack([terms.mean(0), terms.square().mean(0)]) if method.squares else terms.mean(0)
    extra = {"gained": score(image) - score(copies[method.baseline(**options)])} if method.baseline else {}
    return method.finish(mean, tensor, **options, **extra).numpy(), np.stack([copy.numpy() for copy in copies])


@states("saliency")
def case_of_saliency(name):
    image = normal_image()
    assert_close(saliency(name, image)[0], np.abs(gradient(image)).max(0))


@states("input_x_gradient")
def case_of_input_x_gradient(name):
    image = normal_image()
    assert_close(saliency(name, image)[0], (image * gradient(image)).sum(0))


@states("smoothgrad", "squaregrad", "vargrad")
def case_of_noisy_copies(name):
    image = normal_image()
    actual, copies = saliency(name, image, samples=32, noise=0.3)
    standard = (copies - image) / (0.3 * (image.max() - image.min()))
    assert stats.kstest(standard.ravel(), "norm").pvalue > 0.01
    gradients = gradient(copies)
    expected = {
        "smoothgrad": np.abs(gradients.mean(0)).max(0),
        "squaregrad": (gradients**2).mean(0).max(0),
        "vargrad": ((gradients**2).mean(0) - gradients.mean(0) ** 2).max(0),
    }
    assert_close(actual, expected[name])


def baseline(name, image):
    if name == "zero":
        return np.zeros_like(image)
    if name == "mean":
        return np.broadcast_to(image.mean((1, 2), keepdims=True), image.shape)
    sigma = min(image.shape[1:]) / 20
    return np.stack([ndimage.gaussian_filter(each, sigma, mode="mirror", radius=round(3 * sigma)) for each in image])


@states("integrated_gradients")
def case_of_integrated_gradients(name, start="mean"):
    image = normal_image()
    base = baseline(start, image)
    delta = image - base
    integral = delta * CUBIC * (image**3 - base**3) / delta  # of 3 a (x' + α δ)² over α
    options = {"steps": 12, "baseline": start}
    exact = saliency(name, image, quadrature="gauss-legendre", **options)[0]
    assert_close(exact, integral.sum(0))
    assert_close(exact.sum(), score(image) - score(base))

    t = (np.arange(12) + 0.5) / 12
    at_points = np.stack([(delta * gradient(base + alpha * delta)).sum(0) for alpha in t**3])  # m
    cubic = np.tensordot(3 * t**2 / 12, at_points, 1)  # dα = 3 t² dt
    assert_close(saliency(name, image, quadrature="cubic", **options)[0], cubic)

    weights = 3 * t**2 / (3 * t**2).sum()
    total, slopes = np.tensordot(weights, at_points, 1), at_points.sum((1, 2))
    mean_slope = weights @ slopes
    covariance = np.tensordot(weights * (slopes - mean_slope), at_points - total, 1)
    variance = weights @ (slopes - mean_slope) ** 2
    matched = total + (score(image) - score(base) - total.sum()) * covariance / variance
    actual = saliency(name, image, quadrature="matched", **options)[0]
    assert_close(actual, matched)
    assert_close(actual.sum(), score(image) - score(base))


@states("gradient_shap")
def case_of_gradient_shap(name):
    image = normal_image()
    actual, copies = saliency(name, image, samples=40)
    expected, positions, starts = 0, [], []
    for copy in copies:
        for start in ("zero", "mean", "blur"):
            alphas = (copy - baseline(start, image)) / (image - baseline(start, image))
            if np.ptp(alphas) < 1e-5:
                expected += (image - baseline(start, image)) * gradient(copy) / len(copies)
                positions.append(alphas.mean())
                starts.append(start)
    assert len(positions) == len(copies)
    assert set(starts) == {"zero", "mean", "blur"}
    assert stats.kstest(positions, "uniform").pvalue > 0.01
    assert_close(actual, expected.sum(0))


@states("gradient_shap")
def case_of_gradient_shaps_noise(name):
    image = normal_image()
    _, copies = saliency(name, image, samples=200, noise=0.5, baseline="zero")
    ends = (copies / copies[:, :1, :1, :1]).std(0)  # a copy is α (x + noise): without noise its ratios are the image's
    assert (ends.ravel()[1:] > 0).all()
    _, still = saliency(name, image, samples=5, noise=0.0, baseline="zero")
    assert_close(still / still[:, :1, :1, :1], np.broadcast_to(image / image[0, 0, 0], still.shape))


@states("fullgrad")
def case_of_fullgrad(name):
    terms = generator().normal(size=(1, CHANNELS, HEIGHT, WIDTH))
    strength = np.abs(terms[0])
    scaled = (strength - strength.min()) / (strength.max() - strength.min())
    resized = torch.nn.functional.interpolate(
        torch.from_numpy(scaled)[None], IMAGE[1:], mode="bilinear", align_corners=True
    )
    assert_close(METHODS[name].spread(torch.from_numpy(terms), size=IMAGE[1:])[0], resized[0].sum(0))


# ---------------------------------------------------------------------------------------- scores of edited images


TARGETS = generator(11).normal(size=(2, *IMAGE)).astype(np.float32)


def scores_of(image):
    """Two scores of an image that are not linear in it."""
    return np.array([(weights * image).sum() / 10 + np.tanh(image * weights).mean() for weights in TARGETS])


def scene(name):
    image = generator(5).normal(size=IMAGE).astype(np.float32)
    activations = generator(6).normal(size=(CHANNELS, HEIGHT, WIDTH)).astype(np.float32)
    activations[1] = 2.0  # constant: it gets no weight
    return Scene(image, scores_of(image).astype(np.float32), activations if METHODS[name].layered else None)


def perturbed(name, given, answer, **chosen):
    """The maps [T,h,w] of a perturbation method, and the edits that it asks for; `answer` scores an edit."""
    exploration = METHODS[name].explore(given, **parameters(METHODS, name, **chosen))
    edits, scores = [], None
    while True:
        try:
            wanted = exploration.send(scores)
        except StopIteration as stop:
            return stop.value, edits
        edits += wanted
        scores = np.stack([answer(edit) for edit in wanted]).astype(np.float32)


def masked(given):
    return lambda edit: scores_of(given.image * edit.keep)


@states("occlusion")
def case_of_occlusion(name):
    given = scene(name)
    _, height, width = IMAGE
    drops = [[[[] for _ in range(width)] for _ in range(height)] for _ in given.scores]
    for top in range(0, height, 4):
        for left in range(0, width, 4):
            if top - 4 + 7 >= height or left - 4 + 7 >= width:
                continue  # the window before reaches the edge already
            hidden = given.image.copy()
            hidden[:, top : top + 7, left : left + 7] = 0
            for target, drop in enumerate(given.scores - scores_of(hidden)):
                for y in range(top, min(top + 7, height)):
                    for x in range(left, min(left + 7, width)):
                        drops[target][y][x].append(drop)
    expected = [[[np.mean(cell) for cell in row] for row in target] for target in drops]
    assert_close(perturbed(name, given, masked(given), window=7, stride=4)[0], expected, 1e-5)


@states("rise")
def case_of_rise(name):
    given = scene(name)
    options = {"samples": 300, "cells": 4, "probability": 0.3}
    actual, edits = perturbed(name, given, masked(given), **options)
    masks = np.stack([edit.keep for edit in edits]).astype(np.float64)
    assert masks.min() == 0
    assert masks.max() == pytest.approx(1)
    assert abs(masks.mean() - 0.3) < 0.03
    scores = np.stack([scores_of(given.image * mask) for mask in masks])
    sums = np.stack([np.tensordot(each, masks, 1) for each in scores.T])
    mean = scores.mean(0)[:, None, None]
    assert_close(actual, sums / masks.sum(0) - mean, 1e-5)
    paper, _ = perturbed(name, given, masked(given), divisor="expected", **options)
    assert_close(paper, sums / (300 * 0.3), 1e-5)


def boxes_similarity(one, other):
    """Intersection over union of two boxes, by counting the cells of a fine grid."""
    grid = np.arange(0, 40, 0.05) + 0.025
    one, other = (
        ((grid >= top) & (grid < bottom))[:, None] & ((grid >= left) & (grid < right))
        for left, top, right, bottom in (one, other)
    )
    return (one & other).sum() / (one | other).sum()


@states("drise")
def case_of_drise(name):
    """Objects of two classes move and change with the image; the vectors of classes are written out."""
    given = scene(name)
    targets = [(1, (4.0, 2.0, 12.0, 10.0)), (0, (10.0, 5.0, 22.0, 18.0))]

    def objects(image):
        shift = np.round(np.abs(image[:, ::5, ::6]).mean((1, 2)) * 10) / 2
        return np.array(
            [
                (1, 0.9 * np.exp(-shift[0]), 4 + shift[0], 2, 12, 10 - shift[1] / 2),
                (1, 0.3, 4, 2 + shift[1], 12.5, 10.5 + shift[1]),
                (0, 0.8 / (1 + shift[2]), 10, 5, 22 - shift[2], 18),
                (2, 1.0, 4, 2, 12, 10),  # of neither class
            ],
            np.float32,
        )

    def weights(image, index, box):
        one_hot = np.eye(3)
        cosines = [one_hot[index] @ one_hot[int(found[0])] for found in objects(image)]
        overlaps = [boxes_similarity(box, found[2:]) for found in objects(image)]
        return max(np.array(overlaps) * cosines * objects(image)[:, 1])

    fixed = [DetectionTarget(index, Box(*box), found=True) for index, box in targets]
    options = {"samples": 70, "cells": 4}
    for divisor in ("shown", "expected"):
        actual, edits = perturbed(
            name,
            given,
            lambda edit: [similarity_of_best(objects(given.image * edit.keep), target) for target in fixed],
            divisor=divisor,
            **options,
        )
        masks = np.stack([edit.keep for edit in edits]).astype(np.float64)
        scores = np.array([[weights(given.image * mask, *target) for mask in masks] for target in targets])
        sums = np.tensordot(scores, masks, 1)
        expected = sums / masks.sum(0) - scores.mean(1)[:, None, None] if divisor == "shown" else sums / (70 * 0.5)
        assert np.ptp(scores, 1).min() > 0.02
        assert_close(actual, expected, 2e-3)  # the boxes' corners are rounded to the fine grid


def channel_mask(feature_map):
    """H_k: a feature map resized to the pixels, then scaled to 0..1."""
    resized = cv2.resize(feature_map, IMAGE[:0:-1], interpolation=cv2.INTER_LINEAR)
    return (resized - resized.min()) / (resized.max() - resized.min())


def softmax_map(given, channel_scores, constant=(1,)):
    """Σ_k w_k A_k for scores [K,T], without the constant feature maps."""
    exponentials = np.exp(channel_scores.astype(np.float64))
    exponentials[list(constant)] = 0
    return np.tensordot(exponentials / exponentials.sum(0), given.activations, (0, 0))


@states("scorecam")
def case_of_scorecam(name):
    given = scene(name)
    scores = np.stack(
        [scores_of(given.image * (0 if k == 1 else channel_mask(given.activations[k]))) for k in range(CHANNELS)]
    )
    assert_close(perturbed(name, given, masked(given))[0], softmax_map(given, scores), 1e-4)

    varied = np.sort(np.argsort(-given.activations.std((1, 2)))[:3])
    top = Scene(given.image, given.scores, given.activations[varied])
    assert_close(perturbed(name, given, masked(given), top_channels=3)[0], softmax_map(top, scores[varied], ()), 1e-4)


@states("sscam")
def case_of_sscam(name):
    given = scene(name)
    actual, edits = perturbed(name, given, masked(given), samples=20, noise=0.7)
    masks = np.stack([edit.keep for edit in edits]).reshape(CHANNELS, 20, *IMAGE[1:])
    clean = [np.zeros(IMAGE[1:]) if k == 1 else channel_mask(given.activations[k]) for k in range(CHANNELS)]
    noise = np.delete((masks - np.stack(clean)[:, None]) / 0.7, 1, 0)  # the constant feature map has no H_k
    assert stats.kstest(noise.ravel(), "norm").pvalue > 0.01
    scores = np.stack([np.mean([scores_of(given.image * mask) for mask in ours], 0) for ours in masks])
    assert_close(actual, softmax_map(given, scores), 1e-4)


@states("iscam")
def case_of_iscam(name):
    given = scene(name)
    clean = [np.zeros(IMAGE[1:]) if k == 1 else channel_mask(given.activations[k]) for k in range(CHANNELS)]
    scores = np.stack([np.mean([scores_of(given.image * mask * i / 5) for i in range(1, 6)], 0) for mask in clean])
    assert_close(perturbed(name, given, masked(given), samples=5)[0], softmax_map(given, scores), 1e-4)


@states("ablationcam")
def case_of_ablationcam(name):
    given = scene(name)
    without = generator(8).normal(size=(CHANNELS, 2)).astype(np.float32)  # S_k
    assert given.scores.min() < 0 or given.scores.max() > 0
    weights = (given.scores - without) / np.abs(given.scores)
    actual, _ = perturbed(name, given, lambda edit: without[edit.silenced])
    assert_close(actual, np.tensordot(weights, given.activations, (0, 0)), 1e-5)


def cells_of(edit, cells):
    rows, columns = ([round((cell + 0.5) * side / cells) for cell in range(cells)] for side in IMAGE[1:])
    return edit.keep[np.ix_(rows, columns)].ravel()


@states("kernel_shap")
def case_of_kernel_shap(name):
    given, values = scene(name), generator(9).normal(size=(2, 9))
    given.scores[:] = values.sum(1) + 4
    actual, edits = perturbed(name, given, lambda edit: values @ cells_of(edit, 3) + 4, cells=3)
    assert len(edits) == 256
    expected = np.stack([np.kron(value.reshape(3, 3), np.ones((8, 8))) for value in values])
    centres = [3, 10, 16], [4, 12, 20]
    assert_close(
        actual[:, centres[0]][:, :, centres[1]], expected[:, 4::8, 4::8], 1e-3
    )  # a linear score is its own fit


@states("lime")
def case_of_lime(name):
    given = scene(name)
    actual, edits = perturbed(name, given, masked(given), cells=3)
    shown = np.stack([cells_of(edit, 3) for edit in edits]).astype(np.float64)
    assert abs(shown.mean() - 0.5) < 0.03
    cosine = shown.sum(1) / (np.linalg.norm(shown, axis=1).clip(1e-8) * 3)
    weights = np.exp(-((1 - cosine) ** 2) / 2)
    centres = [3, 10, 16], [4, 12, 20]
    for target, heatmap in enumerate(actual):
        scores = [scores_of(given.image * edit.keep)[target] for edit in edits]
        expected = Lasso(alpha=0.01).fit(shown, scores, sample_weight=weights).coef_.reshape(3, 3)
        assert_close(heatmap[np.ix_(*centres)], expected, 1e-3)


# ---------------------------------------------------------------------------------------- attention


BLOCKS, HEADS, TOKENS = 3, 2, 7


def attention():
    """Attention [L,heads,N,N], whose rows add up to 1, and gradients of both signs."""
    logits, gradients = generator().normal(size=(2, BLOCKS, HEADS, TOKENS, TOKENS))
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True), gradients


def combined(name, values, gradients, prefix, **chosen):
    tensors = (torch.from_numpy(each[:, None]) for each in (values, gradients))
    return METHODS[name].combine(*tensors, prefix, **parameters(METHODS, name, **chosen))[0]


def product(blocks):
    """R = Ã_L … Ã_1 for (A + I) with each row divided by its sum, without the residual connections' own diagonal."""
    relevance, diagonal = np.eye(TOKENS), np.eye(TOKENS)
    for block in blocks:
        row_sums = (block + np.eye(TOKENS)).sum(1, keepdims=True)
        relevance, diagonal = (block + np.eye(TOKENS)) / row_sums @ relevance, np.eye(TOKENS) / row_sums @ diagonal
    return relevance - diagonal


def lowest_dropped(block, share):
    dropped = block.copy()
    dropped[block < np.sort(block, axis=None)[int(block.size * share)]] = 0
    return dropped


@states("attention_rollout")
def case_of_attention_rollout(name):
    values, gradients = attention()
    for heads, fuse in (("mean", np.mean), ("max", np.max), ("min", np.min)):
        relevance = product([fuse(block, axis=0) for block in values])
        assert_close(combined(name, values, gradients, 0, heads=heads), relevance.mean(0))
    relevance = product([lowest_dropped(block.mean(0), 0.4) for block in values])
    gradients[-1, :, 2:] = 0  # the score depends on the class and the distillation token
    assert_close(combined(name, values, gradients, 2, discard=0.4), relevance[:2].mean(0)[2:])
    gradients[-1, :, 1:] = 0  # on the class token alone
    assert_close(combined(name, values, gradients, 2, discard=0.4), relevance[0, 2:])


@states("gradient_rollout")
def case_of_gradient_rollout(name):
    values, gradients = attention()
    gradients[-1, :, 1:] = 0
    weighted = [np.maximum((block * slope).mean(0), 0) for block, slope in zip(values, gradients, strict=True)]
    relevance = product([lowest_dropped(block, 0.6) for block in weighted])
    assert_close(combined(name, values, gradients, 1, discard=0.6), relevance[0, 1:])


@states("chefer")
def case_of_chefer(name):
    values, gradients = attention()
    gradients[-1, :, 1:] = 0
    relevance = np.eye(TOKENS)
    for block, slope in zip(values, gradients, strict=True):
        relevance = relevance + np.maximum(slope * block, 0).mean(0) @ relevance
    assert_close(combined(name, values, gradients, 1), relevance[0, 1:])


@states("legrad")
def case_of_legrad(name):
    values, gradients = attention()
    for blocks in (0, 2):
        used = gradients[-blocks:] if blocks else gradients
        expected = sum(np.maximum(slope, 0).sum(1).mean(0) / TOKENS for slope in used)
        assert_close(combined(name, values, gradients, 1, blocks=blocks), expected[1:])


@states("gradeclip")
def case_of_gradeclip(name):
    """Two heads of three channels, a class token and a token that the score does not depend on, and five patches."""
    queries, keys, values, gradients = generator().normal(size=(4, 2, 7, 3))
    gradients[:, 1:] = 0
    tensors = (torch.from_numpy(each[None]) for each in (queries, keys, values, gradients))
    q, k, v, g = (np.concatenate(list(each), 1) for each in (queries, keys, values, gradients))
    cosines = np.array([q[0] @ key / np.linalg.norm(q[0]) / np.linalg.norm(key) for key in k[2:]])
    share = (cosines - cosines.min()) / (cosines.max() - cosines.min())
    found = METHODS[name].combine(*tensors, 2)[0]
    assert_close(found, np.maximum(share * (v[2:] @ g[0]), 0))
    assert (found > 0).any()


# ---------------------------------------------------------------------------------------- combined maps, baselines


def scaled(heatmap):
    cut = np.maximum(heatmap, 0)
    return (cut - cut.min()) / (cut.max() - cut.min())


@states("refinecam", "fusion")
def case_of_fusion(_name):
    maps = [generator(seed).normal(size=size).astype(np.float32) + 1 for seed, size in enumerate([(3, 4), (6, 8)])]
    maps[0] += 2  # positive everywhere: its minimum is not zero
    layers = [LayerMaps(str(each.shape), [RawMap(each)]) for each in maps]
    resized = np.stack([cv2.resize(scaled(each), (8, 6), interpolation=cv2.INTER_LINEAR) for each in maps])
    for how, combine in (("mean", np.mean), ("max", np.max), ("product", np.prod)):
        assert_close(fuse_layers(layers, how).maps[0].heatmap, combine(resized, axis=0), 1e-5)
    assert METHODS["refinecam"].how == "product"


@states("sess")
def case_of_sess(name):
    height, width = IMAGE[1:]
    views = [View(), View(scale=1 + 4 / 7, top=9, left=3), View(scale=1 + 2 / 7, top=0, left=7)]
    assert {view.scale for view in METHODS[name].views(height=height, width=width, scales=3)} == {
        view.scale for view in views
    }
    maps = generator().normal(size=(3, HEIGHT, WIDTH)).astype(np.float32)
    chances = np.array([0.2, 0.8, 0.4], np.float32)
    weighted = []
    for heatmap, chance, view in zip(maps, chances, views, strict=True):
        window = cv2.resize(np.maximum(heatmap, 0), (width, height), interpolation=cv2.INTER_LINEAR)
        canvas = np.zeros((round(height * view.scale), round(width * view.scale)), np.float32)
        canvas[view.top : view.top + height, view.left : view.left + width] = scaled(window)
        weighted.append(chance / chances.max() * cv2.resize(canvas, (width, height), interpolation=cv2.INTER_LINEAR))
    count = (np.stack(weighted) > 0).sum(0)
    mean = np.divide(np.sum(weighted, 0), count, out=np.zeros(IMAGE[1:], np.float32), where=count > 0)
    expected = ndimage.gaussian_filter(mean, 5, mode="mirror", radius=5)
    actual = METHODS[name].merge(maps, chances, views, height=height, width=width, **parameters(METHODS, name))
    assert_close(actual, expected, 1e-5)


@states("random")
def case_of_random(name):
    actual = METHODS[name].draw(np.zeros((3, 60, 60), np.float32), seed=4)
    assert actual.shape == (60, 60)
    assert stats.kstest(actual.ravel(), "uniform").pvalue > 0.01


@states("edges")
def case_of_edges(name):
    image = generator().normal(size=IMAGE).astype(np.float32)
    grey = image.mean(0)
    expected = np.hypot(*(ndimage.sobel(grey, axis, mode="mirror") for axis in (0, 1)))
    assert_close(METHODS[name].draw(image), expected, 1e-5)


# ---------------------------------------------------------------------------------------- metrics


SEEN = Box(10, 20, 10 + 4 * IMAGE[2], 20 + 4 * IMAGE[1])
PROBABILITY = 0.6


def metric_input(box=None):
    image = generator(1).normal(size=IMAGE).astype(np.float32)
    heatmap = generator(2).normal(size=(HEIGHT, WIDTH)).astype(np.float32)
    return make_metric_input(image, heatmap, PROBABILITY, SEEN, box)


def resized_to_pixels(heatmap):
    return cv2.resize(heatmap, IMAGE[:0:-1], interpolation=cv2.INTER_LINEAR)


def probability(image):
    return 1 / (1 + np.exp(-(TARGETS[0] * image).sum() / 20))


def evaluated(name, given, **chosen):
    """The reading of a perturbation metric, and the edits that it asks for."""
    judging = METRICS[name].judge(given, **parameters(METRICS, name, **chosen))
    edits, answers = [], None
    while True:
        try:
            wanted = judging.send(answers)
        except StopIteration as stop:
            return stop.value, edits
        edits += wanted
        answers = np.array([probability(edited(given.image, edit)) for edit in wanted], np.float32)


def edited(image, edit):
    keep = np.ones(image.shape[1:]) if edit.keep is None else edit.keep
    keep = np.zeros_like(keep) if edit.keep is None and edit.fill is not None else keep
    return image * keep + (1 - keep) * (0 if edit.fill is None else edit.fill)


def pixel_order(given):
    """The pixels from the hottest down; of equal ones, such as those of an edge, the first comes first."""
    assert_close(given.pixels, resized_to_pixels(given.heatmap), 1e-5)
    return np.argsort(-given.pixels, axis=None, kind="stable")


@states("deletion", "insertion")
def case_of_pixel_curves(name):
    given = metric_input()
    order = pixel_order(given)
    tap = np.zeros(11)
    for offset in range(-20, 21):
        place = (5 + offset) % 22
        tap[min(place, 21 - place)] += np.exp(-(offset**2) / 50)  # tails are mirrored into the kernel
    kernel = np.outer(tap, tap) / tap.sum() ** 2
    blurred = np.stack([ndimage.convolve(each, kernel, mode="constant") for each in given.image])
    start, end = (given.image, 0 * given.image) if name == "deletion" else (blurred, given.image)
    curve = []
    for step in range(9):
        changed = start.copy().reshape(3, -1)
        chosen = order[: step * order.size // 8]
        changed[:, chosen] = end.reshape(3, -1)[:, chosen]
        curve.append(probability(changed.reshape(IMAGE)))
    curve[0 if name == "deletion" else -1] = PROBABILITY
    reading, _ = evaluated(name, given, steps=8)
    assert_close(reading.value, np.trapezoid(curve, dx=1 / 8), 1e-5)


@states("road")
def case_of_road(name):
    given = metric_input()
    order = pixel_order(given)
    means = []
    for hottest_first in (True, False):
        chances = []
        for share in (0.25, 0.5, 0.75):
            count = round(share * order.size)
            gone = np.zeros(order.size, bool)
            gone[order[:count] if hottest_first else order[-count:]] = True
            chances.append(probability(imputed(given.image, gone.reshape(IMAGE[1:]))))
        means.append(np.mean(chances))
    assert_close(evaluated(name, given, steps=3, noise=0.0)[0].value, (means[1] - means[0]) / 2, 1e-4)


def imputed(image, gone):
    """Each pixel that is gone as the weighted mean of its neighbours, by a dense system of equations."""
    places = {place: number for number, place in enumerate(zip(*np.nonzero(gone), strict=True))}
    matrix, known = np.zeros((len(places), len(places))), np.zeros((len(places), 3))
    for (y, x), row in places.items():
        for down in (-1, 0, 1):
            for across in (-1, 0, 1):
                there = y + down, x + across
                inside = 0 <= there[0] < image.shape[1] and 0 <= there[1] < image.shape[2]
                if (down, across) == (0, 0) or not inside:
                    continue
                weight = 1 / 12 if down and across else 1 / 6
                matrix[row, row] += weight
                if there in places:
                    matrix[row, places[there]] -= weight
                else:
                    known[row] += weight * image[:, *there]
    filled = image.copy()
    filled[:, gone] = np.linalg.solve(matrix, known).T
    return filled


@states("average_drop", "increase")
def case_of_masked_probability(name):
    given = metric_input()
    cut = np.maximum(given.heatmap, 0)
    shown = probability(given.image * resized_to_pixels(cut / cut.max()))
    expected = {"average_drop": max(0, PROBABILITY - shown) / PROBABILITY, "increase": float(shown > PROBABILITY)}
    assert_close(evaluated(name, given)[0].value, expected[name], 1e-5)


@states("max_sensitivity")
def case_of_max_sensitivity(name):
    metric, image = METRICS[name], normal_image().astype(np.float32)
    options = parameters(METRICS, name, samples=4, noise=0.1)
    for variation in metric.vary(image, **options):
        assert_close(variation.view.noise, 0.1 * (image.max() - image.min()), 1e-6)
    heatmap, *others = generator().normal(size=(5, HEIGHT, WIDTH))
    distances = [np.sqrt(((other - heatmap) ** 2).sum() / (heatmap**2).sum()) for other in others]
    compared = [metric.compare(heatmap, other) for other in others]
    assert_close(metric.judge(compared, [0.0] * 4, **options).value, max(distances))


@states("randomisation")
def case_of_randomisation(name):
    metric = METRICS[name]
    options = parameters(METRICS, name)
    heatmap, *others = generator().normal(size=(4, HEIGHT, WIDTH)).round(1)  # with ties
    correlations = [stats.spearmanr(heatmap, other, axis=None).statistic for other in others]
    compared = [metric.compare(heatmap, other) for other in others]
    assert_close(metric.judge(compared, [0.1, 0.5, 1.0], **options).value, np.mean(correlations))
    exponents = [variation.modules for variation in metric.vary(None, **options)]
    steps = np.diff(np.log([100**exponent for exponent in exponents]))
    assert_close(steps, np.full(4, np.log(100) / 4))  # 1, …, 100 modules in geometric steps


@states("pointing_game")
def case_of_the_pointing_game(name):
    row, column = np.unravel_index(metric_input().heatmap.argmax(), (HEIGHT, WIDTH))
    x, y = (column + 0.5) * 4 * IMAGE[2] / WIDTH + 10, (row + 0.5) * 4 * IMAGE[1] / HEIGHT + 20
    for distance, expected in ((-1, 1.0), (14.9, 1.0), (15.1, 0.0)):
        box = Box(x + distance, y - 5, x + distance + 30, y + 5)
        assert METRICS[name].judge(metric_input(box), tolerance=15).value == expected


@states("energy_in_box")
def case_of_the_energy_in_a_box(name):
    box = Box(22, 38, 61, 77)
    positive = np.maximum(resized_to_pixels(metric_input().heatmap), 0)
    inside = sum(
        positive[y, x]
        for y in range(IMAGE[1])
        for x in range(IMAGE[2])
        if box.left <= 10 + 4 * (x + 0.5) <= box.right and box.top <= 20 + 4 * (y + 0.5) <= box.bottom
    )
    assert_close(METRICS[name].judge(metric_input(box)).value, inside / positive.sum(), 1e-5)


@states("sparseness")
def case_of_sparseness(name):
    values = np.abs(resized_to_pixels(metric_input().heatmap)).ravel().astype(np.float64)
    gini = np.abs(values[:, None] - values).mean() / (2 * values.mean())
    assert_close(METRICS[name].judge(metric_input()).value, gini, 1e-5)


@states("complexity")
def case_of_complexity(name):
    values = np.abs(resized_to_pixels(metric_input().heatmap)).ravel()
    assert_close(METRICS[name].judge(metric_input()).value, stats.entropy(values), 1e-5)


# ---------------------------------------------------------------------------------------- the tests


@pytest.mark.parametrize(("name", "case"), [(name, case) for name, cases in CASES.items() for case in cases])
def test_code_computes_the_formula_that_is_stated(name, case):
    case(name)


@pytest.mark.parametrize("start", ["zero", "mean", "blur"])
def test_integrated_gradients_start_at_the_stated_baseline(start):
    case_of_integrated_gradients("integrated_gradients", start)


def test_every_stated_formula_has_a_case():
    sections = dict(re.findall(r"^### (\w+)\n(.*?)(?=^##|\Z)", PAGE, re.MULTILINE | re.DOTALL))
    stated = {name for name, text in sections.items() if re.search(r"^> ", text, re.MULTILINE)}
    stated |= {"fusion"} & set(re.findall(r"`(fusion)`", PAGE))
    stated |= {name for name, metric in METRICS.items() if formula(metric)}
    assert set(sections) == set(METHODS)
    assert stated == set(CASES) | set(TESTED_ELSEWHERE)
    assert not set(CASES) & set(TESTED_ELSEWHERE)
