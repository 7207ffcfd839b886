"""Calibration: how much the baseline's maps change although nothing important did, and if everything did.

The *floor* compares the baseline's maps with those of the same photos with a little noise. The *ceiling* compares them
with the maps of the same network with random weights (Adebayo et al. 2018, arXiv:1810.03292, section 3.1). Between the
two lies every candidate. Methods with random numbers keep their seed, which both sides of a diff share.
"""

from __future__ import annotations

import io
import itertools
import json
import math
import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from camserve._core.errors import CamserveError, Internal, InvalidArgument
from camserve._core.files import MAX_PHOTO_BYTES, NOT_A_PHOTO, read_regular, write_file
from camserve._values import map_numbers
from camserve._values.evaluation import Metric
from camserve.diff.record import explain_items
from camserve.diff.recording import CALIBRATION_FILE

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

    from camserve._sync.client import Client
    from camserve._transport.stream import Outcome
    from camserve._values.options import ExplainOptions, ImageWithOptions
    from camserve._values.result import Result
    from camserve.diff.lines import RecordedPhoto
    from camserve.diff.recording import Recording

FORMAT: Final = "camserve calibration 1"
NOISE: Final = 0.02
"""Standard deviation of the noise, as a share of the largest pixel value."""

_SIZE = 1.2  # shorter side of a photo that gets noise, in sides of the model's input
_FORMATS = ("JPEG", "PNG", "WEBP", "BMP")
_DRAWS = 2  # of the noise, for each photo
_THREADS = 2  # that wait for evaluations: a server limits the rows that are under way


@dataclass(frozen=True, slots=True)
class MethodCalibration:
    """Rank correlations of the maps of one method on one layer.

    Attributes:
        method: Name of the method, with its smoothing.
        layer: Name of the layer; empty for methods without one.
        noise: With noisy photos: the floor.
        random: With random weights: the ceiling.
    """

    method: str
    layer: str
    noise: tuple[float, ...]
    random: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Calibration:
    """Calibration of a recording.

    Attributes:
        seed: Seed of the sample and of the noise.
        photos: Names of the photos of the sample.
        predictions_changed: Share of the noisy photos whose predicted class is another one.
        methods: One for each method and layer.
    """

    seed: int
    photos: tuple[str, ...]
    predictions_changed: float
    methods: tuple[MethodCalibration, ...]

    def save(self, folder: Path) -> None:
        """Write the calibration into the folder of a recording."""
        content = {"format": FORMAT, **asdict(self)}
        write_file(folder / CALIBRATION_FILE, json.dumps(content, allow_nan=False).encode())


def load(folder: Path) -> Calibration | None:
    """Read the calibration of a recording; None if it has none.

    Raises:
        InvalidArgument: The file is damaged or of another format.
    """
    path = folder / CALIBRATION_FILE
    try:
        return _decode(json.loads(read_regular(path)))
    except FileNotFoundError:
        return None
    except KeyError as error:
        raise InvalidArgument(f"{path} is damaged: it has no {error}") from error
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise InvalidArgument(f"{path} is damaged: {error}") from error
    except OSError as error:
        raise InvalidArgument(f"cannot read {path}: {error.strerror or error}") from error


def _decode(content: Any) -> Calibration:
    if content.pop("format") != FORMAT:
        raise ValueError(f"its format is not {FORMAT!r}")
    methods = tuple(_decode_method(each) for each in content["methods"])
    changed = float(content["predictions_changed"])
    if not 0 <= changed <= 1:
        raise ValueError("the share of changed predictions is not between 0 and 1")
    return Calibration(int(content["seed"]), tuple(map(str, content["photos"])), changed, methods)


def _decode_method(content: Any) -> MethodCalibration:
    lists = tuple(tuple(map(float, content[name])) for name in ("noise", "random"))
    if not all(map(math.isfinite, itertools.chain(*lists))):
        raise ValueError("a rank correlation is not finite")
    return MethodCalibration(str(content["method"]), str(content["layer"]), *lists)


