"""Tensors: input tensors as image files, and values as the bytes of output tensors."""

import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from camserve_server.api.codec.checks import shorten
from camserve_server.api.oip.v2 import inference_pb2
from camserve_server.core.arrays import Pixels
from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging.opencv import cv2

IMAGE = "image"
"""Name of the only input."""

_CHANNELS = 3  # red, green, blue
_CHUNK = 65_536  # numbers converted to an array at once, in less than a millisecond, before other threads may run

Input: TypeAlias = inference_pb2.ModelInferRequest.InferInputTensor
Values: TypeAlias = bytes | Sequence[Any]
"""Values of a tensor: its bytes in memory, or a sequence of numbers or files."""


def read_images(request: inference_pb2.ModelInferRequest, limits: Limits) -> list[bytes]:
    """Return the images of a request as files. Pixels become a BMP file, which is lossless.

    Args:
        request: the request.
        limits: limits on one request.

    Raises:
        InvalidArgument: the tensor is unknown, or its values do not fit its datatype or shape.
    """
    _check_inputs(request)
    (tensor,) = request.inputs
    if tensor.datatype not in _READERS:
        raise InvalidArgument(
            f'{IMAGE} is BYTES (files), UINT8 or FP32 (pixels), not "{shorten(tensor.datatype)}"',
            field="inputs[0].datatype",
        )
    if min(tensor.shape, default=0) < 1:
        raise InvalidArgument(f"the shape {list(tensor.shape)} has no elements", field="inputs[0].shape")
    return _READERS[tensor.datatype](tensor, _values_of(request, tensor), limits)


def _check_inputs(request: inference_pb2.ModelInferRequest) -> None:
    names = [tensor.name for tensor in request.inputs]
    for index, tensor in enumerate(request.inputs):
        if tensor.name != IMAGE:
            raise InvalidArgument(
                f'unknown input "{shorten(tensor.name)}": the only input is {IMAGE}; method, target and layer are '
                "parameters of the request",
                field=f"inputs[{index}].name",
            )
        check_tensor_parameters(tensor.parameters, f"inputs[{index}].parameters")
    if len(names) != 1:
        raise InvalidArgument(f"send one input, {IMAGE}, which may hold several images", field="inputs")


def check_tensor_parameters(parameters: Mapping[str, Any], field: str) -> None:
    """Refuse parameters of a tensor that would change its values.

    Other parameters have no effect in gRPC and are ignored, such as "binary_data_size", which KServe's SDK sends over
    HTTP and gRPC alike.

    Raises:
        InvalidArgument: a parameter requests shared memory, or the classification of an output.
    """
    for name in parameters:
        if name.startswith("shared_memory_"):
            message = f'a tensor has no parameter "{shorten(name)}": shared memory is not supported, send the values'
            raise InvalidArgument(message, field=field)
        if name == "classification":
            message = '"classification" is not supported: class_id, label and score are outputs of their own'
            raise InvalidArgument(message, field=field)


def _values_of(request: inference_pb2.ModelInferRequest, tensor: Input) -> Values:
    """Return the values of the only input, from its contents or from raw_input_contents."""
    kind = _CONTENTS[tensor.datatype]
    typed: Sequence[Any] = getattr(tensor.contents, kind)
    if not request.raw_input_contents:
        return typed
    if len(request.raw_input_contents) != 1 or tensor.HasField("contents"):
        raise InvalidArgument(
            "raw_input_contents must have one element for each input, and then no input may have contents",
            field="raw_input_contents",
        )
    return request.raw_input_contents[0]


_CONTENTS = {"BYTES": "bytes_contents", "UINT8": "uint_contents", "FP32": "fp32_contents"}


