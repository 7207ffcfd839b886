"""What is measured: Grad-CAM at the default layer, of images that are made here, by models in several precisions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from camserve_server.core.arrays import Map, Pixels
from camserve_server.core.devices import Precision, device_of
from camserve_server.core.errors import ConfigError, OutOfMemory, ServiceError
from camserve_server.engine import Engine
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.opencv import cv2
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Pass
from camserve_server.targets import anything
from camserve_server.tuning.survey import BATCHES, Line

LIKENESS_IMAGES = 6
GRADCAM = MethodCall("gradcam")


def precisions(device: str) -> tuple[Precision, ...]:
    """Return the precisions that a device multiplies in by instructions of its own, float32 first."""
    return ("float32", *device_of(device).precisions())


def images(size: tuple[int, int], count: int) -> list[Pixels]:
    """Make images [height, width, 3]: soft patches of colour, always the same."""
    chance = np.random.default_rng(0)
    coarse = chance.integers(0, 256, (count, 8, 8, 3), np.uint8)
    return [cv2.resize(one, size[::-1], interpolation=cv2.INTER_CUBIC).astype(np.uint8, copy=False) for one in coarse]


@dataclass(frozen=True, slots=True)
class Bench:
    """Models, each in several precisions, ready to be measured.

    Attributes:
        models: by name and precision.
        pictures: for a model of each name, as many as the largest batch has.
    """

    models: Mapping[str, Mapping[str, LoadedModel]]
    pictures: Mapping[str, list[Pixels]]

    def lines(self, threads: tuple[int, ...], usual: Mapping[str, str]) -> list[Line]:
        """Return all that can be measured, what models are in anyway first."""
        every = [
            Line(name, precision, number)
            for number in threads
            for name, kinds in self.models.items()
            for precision in kinds
        ]
        return sorted(every, key=lambda line: line.precision != usual[line.model])

    def run(self, line: Line, batch: int) -> list[RowResult]:
        """Explain a batch, in so many threads of torch."""
        if torch.get_num_threads() != line.threads:
            torch.set_num_threads(line.threads)
        info = self.models[line.model][line.precision].info
        rows = [Row(image, anything(info), (GRADCAM,)) for image in self.pictures[line.model][:batch]]
        return self._explained(line.model, line.precision, rows)

    def likenesses(self) -> dict[tuple[str, str], float | None]:
        """Compare the maps of every model in every precision but float32 with those in float32."""
        pairs = [(name, precision) for name, kinds in self.models.items() for precision in kinds]
        return {pair: self.likeness(*pair) for pair in pairs if pair[1] != "float32"}

    def likeness(self, name: str, precision: str) -> float | None:
        """Compare a model's maps with those that it gives in float32, for the same targets.

        Returns:
            The least cosine among a few images; None where every map is zero.
        """
        info = self.models[name]["float32"].info
        cosines = []
        for image in self.pictures[name][:LIKENESS_IMAGES]:
            (exact,) = self._explained(name, "float32", [Row(image, anything(info), (GRADCAM,))])
            (other,) = self._explained(name, precision, [Row(image, exact.target, (GRADCAM,))])
            cosines.append(_cosine(exact.maps[0][0], other.maps[0][0]))
        return min((value for value in cosines if value is not None), default=None)

    def _explained(self, name: str, precision: str, rows: list[Row]) -> list[RowResult]:
        info = self.models[name][precision].info
        pass_ = Pass(name, "cam", info.preprocess.size, (info.default_layer,))
        try:
            return Engine({name: self.models[name][precision]}).run(pass_, rows)
        except OutOfMemory:
            raise
        except ServiceError as error:
            raise ConfigError(f"model {name} in {precision}: {error}") from error


def prepare(specs: Mapping[str, ModelSpec], device: str) -> Bench:
    """Load models, each in its own precision, in float32, and in what else the device is made for.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    models: dict[str, dict[str, LoadedModel]] = {
        name: {
            # Without a compiler, which would take longer than all the measuring.
            precision: load(replace(spec, precision=precision, compile=False), device)
            for precision in dict.fromkeys((*precisions(device), spec.precision))
        }
        for name, spec in specs.items()
    }
    sizes = {name: kinds["float32"].info.preprocess.size for name, kinds in models.items()}
    return Bench(models, {name: images(size, max(BATCHES)) for name, size in sizes.items()})


@contextmanager
def threads_kept() -> Iterator[None]:
    """Give torch back the number of threads that it had, at the end of the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cosine(one: Map, other: Map) -> float | None:
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float((one * other).sum()) / norms if norms else None