@dataclass(frozen=True, slots=True)
class Sample:
    """Photos to calibrate with.

    Attributes:
        photos: Their paths by name.
        seed: Seed of the sample, of the noise, and of the random weights.
    """

    photos: Mapping[str, Path]
    seed: int

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the photos, in order."""
        return tuple(self.photos)

    @staticmethod
    def of(photos: Mapping[str, Path], size: int, seed: int) -> Sample:
        """Draw a sample. It depends on the names and the seed, not on the order of the photos."""
        names = random.Random(seed).sample(sorted(photos), min(size, len(photos)))  # noqa: S311 -- no secret
        return Sample({name: photos[name] for name in sorted(names)}, seed)


def calibrate(
    client: Client,
    recording: Recording,
    options: ExplainOptions,
    sample: Sample,
    on_photo: Callable[[], object] = lambda: None,
) -> Calibration:
    """Measure the floor and the ceiling of a recording's model.

    Args:
        client: Client of the server with the model.
        recording: The recording.
        options: Options of the recording, with the model.
        sample: Photos to measure with.
        on_photo: Function to call after each of the three measurements of a photo.

    Raises:
        CamserveError: The server cannot explain or evaluate one of the photos.
    """
    model = client.model(options.get("model") or "")
    floor = _Floor(recording, sample, side=round(_SIZE * max(model.input_height, model.input_width)))
    numbers: _Numbers = {}
    draws = [(name, draw) for draw in range(_DRAWS) for name in sample.names]
    changed: list[bool] = []
    outcomes = explain_items(client, (floor.item(*each) for each in draws), options)
    for (name, _), outcome in zip(draws, outcomes, strict=True):
        photo, result = recording.photo(name), _result_of(name, outcome)
        changed.append(first_class(photo) != first_class(result))
        _add(numbers, photo, "noise", _correlations(photo, result))
        on_photo()
    for name, correlations in _random_weights(client, recording, options, sample):
        _add(numbers, recording.photo(name), "random", correlations)
        on_photo()
    methods = [
        MethodCalibration(*key, *(tuple(by_kind.get(kind, ())) for kind in ("noise", "random")))
        for key, by_kind in numbers.items()
    ]
    return Calibration(sample.seed, sample.names, float(np.mean(changed)), tuple(methods))


_Numbers = dict[tuple[str, str], dict[str, list[float]]]
"""Rank correlations by method and layer, and by kind."""


def first_class(answer: Result | RecordedPhoto) -> int | None:
    """Return the class that a model predicts first; None for a model without predictions."""
    return answer.predictions[0].class_index if answer.predictions else None


def _correlations(photo: RecordedPhoto, result: Result) -> list[float]:
    """Return the rank correlations of the maps of a changed photo with those of the photo."""
    maps = [cast("NDArray[np.float32]", explanation.heatmap) for explanation in result.explanations]
    pairs = zip(photo.explanations, maps, strict=False)
    return [map_numbers.rank_correlation(recorded.heatmap, heatmap) for recorded, heatmap in pairs]


def _result_of(name: str, outcome: Outcome) -> Result:
    if isinstance(outcome, CamserveError):
        outcome.message = f"calibration with {name}: {outcome.message}"
        raise outcome
    return outcome


def _add(numbers: _Numbers, photo: RecordedPhoto, kind: str, correlations: Sequence[float]) -> None:
    if len(correlations) != len(photo.explanations):
        raise Internal(f"calibration with {photo.name}: the server sent another number of maps than before")
    for explanation, correlation in zip(photo.explanations, correlations, strict=True):
        by_kind = numbers.setdefault((explanation.method, explanation.layer), {})
        if math.isfinite(correlation):
            by_kind.setdefault(kind, []).append(correlation)


@dataclass(frozen=True, slots=True)
class _Floor:
    """Changes of photos that should not change an explanation.

    Attributes:
        recording: The recording.
        sample: The photos.
        side: Pixels of the shorter side of a changed photo.
    """

    recording: Recording
    sample: Sample
    side: int

    def item(self, name: str, draw: int) -> ImageWithOptions:
        """Return the request for a photo with noise."""
        pixels = _pixels(self.sample.photos[name], self.side)
        generator = np.random.default_rng([self.sample.seed, draw, self.sample.names.index(name)])
        noisy = pixels + generator.normal(0, 255 * NOISE, pixels.shape)
        image = noisy.round().clip(0, 255).astype(np.uint8)
        return {"image": image, "targets": self.recording.photo(name).targets}


def _pixels(path: Path, side: int) -> NDArray[np.uint8]:
    """Return a photo as uint8 [H, W, 3], its shorter side at most this long: noise on a large one would average out."""
    try:
        data = read_regular(path, MAX_PHOTO_BYTES)
        with Image.open(io.BytesIO(data), formats=_FORMATS) as image:
            upright = ImageOps.exif_transpose(image).convert("RGB")
    except UnidentifiedImageError as error:
        raise InvalidArgument(f"calibration with {path}: {NOT_A_PHOTO}") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise InvalidArgument(f"calibration with {path}: {getattr(error, 'strerror', None) or error}") from error
    if min(upright.size) > side:
        ratio = side / min(upright.size)
        size = round(ratio * upright.width), round(ratio * upright.height)
        upright = upright.resize(size, reducing_gap=2)
    return np.asarray(upright)


def _random_weights(
    client: Client, recording: Recording, options: ExplainOptions, sample: Sample
) -> Iterator[tuple[str, list[float]]]:
    """Yield for each photo the rank correlations of its maps with those of the network with random weights."""
    metric = Metric("randomisation", {"stages": 2, "seed": sample.seed})

    def evaluate(name: str) -> list[float]:
        targets = recording.photo(name).targets
        own: ExplainOptions = {**options, "overlay": None, "heatmap": False, "targets": targets}
        evaluation = client.evaluate(sample.photos[name], metrics=metric, **own)
        curves = [reading.curves[0].y if reading.curves else () for reading in evaluation.readings]
        return [curve[-1] if curve else math.nan for curve in curves]

    pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="evaluate")
    try:
        yield from zip(sample.names, pool.map(evaluate, sample.names), strict=True)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)  # closing the client ends the calls that are running
