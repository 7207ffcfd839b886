"""A device that computes on the CPU, and that everything else takes for a GPU."""

from contextlib import contextmanager

import pytest
import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from camserve_server.core import devices
from camserve_server.models.acceleration import onednn


class FakeGpu(devices.Device):
    """A GPU that takes equally long for everything."""

    is_cpu = False

    def measure(self, function):
        function()
        return 1.0


@contextmanager
def fake_gpu(kind=FakeGpu):
    """Put a fake GPU in the place of the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(devices.KINDS, "cpu", kind)
        patch.setattr(onednn, "is_supported", lambda *_: False)
        devices.device_for.cache_clear()
        try:
            yield
        finally:
            devices.device_for.cache_clear()


class Convolutions(TorchFunctionMode):
    """Notes the images and the weights that convolutions are given."""

    def __init__(self):
        super().__init__()
        self.given = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is functional.conv2d:
            self.given.append(args[:2])
        return func(*args, **(kwargs or {}))

    @property
    def images(self):
        """The images that the model was given."""
        return self.given[0][0]

    def are_channels_last(self):
        """Return whether the model's images are channels last in memory, and not contiguous."""
        return self.images.is_contiguous(memory_format=torch.channels_last)
