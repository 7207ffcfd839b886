"""Results and photos for the tests of a diff, and a model of the fake server that looks at the bright parts."""

from __future__ import annotations

import hashlib
import io
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import numpy as np
from PIL import Image

from camserve import Box, Explanation, Photo, Prediction, Receipt, Verdict
from camserve._values.result import Result
from camserve._values.timing import Timing
from camserve.diff.calibration import Calibration, MethodCalibration
from camserve.diff.recording import Header
from camserve.v1 import explain_pb2

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from numpy.typing import NDArray

GRID = 6  # cells of a map along each axis
WIDTH, HEIGHT = 36, 24
LABELS = ("cat", "dog")
OPTIONS: dict[str, Any] = {"methods": [{"name": "gradcam"}], "topK": 1}
HEADER = Header("tiny", "timm:tiny", "default", "ab" * 32, "float32", "cd" * 32, 2, OPTIONS)
DIGEST = "ef" * 32
WHOLE = Photo(WIDTH, HEIGHT, Box(0, 0, WIDTH, HEIGHT))


def calibration_of(
    method: str = "gradcam", layer: str = "features", floor: Sequence[float] = (0.9,), random: Sequence[float] = (0.1,)
) -> Calibration:
    """Return a calibration of one method."""
    return Calibration(0, ("a.jpg",), 0.0, (MethodCalibration(method, layer, tuple(floor), tuple(random)),))


def write_photos(folder: Path, count: int, first: int = 0) -> Path:
    """Write photos of bright and dark blocks to a folder."""
    folder.mkdir(exist_ok=True)
    for index in range(first, first + count):
        write_photo(folder / f"{index:03}.png", index)
    return folder


def write_photo(path: Path, seed: int) -> None:
    """Write a photo."""
    blocks = np.random.default_rng(seed).integers(0, 256, (GRID, GRID, 1), np.uint8).repeat(3, 2)
    Image.fromarray(blocks).resize((WIDTH, HEIGHT), Image.Resampling.NEAREST).save(path, "PNG")


def result_of(*heatmaps: NDArray[np.float32], digest: str = DIGEST, method: str = "gradcam", **changes: Any) -> Result:
    """Return a result with an explanation for each map."""
    explanations = tuple(_explanation(heatmap, digest, method, **changes) for heatmap in heatmaps)
    predictions = (explanations[0].target,)
    return Result(predictions, explanations, "tiny", "id", WHOLE, Timing(1, 2, 3, 4, 5))


def _explanation(heatmap: NDArray[np.float32], digest: str, method: str, **changes: Any) -> Explanation:
    target = Prediction("cat", 0.75, 0, 2.5)
    receipt = Receipt(
        model="tiny", source="timm:tiny", weights="default", digest="ab" * 32, precision="float32", device="cpu",
        versions={"camserve": "1.0"}, image_sha256=digest, input_sha256=digest, method=method, parameters={},
        augmentation_smoothing=False, eigen_smoothing=False, layers=("features",), fusion=None,
        target={"class_index": 0}, score=2.5, verdict=Verdict.OK, heatmap=heatmap,
    )  # fmt: skip
    values: dict[str, Any] = {
        "method": method, "layer": "features", "target": target, "contrast": None, "score": 2.5,
        "verdict": Verdict.OK, "verdict_message": "", "parameters": {}, "photo": WHOLE, "heatmap": heatmap,
        "overlay_picture": None, "colored_picture": None, "receipt_or_none": receipt,
    }  # fmt: skip
    return Explanation(**{**values, **changes})


