"""Many targets of an image are differentiated together, if only a small head follows the layer."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
from torch import nn

from camserve_server import models
from camserve_server.engine import joined
from camserve_server.engine.values import Row
from camserve_server.targets.values import (
    ClassTarget,
    ContrastTarget,
    FinerTarget,
    ProbabilityTarget,
    RankTarget,
    SimilarityTarget,
)
from methods.tools import CAMS, call, error_ratio, exact, gap, noise, plain, run

SIZE, MANY = 64, 10
SPECS = (
    "timm:test_resnet?weights=none&size=64",
    pytest.param("narrow=methods.narrow:mobilenet_v3_small?size=64", marks=pytest.mark.slow),
    "timm:test_convnext2?weights=none&size=64",
)


@pytest.fixture(scope="module", params=SPECS)
def model(request):
    return models.load(models.parse(request.param))


def asking(targets, image=0, of=1):
    """A row for each target; `of` is the number of targets of the request."""
    return [Row(noise(image, SIZE), target, tuple(map(call, CAMS)), targets=of) for target in targets]


def classes(count, first=0):
    return [ClassTarget(index) for index in range(first, first + count)]


def maps(model, rows, layers=None):
    """Return the maps of every row on the first layer, [rows,methods,h,w]."""
    return np.stack([result.maps[0] for result in run(model, share_images(rows), layers or [model.info.default_layer])])


def share_images(rows):
    """Let rows of equal images hold the same array, as those of one request do."""
    images = {}
    return [replace(row, image=images.setdefault(row.image.tobytes(), row.image)) for row in rows]


def alone(model, rows):
    """Return the maps of every row in a batch of its own."""
    return np.concatenate([maps(model, [row]) for row in rows])


@contextmanager
def backward_passes(model):
    """Yield a list that gets an item for every backward pass through the last linear layer of a model."""
    passes = []

    def hook(_module, _args, output):
        if output.requires_grad:
            output.grad_fn.register_prehook(lambda gradients: passes.append(gradients[0].shape))

    run_by = (model.accelerated or model).module
    linear = [module for module in run_by.modules() if isinstance(module, nn.Linear)][-1]
    with linear.register_forward_hook(hook):
        yield passes


def test_maps_of_many_targets_are_as_exact_as_plain_float32(model):
    rows = asking(classes(MANY))
    found, float32, truth = maps(model, rows), alone(plain(model), rows), alone(exact(model), rows)
    for method in range(len(CAMS)):
        assert error_ratio(found[:, method], float32[:, method], truth[:, method]) <= 1, CAMS[method]


def test_planted_fault_in_joined_gradients_is_detected(model, monkeypatch):
    """The planted fault gives each target the gradient of the next one."""
    real = joined._gradients
    monkeypatch.setattr(joined, "_gradients", lambda *args: real(*args).roll(1, 0))
    rows = asking(classes(MANY))
    assert gap(maps(model, rows), alone(exact(model), rows)) > 0.1


def test_eight_targets_share_a_backward_pass(model):
    with backward_passes(model) as passes:
        maps(model, asking(classes(MANY)))
    assert len(passes) == 2


def test_few_targets_and_several_layers_are_differentiated_one_by_one(resnet):
    with backward_passes(resnet) as passes:
        maps(resnet, asking(classes(joined.MIN_TARGETS - 1)))
    assert len(passes) == joined.MIN_TARGETS - 1
    with backward_passes(plain(resnet)) as passes:
        maps(plain(resnet), asking(classes(MANY)), ["layer3", "layer4"])
    assert len(passes) == MANY


@pytest.mark.parametrize("name", ["layer3", "layer4.1.conv1"])
def test_many_targets_at_layers_before_the_head_are_differentiated_one_by_one(resnet, name):
    with backward_passes(plain(resnet)) as passes:
        maps(plain(resnet), asking(classes(MANY)), [name])
    assert len(passes) == MANY


def test_head_with_hooks_of_its_own_is_differentiated_target_by_target(resnet):
    seen = []
    with resnet.accelerated.module.fc.register_full_backward_hook(lambda *_: seen.append(1)):
        maps(resnet, asking(classes(MANY)))
    assert len(seen) == MANY


def test_map_does_not_depend_on_the_targets_that_share_its_batch(model):
    """A scheduler may divide the rows of a request differently each time."""
    rows = asking(classes(MANY), of=MANY)
    whole = maps(model, rows)
    for parts in ([rows[:3], rows[3:]], [rows[:9], rows[9:]], [rows[::-1]]):
        divided = np.concatenate([maps(model, part) for part in parts])
        np.testing.assert_array_equal(divided, whole[::-1] if len(parts) == 1 else whole)


def test_images_with_different_numbers_of_targets_share_a_batch(model):
    rows = asking(classes(3, first=20), image=1) + asking(classes(MANY)) + asking(classes(1, first=40), image=2)
    with backward_passes(model) as passes:
        found = maps(model, rows)
    assert len(passes) == 5  # two rows of the first image at a time
    assert error_ratio(found, alone(plain(model), rows), alone(exact(model), rows)) <= 1


def test_joined_targets_of_every_kind_equal_each_alone(resnet):
    reference = np.random.default_rng(0).normal(size=512).astype(np.float32)
    kinds = [
        RankTarget(0),
        RankTarget(4),
        ClassTarget(7),
        ContrastTarget(1, 2),
        FinerTarget(3),
        ProbabilityTarget(5),
        SimilarityTarget(reference=reference),
    ]
    model, rows = plain(resnet), asking(kinds)
    with backward_passes(model) as passes:
        together = run(model, share_images(rows), ["layer4"])
    assert len(passes) == 1
    for row, found in zip(rows, together, strict=True):
        (single,) = run(model, [row], ["layer4"])
        assert found.target == single.target or isinstance(row.target, SimilarityTarget)
        assert found.score == pytest.approx(single.score, rel=1e-5)
        assert found.zero_gradient == single.zero_gradient == (False,)
        (truth,) = run(exact(resnet), [row], ["layer4"])
        for one, other, true in zip(found.maps[0], single.maps[0], truth.maps[0], strict=True):
            assert error_ratio(one, other, true) <= 1, row.target
