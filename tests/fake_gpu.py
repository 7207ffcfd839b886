"""Fake GPU that computes on the CPU."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core import devices
from camserve_server.models.acceleration import onednn


class FakeGpu(devices.Device):
    """Fake GPU on which everything takes equally long."""

    is_cpu = False

    def measure(self, function):
        function()
        return 1.0


@contextmanager
def fake_gpu(kind=FakeGpu):
    """Replace the CPU by a fake GPU inside the block."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.KINDS, "cpu", kind)
        patch.setattr(onednn, "is_supported", lambda *_: False)
        devices.device_for.cache_clear()
        try:
            yield
        finally:
            devices.device_for.cache_clear()


class Convolutions(TorchFunctionMode):
    """Records the images and weights that convolutions get."""

    def __init__(self):
        super().__init__()
        self.inputs = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.conv2d:
            self.inputs.append(args[:2])
        return func(*args, **(kwargs or {}))

    @property
    def images(self):
        """The images that the model got."""
        return self.inputs[0][0]

    def are_channels_last(self):
        """Return True if the model's images have the memory format channels last."""
        return self.images.is_contiguous(memory_format=torch.channels_last)