@dataclass
class Looks:
    """Models that look at the bright parts of a photo, with exceptions, and predict the class of its first block.

    Attributes:
        dark: Names of models that look at the dark parts.
        flipped: Names of models that predict the other class.
        blind: Names of models whose maps are flat.
        failing: SHA-256 of photos that a model cannot explain.
        stop_after: The number of photos after which the server refuses every other one.
        hold_after: The number of photos after which the server does not answer until ``release`` is set.
        release: See ``hold_after``.
        explained: The model and the SHA-256 of each photo, in the order of the requests.
        requests: The requests.
    """

    dark: set[str] = field(default_factory=set)
    flipped: set[str] = field(default_factory=set)
    blind: set[str] = field(default_factory=set)
    failing: set[str] = field(default_factory=set)
    stop_after: int = 1 << 30
    hold_after: int = 1 << 30
    release: threading.Event = field(default_factory=threading.Event)
    explained: list[tuple[str, str]] = field(default_factory=list)
    requests: list[explain_pb2.ExplainRequest] = field(default_factory=list)
    _lock: Any = field(default_factory=threading.Lock)

    def install(self, server: Any) -> None:
        """Answer the requests of a fake server."""
        server.answer = self.answer
        server.streams = [self._stream] * 100

    def _stream(self, requests: Iterator[Any], context: Any) -> Iterator[Any]:
        for each in requests:
            digest = hashlib.sha256(each.request.image).hexdigest()
            if len(self.explained) >= self.hold_after:
                self.release.wait()
                if not context.is_active():  # the client is gone
                    return
            with self._lock:
                if len(self.explained) >= self.stop_after:
                    context.abort(grpc.StatusCode.PERMISSION_DENIED, "the token has expired")
                self.explained.append((each.request.model, digest))
                self.requests.append(each.request)
            reply = explain_pb2.ExplainStreamResponse(request_id=each.request_id)
            if digest in self.failing:
                reply.error.code = grpc.StatusCode.INTERNAL.value[0]
                reply.error.message = "the model fails"
            else:
                reply.response.CopyFrom(self.answer(each.request))
            yield reply

    def answer(self, request: explain_pb2.ExplainRequest, request_id: str = "id") -> explain_pb2.ExplainResponse:
        """Return the response to a request."""
        pixels = np.asarray(Image.open(io.BytesIO(request.image)).convert("L"), np.float32)
        rows, columns = HEIGHT // GRID, WIDTH // GRID
        bright = pixels.reshape(GRID, rows, GRID, columns).mean((1, 3)).astype("<f4")
        values = np.zeros_like(bright) if request.model in self.blind else bright - 128
        values = -values if request.model in self.dark else values
        index = int(bright[0, 0] > 128) ^ (request.model in self.flipped)
        predicted = explain_pb2.Prediction(class_index=index, label=LABELS[index], probability=0.75, score=2.5)
        digest = hashlib.sha256(request.image).hexdigest()
        return explain_pb2.ExplainResponse(
            request_id=request_id,
            model=request.model,
            predictions=[predicted],
            explanations=[
                self._message(request, method, target, values)
                for method in request.methods
                for target in request.targets or [explain_pb2.Target(class_index=index)]
            ],
            photo=explain_pb2.Photo(
                width=WIDTH, height=HEIGHT, seen=explain_pb2.Box(left=0, top=0, right=WIDTH, bottom=HEIGHT)
            ),
            receipt=explain_pb2.Receipt(
                source="timm:tiny", weights="default", digest="ab" * 32, precision="float32", device="cpu",
                image_sha256=digest, input_sha256=digest, versions={"camserve": "1.0"},
            ),
        )  # fmt: skip

    def _message(
        self,
        request: explain_pb2.ExplainRequest,
        method: explain_pb2.Method,
        target: explain_pb2.Target,
        values: NDArray[np.float32],
    ) -> explain_pb2.Explanation:
        label = LABELS[target.class_index]
        flat = request.model in self.blind
        return explain_pb2.Explanation(
            method=method.name,
            layer="+".join(request.layers) or "features",
            target=explain_pb2.Prediction(class_index=target.class_index, label=label, probability=0.75, score=2.5),
            score=2.5,
            verdict=explain_pb2.VERDICT_FLAT if flat else explain_pb2.VERDICT_OK,
            heatmap=explain_pb2.Heatmap(height=GRID, width=GRID, data=values.tobytes()),
            resolved_target=target,
            parameters=method.parameters,
        )