def _read_files(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    shape = list(tensor.shape)
    if len(shape) not in (1, 2) or shape[1:] not in ([], [1]):
        raise InvalidArgument(f"files have the shape [N] or [N,1], not {shape}", field="inputs[0].shape")
    count = _check_count(shape[0], limits)
    files = list(islice(_elements(values) if isinstance(values, bytes) else values, count + 1))
    if len(files) != count:
        found = "more than" if len(files) > count else f"{len(files)} of"
        raise InvalidArgument(
            f"the tensor has {found} the {count} files of its shape: in raw_input_contents each file follows its "
            "length as an unsigned little-endian number of four bytes",
            field="inputs[0]",
        )
    return files


def _elements(raw: bytes) -> Iterator[bytes]:
    """Yield the elements of a tensor of BYTES; one that is cut off is left out, which the caller notices."""
    at = 0
    while at < len(raw):
        length = int.from_bytes(raw[at : at + 4], "little")
        at += 4 + length
        if at > len(raw):
            return
        yield raw[at - length : at]


def _check_count(count: int, limits: Limits) -> int:
    if count > limits.images:
        raise InvalidArgument(f"{count:,} images, and {limits.images} is the limit", field="inputs[0].shape")
    return count


def _read_bytes(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    return _to_files(tensor, _array(values, np.dtype(np.uint8), tensor), limits)


def _read_floats(tensor: Input, values: Values, limits: Limits) -> list[bytes]:
    array = _array(values, np.dtype("<f4"), tensor)
    if not (array.min() >= 0 and array.max() <= 1):  # NaN fails this too
        raise InvalidArgument(
            "FP32 pixels are RGB values of 0 to 1, not normalised: the server normalises them as the model needs it",
            field="inputs[0]",
        )
    return _to_files(tensor, np.rint(array * np.float32(255)).astype(np.uint8), limits)


def _array(values: Values, kind: "np.dtype[Any]", tensor: Input) -> NDArray[Any]:
    """Return the values as an array of one dimension.

    Raises:
        InvalidArgument: the number of values does not fit the shape, or a value is too large for the datatype.
    """
    count = len(values) / kind.itemsize if isinstance(values, bytes) else len(values)
    if count != math.prod(tensor.shape):
        raise InvalidArgument(f"{count:,g} values do not fill the shape {list(tensor.shape)}", field="inputs[0]")
    if isinstance(values, bytes):
        return np.frombuffer(values, kind)
    return np.concatenate([_to_array(values[at : at + _CHUNK], kind) for at in range(0, len(values), _CHUNK)])


def _to_array(values: Sequence[Any], kind: "np.dtype[Any]") -> NDArray[Any]:
    array = np.array(values)
    if kind == np.uint8 and array.max() > np.iinfo(kind).max:
        raise InvalidArgument("UINT8 values are 0 to 255", field="inputs[0].contents")
    return array.astype(kind)


def _to_files(tensor: Input, values: NDArray[np.uint8], limits: Limits) -> list[bytes]:
    shape = list(tensor.shape)
    if len(shape) not in (3, 4) or _CHANNELS not in (shape[-1], shape[-3]):
        raise InvalidArgument(
            f"pixels have the shape [N,H,W,3] or [N,3,H,W], for one image also without N, and not {shape}",
            field="inputs[0].shape",
        )
    images = values.reshape(-1, *shape[-3:])
    _check_count(len(images), limits)
    channels_last = images if shape[-1] == _CHANNELS else images.transpose(0, 2, 3, 1)
    return [_to_file(image) for image in channels_last]


def _to_file(image: Pixels) -> bytes:
    return cv2.imencode(".bmp", np.ascontiguousarray(image[:, :, ::-1]))[1].tobytes()


_READERS: Mapping[str, Callable[[Input, Values, Limits], list[bytes]]] = {
    "BYTES": _read_files,
    "UINT8": _read_bytes,
    "FP32": _read_floats,
}


def element(data: bytes) -> bytes:
    """Return an element of a tensor of BYTES: its length as four little-endian bytes, then its data.

    Example:
        >>> element(b"cat").hex(" ")
        '03 00 00 00 63 61 74'
    """
    return struct.pack("<I", len(data)) + data
