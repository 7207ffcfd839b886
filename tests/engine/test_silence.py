"""Passes that silence channels of a layer run the modules before it once for each image, if the model allows that."""

from contextlib import ExitStack, contextmanager

import numpy as np
import pytest
import torch
from torch import nn

from camserve_server.core.errors import OutOfMemory
from camserve_server.engine import score
from camserve_server.engine.values import Row
from camserve_server.methods.values import Edit
from camserve_server.targets.values import ClassTarget
from methods.tools import Toy, error_ratio, exact, inputs, noise, plain, run
from support import loaded

SIZE = 64
LAYERS = {
    "timm:test_resnet?weights=none&size=64": ("layer4", "layer3.0.conv2", "layer1"),
    "timm:test_vit?weights=none&size=64": ("blocks.5.norm1", "blocks.4"),
    "windows=engine.test_interventions:channels_last?size=64": ("norm", "features.5.0.attn"),
}
"""Layers by model: at the end and before it, inside a residual block, channels first, channels last and tokens."""


@pytest.fixture(scope="module", params=LAYERS)
def model(request):
    return loaded(request.param)


@pytest.fixture(scope="module")
def layers(model):
    return next(layers for spec, layers in LAYERS.items() if model.info.source in spec)


def edits(image, channels, targets=(1,)):
    """A row for each channel and target; None leaves the layer as it is."""
    each = [Edit(silenced=channel) if channel is not None else None for channel in channels]
    return [Row(image, ClassTarget(target), edit=edit) for edit in each for target in targets]


def scores(model, rows, layer):
    return np.array([result.score for result in run(model, rows, [layer], "score")])


def logits(model, rows, layer):
    return np.stack([result.logits for result in run(model, rows, [layer], "score")])


def by_hand(model, rows, layer):
    """Return the outputs of the whole model for each row, with the channel silenced by a hook of this test."""
    found = []
    for row in rows:
        with model.module.get_submodule(layer).register_forward_hook(silencing(model.info.layers[layer].layout, row)):
            found.append(model.module(inputs(model, row.image))[0].numpy())
    return np.stack(found)


def silencing(layout, row):
    def hook(_module, _args, output):
        first, *rest = output if isinstance(output, tuple) else (output,)
        changed = first.clone()
        if row.edit:
            channels_first = {"nchw": (0, 1, 2), "nhwc": (2, 0, 1), "tokens": (1, 0)}[layout.axes]
            changed[0, layout.prefix :].permute(channels_first)[row.edit.silenced] = 0
        return (changed, *rest) if isinstance(output, tuple) else changed

    return hook


@contextmanager
def counted(module):
    """Yield the number of images of each call, by module, in the order of the calls."""
    calls = {}

    def hook(name):
        return lambda _module, _args, output: calls.setdefault(name, []).append(
            len(output) if isinstance(output, torch.Tensor) else None
        )

    with ExitStack() as stack:
        for name, child in module.named_modules():
            stack.enter_context(child.register_forward_hook(hook(name)))
        yield calls


def test_outputs_with_silenced_channels_are_as_exact_as_plain_float32(model, layers):
    rows = [*edits(noise(0, SIZE), (0, None, 5)), *edits(noise(1, SIZE), (7, 2), (1, 3))]
    for layer in layers:
        float32, truth = by_hand(plain(model), rows, layer), by_hand(exact(model), rows, layer)
        assert error_ratio(logits(model, rows, layer), float32, truth) <= 1, layer
        assert model.runs_versions[layer]


def test_modules_before_the_layer_run_once_for_the_edits_of_an_image(resnet):
    model = tried(plain(resnet), "layer3")
    with counted(model.module) as calls:
        scores(model, edits(noise(0, SIZE), range(16), (1, 2, 3)), "layer3")

    assert calls["layer2"] == [1]
    assert calls["layer4"] == [16]
    assert calls["fc"] == [16]


def test_each_image_of_a_batch_runs_once(resnet):
    model, other = tried(plain(resnet), "layer4"), noise(1, SIZE)
    rows = edits(noise(0, SIZE), range(5)) + edits(other, range(3)) + edits(other, range(3, 5))
    with counted(model.module) as calls:
        scores(model, rows, "layer4")

    assert calls["layer3"] == [1, 1]
    assert calls["fc"] == [5, 5]


def tried(model, layer):
    """Run one row, so that the layer's trial is over."""
    scores(model, edits(noise(0, SIZE), (0,)), layer)
    assert model.runs_versions[layer]
    return model


def joined(net, seen):
    """Concatenate the layer's output and its input."""
    return torch.cat([net.layer(seen), seen], 1)[:, 2:6]


def averaged(net, seen):
    """Mix the images of a batch."""
    result = net.layer(seen)
    return result + result.mean(0, keepdim=True)


def repeated(net, seen):
    """Call the layer twice."""
    return net.layer(net.layer(seen) + seen)


def unused(net, seen):
    """Ignore the layer's output."""
    net.layer(seen)
    return seen


@pytest.mark.parametrize("middle", [joined, averaged, repeated, unused])
def test_layer_runs_with_the_whole_model_if_what_follows_needs_more(plant, middle):
    """Each of these models would give other scores, or fail, if only what follows the layer ran again."""
    model = plain(plant(lambda: Toy(middle) if middle is not unused else Toy()))
    model.module.middle = middle
    rows = [*edits(noise(0, 16), (0, 1, None)), *edits(noise(1, 16), (2,))]
    with counted(model.module) as calls:
        alone = [scores(model, [row], "layer")[0] for row in rows]
        del calls["conv"][:]
        together = scores(model, rows, "layer")

    assert model.runs_versions == {"layer": False}
    assert calls["conv"] == [4]
    if middle is not averaged:  # it mixes the rows of any batch
        np.testing.assert_allclose(together, alone, rtol=1e-4)


def test_trial_that_runs_out_of_memory_is_not_a_verdict(plant, monkeypatch):
    def full(*_args):
        raise torch.OutOfMemoryError

    model = plant(Toy)
    monkeypatch.setattr(score, "output_of", full)
    with pytest.raises(OutOfMemory):
        scores(model, edits(noise(0, 16), (0,)), "layer")

    assert model.runs_versions == {}


def test_batch_runs_whole_images_in_the_memory_of_as_many_edits(plant):
    """The convolution's output is four times as large as the layer's, so that a batch has four edits for each image."""

    def pooled(net, seen):
        return repeated(net, nn.functional.max_pool2d(seen, 2))

    model = plain(plant(lambda: Toy(pooled)))
    assert model.info.rows_after()["layer"] == 4
    with counted(model.module) as calls:
        scores(model, edits(noise(0, 16), (0, 1, 2, 3, None)), "layer")

    assert model.runs_versions == {"layer": False}
    assert max(calls["conv"]) == 1
