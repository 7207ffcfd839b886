"""Networks of other libraries on torch, in process and served: Keras 3, and networks sharded by FSDP2.

Each test runs in a process of its own, because the libraries change settings of the whole process.
"""

import os

import numpy as np
import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel

import camserve
import fork_server
from as_written import PREPROCESS, SIZE, plain
from camserve_server import Explainer, running
from camserve_server.core.errors import ConfigError
from camserve_server.models import Source
from methods.tools import FACTOR, FLOOR, gap
from models.test_as_written import OPTIONS, check_equal, maps, offered

pytestmark = pytest.mark.slow

ROW_BY_ROW = {"max_batch_rows": 1}
"""The rounding depends on the size of the batch, and this on when requests come."""


class Convolution(nn.Conv2d):
    """A convolution with a ReLU after it, like that of Keras."""

    def forward(self, values):
        return super().forward(values).relu()


class Twin(nn.Module):
    """The network of `keras_network` in plain torch."""

    def __init__(self):
        super().__init__()
        self.first, self.second = Convolution(3, 8, 3, padding=1), Convolution(8, 8, 3, 2)
        self.head = nn.Linear(8, 5)

    def forward(self, image):
        return self.head(self.second(self.first(image)).mean((2, 3)))


def keras_network():
    """Return a network of Keras and its twin, with the same weights."""
    os.environ["KERAS_BACKEND"] = "torch"
    import keras  # noqa: PLC0415 -- reads the variable when it is imported

    keras.config.set_image_data_format("channels_first")
    keras.utils.set_random_seed(0)
    layers = keras.layers
    network = keras.Sequential(
        [
            keras.Input((3, SIZE, SIZE)),
            layers.Conv2D(8, 3, padding="same", activation="relu", name="first"),
            layers.Conv2D(8, 3, strides=2, activation="relu", name="second"),
            layers.GlobalAveragePooling2D(),
            layers.Dense(5, name="head"),
        ]
    )
    twin = Twin()
    for name, module in twin.named_children():
        kernel, bias = (torch.tensor(np.asarray(each)) for each in network.get_layer(name).get_weights())
        last = (3, 2, 0, 1) if isinstance(module, nn.Conv2d) else (1, 0)  # Keras has the inputs before
        module.weight.data = kernel.permute(last).contiguous()
        module.bias.data = bias
    return network, twin


def explained(network, methods=None):
    """Return the methods, and the maps by method and class, and the predictions."""
    with Explainer(network, settings=ROW_BY_ROW, **OPTIONS) as explainer:
        methods = methods or offered(explainer)
        return methods, maps(explainer, methods)


def by_class(found):
    return {(method, index): heatmap for (method, index, _layer), heatmap in found[0].items()}


def explain_keras():
    """Return the layers and methods of a network of Keras, its maps in process and served, and those of its twin."""
    network, twin = keras_network()
    methods, found = explained(network)
    with (
        running({"keras": Source(network, PREPROCESS)}, threads=torch.get_num_threads(), **ROW_BY_ROW) as address,
        camserve.Client(address) as client,
    ):
        served = maps(client, methods)
    layers = {layer for _, _, layer in found[0]}
    return layers, methods, found, served, explained(twin, methods)[1], explained(twin.double(), methods)[1]


def test_maps_of_keras_are_those_of_the_same_network_in_torch():
    layers, methods, found, served, rough, exact = fork_server.call(explain_keras)
    truth, plain_maps = by_class(exact), by_class(rough)

    assert len({layer for layer in layers if layer and " + " not in layer}) == 1
    assert {"gradcam", "layercam", "saliency", "integrated_gradients", "rise", "guided_backprop"} <= set(methods)
    check_equal(served, found)
    for key, heatmap in by_class(found).items():
        if not truth[key].any():  # a method whose map is zero for this network
            assert not heatmap.any(), key
            continue
        assert gap(heatmap, truth[key]) <= FACTOR * gap(plain_maps[key], truth[key]) + FLOOR, key


def sharded():
    """Return the network after FSDP2 has made its parameters parts of tensors, among a single process."""
    if not distributed.is_initialized():
        distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    network = plain()
    fully_shard(network.body, mesh=init_device_mesh("cpu", (1,)))
    fully_shard(network, mesh=init_device_mesh("cpu", (1,)))
    return network


def refuse_shards():
    """Return the errors for a sharded network, in process and served."""
    errors = []
    for serve in (lambda: Explainer(sharded(), **OPTIONS), lambda: running({"net": Source(sharded(), PREPROCESS)})):
        try:
            with serve():
                pass
        except ConfigError as error:
            errors.append(str(error))
    return errors


def test_network_sharded_by_fsdp2_is_refused_with_the_way_out_in_process_and_served():
    errors = fork_server.call(refuse_shards)

    assert len(errors) == 2
    for error in errors:
        assert "DTensor, which is distributed among processes: load its full state dict" in error


def average_served():
    """Return what an averaged network says, in process and served."""
    methods, found = explained(AveragedModel(plain()))
    with (
        running(
            {"net": Source(AveragedModel(plain()), PREPROCESS)}, threads=torch.get_num_threads(), **ROW_BY_ROW
        ) as address,
        camserve.Client(address) as client,
    ):
        return found, maps(client, methods)


def test_average_of_a_training_has_the_same_maps_served():
    found, served = fork_server.call(average_served)

    check_equal(served, found)
