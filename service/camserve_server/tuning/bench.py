"""Benchmark for tuning: Grad-CAM at the default layer, on synthetic images, with models in several precisions."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import numpy as np
import torch

from camserve_server.core.arrays import Map, Pixels
from camserve_server.core.devices import Precision, device_for
from camserve_server.core.errors import ConfigError, OutOfMemory, ServiceError
from camserve_server.engine import Engine
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.opencv import cv2
from camserve_server.methods.values import MethodCall
from camserve_server.models import LoadedModel, load
from camserve_server.models.spec import ModelSpec
from camserve_server.models.values import Pass
from camserve_server.targets import anything
from camserve_server.tuning.survey import BATCHES, Variant

SIMILARITY_IMAGES = 6
GRADCAM = MethodCall("gradcam")


def precisions(device: str) -> tuple[Precision, ...]:
    """Return float32 and the other precisions that a device supports natively."""
    return ("float32", *device_for(device).precisions())


def images(size: tuple[int, int], count: int) -> list[Pixels]:
    """Return synthetic images [height, width, 3]: soft patches of colour, the same ones at every call."""
    random = np.random.default_rng(0)
    coarse = random.integers(0, 256, (count, 8, 8, 3), np.uint8)
    return [cv2.resize(grid, size[::-1], interpolation=cv2.INTER_CUBIC).astype(np.uint8, copy=False) for grid in coarse]


@dataclass(frozen=True, slots=True)
class Bench:
    """Models that are loaded in several precisions, ready to measure.

    Attributes:
        models: models by name and precision.
        images: images for each model by name, enough for the largest batch.
    """

    models: Mapping[str, Mapping[str, LoadedModel]]
    images: Mapping[str, list[Pixels]]

    def variants(self, threads: tuple[int, ...], precisions: Mapping[str, str]) -> list[Variant]:
        """Return all variants to measure, those with the models' own precisions first."""
        variants = [
            Variant(name, precision, number)
            for number in threads
            for name, by_precision in self.models.items()
            for precision in by_precision
        ]
        return sorted(variants, key=lambda variant: variant.precision != precisions[variant.model])

    def run(self, variant: Variant, batch: int) -> list[RowResult]:
        """Explain a batch, with the variant's number of torch threads."""
        if torch.get_num_threads() != variant.threads:
            torch.set_num_threads(variant.threads)
        info = self.models[variant.model][variant.precision].info
        rows = [Row(image, anything(info), (GRADCAM,)) for image in self.images[variant.model][:batch]]
        return self._explain(variant.model, variant.precision, rows)

    def similarities(self) -> dict[tuple[str, str], float | None]:
        """Compare the maps of every model in every other precision with those in float32."""
        pairs = [(name, precision) for name, by_precision in self.models.items() for precision in by_precision]
        return {pair: self.similarity(*pair) for pair in pairs if pair[1] != "float32"}

    def similarity(self, name: str, precision: str) -> float | None:
        """Compare the maps of a model with those in float32, for the same targets.

        Returns:
            The lowest cosine similarity on a few images; None if every map is zero.
        """
        info = self.models[name]["float32"].info
        cosines = []
        for image in self.images[name][:SIMILARITY_IMAGES]:
            (exact,) = self._explain(name, "float32", [Row(image, anything(info), (GRADCAM,))])
            (other,) = self._explain(name, precision, [Row(image, exact.target, (GRADCAM,))])
            cosines.append(_cosine(exact.maps[0][0], other.maps[0][0]))
        return min((value for value in cosines if value is not None), default=None)

    def _explain(self, name: str, precision: str, rows: list[Row]) -> list[RowResult]:
        info = self.models[name][precision].info
        pass_ = Pass(name, "cam", info.preprocess.size, (info.default_layer,))
        try:
            return Engine({name: self.models[name][precision]}).run(pass_, rows)
        except OutOfMemory:
            raise
        except ServiceError as error:
            raise ConfigError(f"model {name} in {precision}: {error}") from error


def prepare(specs: Mapping[str, ModelSpec], device: str) -> Bench:
    """Load each model in its own precision, in float32, and in the other precisions that the device supports natively.

    Raises:
        ConfigError: a model cannot be loaded.
    """
    models: dict[str, dict[str, LoadedModel]] = {
        name: {
            # Without compilation, which would take longer than the measurements.
            precision: load(replace(spec, precision=precision, compile=False), device)
            for precision in dict.fromkeys((*precisions(device), spec.precision))
        }
        for name, spec in specs.items()
    }
    for name, by_precision in models.items():
        if not by_precision["float32"].info.default_layer:
            raise ConfigError(f"model {name} has no layer with a grid over the image, so Grad-CAM cannot be measured")
    sizes = {name: by_precision["float32"].info.preprocess.size for name, by_precision in models.items()}
    return Bench(models, {name: images(size, max(BATCHES)) for name, size in sizes.items()})


@contextmanager
def restore_threads() -> Iterator[None]:
    """Restore torch's number of threads at the end of the block."""
    before = torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _cosine(one: Map, other: Map) -> float | None:
    norms = float(np.linalg.norm(one)) * float(np.linalg.norm(other))
    return float((one * other).sum()) / norms if norms else None
