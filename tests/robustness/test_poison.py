"""One row that brings its batch down, or itself: its seven neighbours are answered as if it had not been there."""

import gc
import io
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

import camserve
from camserve_server.errors import OutOfMemory
from robustness import hygiene, tree
from support import give_back_memory, serving

NETS = '''
from collections import OrderedDict

import torch
from torch import nn

ROOM = 64  # MB that are taken before memory runs out


class Poisoned(nn.Sequential):
    """Does what an image is coloured for: one colour fills it."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(OrderedDict(
            stem=nn.Conv2d(3, 8, 3, 2, 1), act=nn.ReLU(inplace=True), features=nn.Conv2d(8, 16, 3, 2, 1),
            norm=nn.BatchNorm2d(16), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(16, 5),
        ))
        self.act.register_forward_hook(self.hook)

    def forward(self, x):
        red, green, blue = (x.amin((2, 3)) > 1.5).unbind(1)
        self.raises = bool((green & ~red & ~blue).any())
        if (red & ~green & ~blue).any():
            held = torch.ones(ROOM * 2**18)
            raise torch.OutOfMemoryError(f"no memory beside {held.numel()} numbers")
        if (red & green & ~blue).any():  # the layer that is explained is not reached
            return self.head(x.flatten(1)[:, :16])
        x = torch.where((blue & ~red & ~green)[:, None, None, None], torch.nan, x)  # as if its weights were
        return super().forward(x)

    def hook(self, *_):
        if self.raises:
            raise ValueError("a hook of the model's own")
'''
COLOURS = {
    "out of memory": (255, 0, 0),
    "raising hook": (0, 255, 0),
    "not a number": (0, 0, 255),
    "bad layer": (255, 255, 0),
}
FAILS = {
    "out of memory": camserve.ResourceExhausted,
    "raising hook": camserve.Internal,
    "bad layer": camserve.CamserveError,
}
ASKED = {"overlay": None, "targets": 2}


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("poison")
    (folder / "poisoned_nets.py").write_text(NETS)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        with serving(models=("poisoned=poisoned_nets:Poisoned?size=32",), threads=1, max_batch_rows=8) as one:
            yield one


@pytest.fixture(scope="module")
def client(served):
    with camserve.Client(served.address, retries=0) as one:
        yield one


@pytest.fixture(scope="module")
def photos():
    return [np.random.default_rng(number).integers(0, 120, (32, 32, 3), np.uint8) for number in range(8)]


@pytest.fixture(scope="module")
def alone(client, photos):
    return [client.explain(photo, **ASKED).explanations[0].heatmap for photo in photos]


def poison(colour):
    return np.full((32, 32, 3), COLOURS[colour], np.uint8)


def waiting(batcher):
    return sum(ticket.waiting for queue in list(batcher._queues.values()) for ticket in list(queue))


def in_one_batch(served, client, images):
    """Explain eight images that begin in one batch; return explanations, and errors of those that fail."""
    batcher = served.pipeline.batcher
    served.do(batcher.pause)
    batches, asked = batcher.stats.batches, []
    with ThreadPoolExecutor(8) as threads:
        for number, image in enumerate(images):
            asked.append(threads.submit(client.explain, image, **ASKED))
            give_up = time.monotonic() + 10
            while waiting(batcher) <= number and time.monotonic() < give_up:
                time.sleep(0.001)
        served.do(batcher.resume)
        outcomes = [one.exception(20) or one.result().explanations[0] for one in asked]
    assert batcher.stats.batches == batches + 1
    return outcomes


@pytest.mark.parametrize("colour", COLOURS)
@pytest.mark.parametrize("position", range(8))
def test_seven_neighbours_of_a_poisoned_row_are_right(colour, position, served, client, photos, alone):
    images = [*photos[:position], poison(colour), *photos[position + 1 :]]
    outcomes = in_one_batch(served, client, images)
    own = outcomes[position]

    if colour in FAILS:
        assert isinstance(own, FAILS[colour])
        assert hygiene.of_client(own) == []
    else:
        assert own.verdict == "NON_FINITE"
    for number in {*range(8)} - {position}:
        assert np.abs(outcomes[number].heatmap - alone[number]).max() <= 1e-5 * np.abs(alone[number]).max()


def png(image):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return packed.getvalue()


def memory():
    give_back_memory()
    return tree.memory(os.getpid())


def without_memory(client, times):
    """Ask for what takes all memory, so many times; return how far memory rose, as a share, and the errors."""
    image, errors = png(poison("out of memory")), []

    def ask():
        with pytest.raises(camserve.CamserveError) as told:
            client.explain(image, **ASKED)
        errors.append(type(told.value))
        assert hygiene.of_client(told.value) == []
        told.value.__traceback__ = None

    for _ in range(5):  # so that what is made once is there
        ask()
    before = memory()
    for _ in range(times):
        ask()
    gc.collect()
    return memory() / before - 1, errors


def test_after_a_hundred_times_out_of_memory_in_a_row_the_server_serves_and_holds_no_more(client, photos, alone):
    grown, errors = without_memory(client, 100)
    now = client.explain(photos[0], **ASKED).explanations[0].heatmap

    assert set(errors) == {camserve.ResourceExhausted}
    assert abs(grown) <= 0.02
    assert client.health() is camserve.Health.SERVING
    assert np.array_equal(now, alone[0])


def test_the_measure_of_memory_sees_an_error_that_is_kept_with_its_tensors(served, client, monkeypatch):
    """The detector above is itself shown a leak: an error that is kept holds the frames it came through."""
    engine, kept = served.pipeline.batcher._engines[0], []
    module = engine.run.__self__._models["poisoned"].module

    def keeping(*_):
        try:
            return module(torch.tensor([[[[2.0]], [[0.0]], [[0.0]]]]))
        except torch.OutOfMemoryError as error:
            kept.append(error)
            raise OutOfMemory("no memory") from error

    monkeypatch.setattr(engine, "run", keeping)
    grown, errors = without_memory(client, 2)

    assert len(kept) == len(errors) == 7
    assert grown > 0.02
