"""Models that fail in the way that the one colour of an image asks for."""

import ctypes
import gc
import json
import os
import platform
from collections import OrderedDict
from pathlib import Path

import numpy as np
import torch
from torch import nn

from camserve_server.models.hooks import hook_count

MEMORY_BEFORE_FAILURE = 24  # MB that are allocated before memory runs out
COLOURS = {
    "out of memory": (255, 0, 0),
    "raising hook": (0, 255, 0),
    "not a number": (0, 0, 255),
    "bad layer": (255, 255, 0),
    "count": (255, 255, 255),
}
COUNTS_FILE = "SOAK_COUNTS_FILE"  # environment variable: the file that receives the counts of the worker process
LEAKED = []


class Heap(ctypes.Structure):
    """The result of glibc's mallinfo2(3)."""

    _fields_ = (
        ("others", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("more", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 2),
    )


def heap_mb():
    """Return the MB of the heap in use, without the allocator's free lists; 0 without glibc."""
    if platform.libc_ver()[0] != "glibc":
        return 0.0
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Heap
    heap = mallinfo2()
    return (heap.used + heap.mapped) / 2**20


def counts(module):
    """Count the model's hooks, the objects that Python can reach, and the MB of the heap in use."""
    gc.collect()
    return {"hooks": hook_count(module), "objects": len(gc.get_objects()), "heap": heap_mb()}


def image(colour, size=32):
    """Return the image that triggers a failure, uint8 [size,size,3]."""
    return np.full((size, size, 3), COLOURS[colour], np.uint8)


class Poisoned(nn.Sequential):
    def __init__(self):
        torch.manual_seed(0)
        super().__init__(
            OrderedDict(
                stem=nn.Conv2d(3, 8, 3, 2, 1),
                act=nn.ReLU(inplace=True),
                features=nn.Conv2d(8, 16, 3, 2, 1),
                norm=nn.BatchNorm2d(16),
                pool=nn.AdaptiveAvgPool2d(1),
                flat=nn.Flatten(),
                head=nn.Linear(16, 5),
            )
        )
        self.raises = False
        self.act.register_forward_hook(self.hook)

    def forward(self, x):
        red, green, blue = (x.amin((2, 3)) > 1.5).unbind(1)
        self.raises = bool((green & ~red & ~blue).any())
        if (red & ~green & ~blue).any():
            allocated = torch.ones(MEMORY_BEFORE_FAILURE * 2**18)
            raise torch.OutOfMemoryError(f"no memory beside {allocated.numel()} numbers")
        if (red & green & ~blue).any():  # skips the layer that is explained
            return self.head(x.flatten(1)[:, :16])
        if COUNTS_FILE in os.environ and (red & green & blue).any():
            Path(os.environ[COUNTS_FILE]).write_text(json.dumps(counts(self)))
        x = torch.where((blue & ~red & ~green)[:, None, None, None], torch.nan, x)  # as with weights that are NaN
        return super().forward(x)

    def hook(self, *_):
        if self.raises:
            raise ValueError("a hook of the model itself")


class Leaking(Poisoned):
    """Leaks 256 KB with every batch up to 1 GB, and a hook with every tenth."""

    def forward(self, x):
        LEAKED.append(torch.ones(2**16) if len(LEAKED) < 4096 else None)
        if len(LEAKED) % 10 == 0:
            self.flat.register_forward_hook(lambda *_: None)
        return super().forward(x)


def poisoned():
    return Poisoned()


def leaking():
    return Leaking()
