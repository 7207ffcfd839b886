"""Receipts: the inputs, versions and results of an explanation, from which it can be computed again."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

from camserve._core.errors import InvalidArgument
from camserve._core.files import read_regular, write_file

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from camserve._values.interventions import Intervention
    from camserve._values.verdict import Verdict


class ReceiptFormat(Protocol):
    """A format of receipts as text."""

    def to_json(self, receipt: Receipt) -> str:
        """Return a receipt as JSON."""
        ...

    def from_json(self, text: str | bytes) -> Receipt:
        """Read a receipt from JSON."""
        ...


@dataclass(frozen=True, eq=False, slots=True)
class Receipt:
    """Record of one explanation: its inputs, the versions that computed it, and its results.

    Attributes:
        model: Name of the model.
        source: Source of the model, such as "timm:resnet50".
        weights: Kind of the weights, as in ``Model``.
        digest: SHA-256 over the names and values of the model's parameters and buffers, in hexadecimal.
        precision: Precision of the computation, such as "float32".
        device: Device of the computation, such as "cpu".
        versions: Versions of the software, by name.
        image_sha256: SHA-256 of the photo's file, in hexadecimal.
        input_sha256: SHA-256 of the pixels that the model saw, in hexadecimal.
        method: Name of the method.
        parameters: Parameters of the method, defaults included.
        augmentation_smoothing: True if the map is the mean over augmented copies of the image.
        eigen_smoothing: True if the map is the first principal component instead of the sum.
        layers: Names of the layers; empty for methods that do not use a layer.
        fusion: "mean", "max", "product" or "sum" if the maps of several layers were fused, else None.
        target: The explained target: the API's message ``Target`` in protobuf's JSON, as the
            server resolved it.
        score: The score of the target.
        verdict: Result of the check that the map can be read as an explanation.
        heatmap: The raw map, float32 [h, w]; None if it was not requested.
        texts: The texts that were the model's classes, if it compares images with texts.
        value_range: The values of the photo that were taken as 0 and 1; None for those of their type.
        interventions: The changes to what layers returned.
        input_channel: Channel of the model's input that the map is of; None for a map of all channels.

    Example:
        >>> receipt = client.explain("cat.jpg", targets=["tabby"]).explanations[0].receipt
        >>> receipt.model, receipt.method, receipt.layers, receipt.target
        ('efficientnet_lite0', 'gradcam', ('bn2',), {'class_index': 281})
        >>> client.replay(receipt, "cat.jpg").same
        True
    """

    model: str
    source: str
    weights: str
    digest: str
    precision: str
    device: str
    versions: Mapping[str, str] = field(repr=False)
    image_sha256: str
    input_sha256: str
    method: str
    parameters: Mapping[str, float | str]
    augmentation_smoothing: bool
    eigen_smoothing: bool
    layers: tuple[str, ...]
    fusion: str | None
    target: Mapping[str, Any] = field(repr=False)
    score: float
    verdict: Verdict
    heatmap: NDArray[np.float32] | None = field(repr=False)
    texts: tuple[str, ...] = field(default=(), repr=False)
    value_range: tuple[float, float] | None = None
    interventions: tuple[Intervention, ...] = ()
    input_channel: int | None = None

    _format: ClassVar[ReceiptFormat]
    """The format of files, which ``_codec`` sets: it has messages of the wire."""

    @property
    def heatmap_sha256(self) -> str | None:
        """SHA-256 of the raw map's values as little-endian float32, row by row; None without a map.

        Example:
            >>> first, second = (client.explain("cat.jpg").explanations[0].receipt for _ in range(2))
            >>> first.heatmap_sha256 == second.heatmap_sha256  # the maps are equal in every bit
            True
        """
        return None if self.heatmap is None else hashlib.sha256(packed(self.heatmap)).hexdigest()

    def to_json(self) -> str:
        """Return the receipt as JSON, with the values of the map in base64.

        Example:
            >>> import json
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> content = json.loads(receipt.to_json())
            >>> content["format"], content["method"], content["verdict"]
            ('camserve receipt 1', 'gradcam', 'OK')
        """
        return self._format.to_json(self)

    @staticmethod
    def from_json(text: str | bytes) -> Receipt:
        """Read a receipt from JSON that ``to_json`` wrote.

        Raises:
            InvalidArgument: The text is not a receipt, or has a version that this client does not support.

        Example:
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> camserve.Receipt.from_json(receipt.to_json()).digest == receipt.digest
            True
        """
        return Receipt._format.from_json(text)

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the receipt to a file; return the path.

        Raises:
            OSError: The file cannot be written.

        Example:
            >>> receipt = client.explain("cat.jpg").explanations[0].receipt
            >>> receipt.save("why.receipt.json").name
            'why.receipt.json'
        """
        destination = Path(path)
        write_file(destination, self.to_json().encode())
        return destination

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Receipt:
        """Read a receipt from a file.

        Raises:
            InvalidArgument: The file cannot be read, or is not a receipt.

        Example:
            >>> client.explain("cat.jpg").explanations[0].receipt.save("why.receipt.json").name
            'why.receipt.json'
            >>> receipt = camserve.Receipt.load("why.receipt.json")
            >>> client.replay(receipt, "cat.jpg").same
            True
        """
        try:
            data = read_regular(path)
        except (OSError, ValueError) as error:  # ValueError: a path with a NUL
            reason = getattr(error, "strerror", None) or str(error)
            raise InvalidArgument(f"cannot read {os.fspath(path)!r}: {reason}") from error
        try:
            return Receipt.from_json(data)
        except InvalidArgument as error:
            raise InvalidArgument(f"{os.fspath(path)}: {error.message}") from error


def packed(heatmap: NDArray[np.float32]) -> bytes:
    """Return the values of a map as little-endian float32, row by row."""
    return np.ascontiguousarray(heatmap, "<f4").tobytes()
