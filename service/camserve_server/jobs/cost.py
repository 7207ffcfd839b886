"""Count the rows and maps of a method before it runs."""

from collections.abc import Sequence
from dataclasses import replace

from camserve_server.imaging.values import View
from camserve_server.methods import METHODS
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import LayerInfo, ModelInfo

AUGMENTED = tuple(View(mirrored, gain) for mirrored in (False, True) for gain in (0.9, 1.0, 1.1))
"""The views over which augmentation smoothing takes the mean."""

MAX_HEAVY_MAPS = 8  # heavy maps of one row; they take 4 s if one takes half a second
HEAVY_COST = 4  # maps that a heavy map counts as, until its cost is measured


def runs_unchanged(call: MethodCall) -> bool:
    """Return True for a CAM of the unchanged image: any number of these can share one pass."""
    return METHODS[call.name].answered_by == "cam" and not call.augmented


def is_plain_gradient(call: MethodCall) -> bool:
    """Return True for a method that uses the gradient at the unchanged image."""
    return METHODS[call.name].answered_by == "saliency" and not call.augmented


def wants_features(call: MethodCall) -> bool:
    """Return True for a method that needs the layers' feature maps for the unchanged image."""
    return METHODS[call.name].needs_features and not call.augmented


def is_heavy(call: MethodCall) -> bool:
    """Return True for a method whose map takes long on any model, because it decomposes a matrix."""
    return call.eigen or METHODS[call.name].decomposes


def rows_shared(calls: Sequence[MethodCall], layers: int) -> tuple[tuple[MethodCall, ...], ...]:
    """Divide the methods that a pass over the unchanged image answers among rows, so that no row has many heavy maps.

    Args:
        calls: the methods, in order.
        layers: the number of layers that each method makes a map of.
    """
    heavy = [call for call in calls if is_heavy(call)]
    light = [call for call in calls if call not in heavy]
    per_row = max(1, MAX_HEAVY_MAPS // max(1, layers))
    parts = [tuple(heavy[start : start + per_row]) for start in range(0, len(heavy), per_row)] or [()]
    return (*light, *parts[0]), *parts[1:]


def maps_of(calls: Sequence[MethodCall], layers: Sequence[str]) -> int:
    """Return the number of maps that a row makes; a heavy map counts as HEAVY_COST maps."""
    return max(1, sum(HEAVY_COST if is_heavy(call) else 1 for call in calls)) * max(1, len(layers))


def rows_of(call: MethodCall, channels: Sequence[int], size: tuple[int, int]) -> int:
    """Return the number of rows that a method runs for one target, without the row of the unchanged image.

    Args:
        call: a method that the pass over the unchanged image does not answer.
        channels: the number of channels of each layer.
        size: height and width of the model's input.
    """
    if call.augmented:
        return len(AUGMENTED) * _rows_alone(replace(call, augmented=False), channels, size)
    return METHODS[call.name].rows(
        call.parameters, channels, size, lambda name: _rows_alone(default_call(name), channels, size)
    )


def channels_of(model: ModelInfo, layers: Sequence[str]) -> list[int]:
    """Return the number of channels of each layer."""
    return [_channels(model.layers[name]) for name in layers]


def _channels(layer: LayerInfo) -> int:
    axis = {"nchw": 1, "nhwc": 3, "tokens": 2}[layer.layout.axes] if layer.layout else 1
    return layer.shape[axis]


def _rows_alone(call: MethodCall, channels: Sequence[int], size: tuple[int, int]) -> int:
    """Return the number of rows of a method in a run of its own, with the row of the unchanged image."""
    return 1 + (0 if runs_unchanged(call) or is_plain_gradient(call) else rows_of(call, channels, size))


def default_call(name: str) -> MethodCall:
    """Return a call of a method with its default parameters."""
    return MethodCall(name, {parameter.name: parameter.default for parameter in METHODS[name].parameters})
