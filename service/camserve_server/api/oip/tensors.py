"""Tensors: the inputs of a message as files of images, and values as the bytes of outputs."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.api.codec.checks import short
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.arrays import Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging.opencv import cv2

IMAGE = "image"
"""The name of the one input."""

_PLANES = 3  # red, green, blue
_TOGETHER = 65_536  # numbers turned into an array before others have a turn: below a millisecond

Input: TypeAlias = inference_pb2.ModelInferRequest.InferInputTensor
Values: TypeAlias = bytes | Sequence[Any]
"""A tensor's values: as they lie in memory, or one by one."""


def read_images(request: inference_pb2.ModelInferRequest, limits: Limits) -> list[bytes]:
    """Return the images of a message, each as a file; pixels become a BMP file, which loses nothing.

    Args:
        request: as it came.
        limits: on what one request may ask for.

    Raises:
        InvalidArgument: there is no such tensor, or it is not as it says.
    """
    _check_inputs(request)
    (tensor,) = request.inputs
    if tensor.datatype not in _READERS:
        raise InvalidArgument(
            f'{IMAGE} is BYTES (files), UINT8 or FP32 (pixels), not "{short(tensor.datatype)}"',
            field="inputs[0].datatype",
        )
    if min(tensor.shape, default=0) < 1:
        raise InvalidArgument(f"nothing has the shape {list(tensor.shape)}", field="inputs[0].shape")
    return _READERS[tensor.datatype](tensor, _values_of(request, tensor), limits)


def _check_inputs(request: inference_pb2.ModelInferRequest) -> None:
    names = [tensor.name for tensor in request.inputs]
    for place, tensor in enumerate(request.inputs):
        if tensor.name != IMAGE:
            raise InvalidArgument(
                f'unknown input "{short(tensor.name)}": there is {IMAGE}; method, target, layer are parameters of the '
                "request",
                field=f"inputs[{place}].name",
            )
        check_plain(tensor.parameters, f"inputs[{place}].parameters")
    if len(names) != 1:
        raise InvalidArgument(f"give one input, {IMAGE}: a tensor may hold several", field="inputs")


def check_plain(parameters: Mapping[str, Any], field: str) -> None:
    """Refuse a tensor that is asked to be anything but its values.

    What else its parameters say is of no consequence in gRPC, such as "binary_data_size", which KServe's SDK writes
    for both of its protocols, and is ignored.

    Raises:
        InvalidArgument: it is to be in shared memory, or the classes of another.
    """
    for name in parameters:
        if name.startswith("shared_memory_"):
            words = f'a tensor takes no parameter "{short(name)}": send and read its values, there is no shared memory'
            raise InvalidArgument(words, field=field)
        if name == "classification":
            words = 'there is no "classification" of an output: class_id, label and score are outputs of their own'
            raise InvalidArgument(words, field=field)


def _values_of(request: inference_pb2.ModelInferRequest, tensor: Input) -> Values:
    """Return the values of the only input, from whichever of the two places they are in."""
    kind = _CONTENTS[tensor.datatype]
    typed: Sequence[Any] = getattr(tensor.contents, kind)
    if not request.raw_input_contents:
        return typed
    if len(request.raw_input_contents) != 1 or tensor.HasField("contents"):
        raise InvalidArgument(
            "raw_input_contents has the values of every input, and then no input has contents",
            field="raw_input_contents",
        )
    return request.raw_input_contents[0]


_CONTENTS = {"BYTES": "bytes_contents", "UINT8": "uint_contents", "FP32": "fp32_contents"}


def _read_files(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    shape = list(tensor.shape)
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
        raise InvalidArgument(f"files have the shape [N] or [N,1], not {shape}", field="inputs[0].shape")
    count = _check_count(shape[0], limits)
    files = list(_elements(values)) if isinstance(values, bytes) else list(values)
    if len(files) != count:
        raise InvalidArgument(
            f"{len(files)} files, and the shape says {count}: in raw_input_contents each follows its length, as an "
            "unsigned number of four bytes, little-endian",
            field="inputs[0]",
        )
    return files


def _elements(raw: bytes) -> Iterator[bytes]:
    at = 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        at += 4 + length
        if at > len(raw):
            return  # they are counted by who asked
        yield raw[at - length : at]


def _check_count(count: int, limits: Limits) -> int:
    if count > limits.images:
        raise InvalidArgument(f"{count:,} images, and {limits.images} is the limit", field="inputs[0].shape")
    return count


def _read_bytes(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    return _packed(tensor, _array(values, np.dtype(np.uint8), tensor), limits)


def _read_floats(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    array = _array(values, np.dtype("<f4"), tensor)
    if not (array.min() >= 0 and array.max() <= 1):  # NaN fails this too
        raise InvalidArgument(
            "FP32 pixels are 0 to 1, RGB, before any mean and standard deviation: the server does what the model needs",
            field="inputs[0]",
        )
    return _packed(tensor, np.rint(array * np.float32(255)).astype(np.uint8), limits)


def _array(values: Values, kind: "np.dtype[Any]", tensor: Input) -> NDArray[Any]:
    """Return the values in a row.

    Raises:
        InvalidArgument: they are more or fewer than the shape says, or too large for their kind.
    """
    count = len(values) / kind.itemsize if isinstance(values, bytes) else len(values)
    if count != math.prod(tensor.shape):
        raise InvalidArgument(f"{count:,g} values do not fill the shape {list(tensor.shape)}", field="inputs[0]")
    if isinstance(values, bytes):
        return np.frombuffer(values, kind)
    return np.concatenate([_part(values[at : at + _TOGETHER], kind) for at in range(0, len(values), _TOGETHER)])


def _part(values: Sequence[Any], kind: "np.dtype[Any]") -> NDArray[Any]:
    part = np.array(values)
    if kind == np.uint8 and part.max() > np.iinfo(kind).max:
        raise InvalidArgument("UINT8 values are 0 to 255", field="inputs[0].contents")
    return part.astype(kind)


def _packed(tensor: Input, values: NDArray[np.uint8], limits: Limits) -> list[bytes]:
    shape = list(tensor.shape)
    if len(shape) not in (3, 4) or _PLANES not in (shape[-1], shape[-3]):
        raise InvalidArgument(
            f"pixels have the shape [N,H,W,3] or [N,3,H,W], or that of one image, and not {shape}",
            field="inputs[0].shape",
        )
    images = values.reshape(-1, *shape[-3:])
    _check_count(len(images), limits)
    last = images if shape[-1] == _PLANES else images.transpose(0, 2, 3, 1)
    return [_file(image) for image in last]


def _file(image: Pixels) -> bytes:
    return cv2.imencode(".bmp", np.ascontiguousarray(image[:, :, ::-1]))[1].tobytes()


_READERS: Mapping[str, Callable[[Input, Values, Limits], list[bytes]]] = {
    "BYTES": _read_files,
    "UINT8": _read_bytes,
    "FP32": _read_floats,
}


def element(data: bytes) -> bytes:
    """Return an element of a tensor of BYTES: after its length.

    Example:
        >>> element(b"cat").hex(" ")
        '03 00 00 00 63 61 74'
    """
    return struct.pack("<I", len(data)) + data
