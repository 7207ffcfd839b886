"""Amount of measurements on a GPU, and their time limit."""

import time
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from benchmarks.scale import RESNET, SIZE, VIT, spec

Cells: TypeAlias = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Deployment:
    """Servers that are loaded together.

    Attributes:
        servers: processes.
        engines: in each of them, on one device.
        rows: in a batch at most.
        precision: of the model.
    """

    servers: int = 1
    engines: int = 1
    rows: int = 32
    precision: str = "bfloat16"

    @property
    def name(self) -> str:
        """In words."""
        return f"{self.servers} x {self.engines}, batches of {self.rows}, {self.precision}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of measurements.

    Attributes:
        device: of everything.
        models: of torchvision; the first is served.
        batches: for the engine.
        graphed: batches that are compiled.
        rounds: in which everything takes its turn.
        burst: seconds of one turn.
        stretch: seconds of one stretch of load.
        under_way: requests under way at once, over all clients.
        clients: processes that send them.
        deployments: servers that are compared.
        size: side of the input in pixels.
        threads: of each server, which decode and draw; 0 for one a core.
    """

    device: str = "cuda:0"
    models: tuple[str, ...] = (RESNET, VIT)
    batches: tuple[int, ...] = (8, 32, 64, 128)
    graphed: tuple[int, ...] = (1, 8, 32)
    rounds: int = 5
    burst: float = 0.15
    stretch: float = 4.0
    under_way: tuple[int, ...] = (64, 128, 256)
    clients: int = 4
    deployments: tuple[Deployment, ...] = (
        Deployment(),
        Deployment(rows=64),
        Deployment(engines=2),
        Deployment(servers=2),
        Deployment(servers=4),
        Deployment(precision="float32"),
    )
    size: int = SIZE
    threads: int = 0

    @property
    def gpu(self) -> bool:
        """True if the device is a GPU."""
        return self.device != "cpu"

    def spec(self, model: str, precision: str = "float32") -> str:
        """Name a model as the server does."""
        return spec(model, precision, self.size)

    def wait(self) -> None:
        """Wait until the device has done all it was asked."""
        if self.gpu:
            torch.cuda.synchronize(self.device)


FULL = Scale()
QUICK = Scale(
    models=("resnet18",),
    batches=(2,),
    graphed=(2,),
    rounds=1,
    burst=0.01,
    stretch=0.3,
    under_way=(4,),
    clients=2,
    deployments=(Deployment(rows=2, precision="float32"), Deployment(engines=2, rows=2, precision="float32")),
    size=64,
    threads=1,
)


def scale_of(device: str, *, quick: bool) -> Scale:
    """Return how much is measured on a device."""
    return replace(QUICK if quick else FULL, device=device)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time limit of all measurements: those that would exceed it are skipped, and the report says so."""

    seconds: float
    began: float

    @classmethod
    def start(cls, seconds: float) -> "Clock":
        """Begin to count."""
        return cls(seconds, time.perf_counter())

    def allows(self, seconds: float) -> bool:
        """Tell whether so much time is left."""
        return self.seconds - (time.perf_counter() - self.began) >= seconds
