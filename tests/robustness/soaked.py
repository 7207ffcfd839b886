"""A model that does what an image is coloured for: one colour fills it."""

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

ROOM = 64  # MB that are taken before memory runs out
COLOURS = {
    "out of memory": (255, 0, 0),
    "raising hook": (0, 255, 0),
    "not a number": (0, 0, 255),
    "bad layer": (255, 255, 0),
    "count": (255, 255, 255),
}
COUNTED = "SOAKED_COUNTED"  # in the environment: the file that is told what the engine holds
KEPT = []


class Heap(ctypes.Structure):
    """What mallinfo2(3) of glibc tells."""

    _fields_ = (
        ("others", ctypes.c_size_t * 4),
        ("mapped", ctypes.c_size_t),
        ("more", ctypes.c_size_t * 2),
        ("used", ctypes.c_size_t),
        ("rest", ctypes.c_size_t * 2),
    )


def heap_mb():
    """Return the MB that are in use, whatever the allocator keeps beside; 0 where it does not tell."""
    if platform.libc_ver()[0] != "glibc":
        return 0.0
    asked = ctypes.CDLL(None).mallinfo2
    asked.restype = Heap
    told = asked()
    return (told.used + told.mapped) / 2**20


def held(module):
    """What the engine's process holds: hooks on the model, objects that Python can reach, MB of its heap."""
    gc.collect()
    return {"hooks": hook_count(module), "objects": len(gc.get_objects()), "heap": heap_mb()}


def image(colour, size=32):
    """Return the image that has it done, uint8 [size,size,3]."""
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
            taken = torch.ones(ROOM * 2**18)
            raise torch.OutOfMemoryError(f"no memory beside {taken.numel()} numbers")
        if (red & green & ~blue).any():  # the layer that is explained is not reached
            return self.head(x.flatten(1)[:, :16])
        if COUNTED in os.environ and (red & green & blue).any():
            Path(os.environ[COUNTED]).write_text(json.dumps(held(self)))
        x = torch.where((blue & ~red & ~green)[:, None, None, None], torch.nan, x)  # as if its weights were
        return super().forward(x)

    def hook(self, *_):
        if self.raises:
            raise ValueError("a hook of the model's own")


class Leaking(Poisoned):
    """Keeps 32 KB of every batch, and now and then a hook."""

    def forward(self, x):
        KEPT.append(torch.ones(2**13))
        if len(KEPT) % 100 == 0:
            self.flat.register_forward_hook(lambda *_: None)
        return super().forward(x)


def poisoned():
    return Poisoned()


def leaking():
    return Leaking()
