"""Amount of measurements: everything, what fits into some minutes, or just enough to see that it runs."""

from dataclasses import dataclass, replace
from pathlib import Path

RESNET, MOBILENET, CONVNEXT, VIT = "resnet50", "mobilenet_v3_large", "convnext_tiny", "vit_b_16"


SIZE = 224


def spec(model: str, precision: str = "float32", size: int = SIZE) -> str:
    """Name a model of torchvision with random weights, as the server does."""
    return f"torchvision:{model}?weights=none&precision={precision}" + ("" if size == SIZE else f"&size={size}")


@dataclass(frozen=True, slots=True)
class Scale:
    """Amount of measurements.

    Attributes:
        name: that it is called by.
        rounds: in which everything is timed in turn.
        models: of torchvision, for the engine.
        served: models and precisions that a server is measured with.
        batches: for the engine.
        stretch: seconds of one stretch of load.
        overload: seconds of load beyond the capacity, and before that at it, in each round.
        rest: seconds after which a server's memory is looked at again.
        smoothgrad: copies of the image, for the cost of rows.
        sizes: sides of the input, for its cost.
        size: side of the input in pixels.
        peers: whether the other libraries are timed too.
        photos: for each stretch beside a long request; 0 not to measure that.
        calls: the number of calls in each stretch with or without other callers.
        threads: of torch; 0 for one a core.
        compiled: whether compiled models are timed too: compiling takes a minute or more, for each batch size.
        processes: numbers of processes that a server is measured with, for the front.
        against: another checkout that the front is compared with; None to measure this one alone.
    """

    name: str
    rounds: int
    models: tuple[str, ...]
    served: tuple[tuple[str, str], ...]
    batches: tuple[int, ...]
    stretch: float
    overload: float
    rest: float
    smoothgrad: tuple[int, ...]
    sizes: tuple[int, ...]
    size: int = SIZE
    peers: bool = True
    photos: int = 60
    calls: int = 300
    threads: int = 0
    compiled: bool = False
    processes: tuple[int, ...] = (1, 2)
    against: Path | None = None

    def of(self, models: tuple[str, ...]) -> "Scale":
        """Measure these models instead; each in the precisions that it has, or else in float32."""
        served = tuple(one for one in self.served if one[0] in models)
        new = tuple((name, "float32") for name in models if name not in dict(served))
        return replace(self, models=models, served=served + new)

    def spec(self, model: str, precision: str = "float32", *, size: int | None = None) -> str:
        """Name a model as the server does; in this scale's size, or another."""
        return spec(model, precision, size or self.size)


FULL = Scale(
    name="full",
    rounds=5,
    models=(RESNET, MOBILENET, CONVNEXT, VIT),
    served=((RESNET, "float32"), (RESNET, "bfloat16"), (MOBILENET, "float32")),
    batches=(1, 8, 32),
    stretch=5.0,
    overload=10.0,
    rest=30.0,
    smoothgrad=(4, 16, 64),
    sizes=(384, 512),
)
QUICK = replace(
    FULL,
    name="quick",
    models=(RESNET, MOBILENET),
    served=((RESNET, "float32"),),
    batches=(8,),
    stretch=3.0,
    overload=6.0,
    rest=2.0,
    smoothgrad=(4,),
    sizes=(384,),
    photos=0,
    calls=100,
    processes=(1,),
)
TINY = replace(
    QUICK,
    name="tiny",
    rounds=1,
    models=("mobilenet_v3_small",),
    served=(("mobilenet_v3_small", "float32"),),
    batches=(2,),
    stretch=0.1,
    overload=0.2,
    rest=0.1,
    sizes=(96,),
    size=64,
    peers=False,
    calls=3,
    threads=1,
)
SCALES = {one.name: one for one in (FULL, QUICK, TINY)}
