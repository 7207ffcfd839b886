"""What a method costs in rows, before any is run."""

from collections.abc import Sequence
from dataclasses import replace

from camserve_server.imaging.values import View
from camserve_server.methods import METHODS
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import LayerInfo, ModelInfo

AUGMENTED = tuple(View(mirrored, gain) for mirrored in (False, True) for gain in (0.9, 1.0, 1.1))
"""The views that augmentation smoothing takes the mean over."""

HEAVY_MAPS = 8  # heavy maps that a row makes at most; they take 4 s if one takes half a second
HEAVY = 4  # maps that one heavy map counts as, until its cost was measured


def is_clean(call: MethodCall) -> bool:
    """Tell whether a call is a CAM of the image as it is, which any number of others can share a pass with."""
    return METHODS[call.name].answered_by == "cam" and not call.augmented


def is_plain_gradient(call: MethodCall) -> bool:
    """Tell whether a call takes the gradient at the image as it is."""
    return METHODS[call.name].answered_by == "saliency" and not call.augmented


def wants_features(call: MethodCall) -> bool:
    """Tell whether a call starts, or ends, with the feature maps that layers have for the image as it is."""
    return METHODS[call.name].needs_features and not call.augmented


def is_heavy(call: MethodCall) -> bool:
    """Return whether a map takes long to compute for any model, because it decomposes a matrix."""
    return call.eigen or METHODS[call.name].decomposes


def rows_shared(calls: Sequence[MethodCall], layers: int) -> tuple[tuple[MethodCall, ...], ...]:
    """Divide the calls that a pass over the unchanged image answers among rows, so that no row makes many heavy maps.

    Args:
        calls: at least one, in order.
        layers: how many layers each call makes a map of.
    """
    heavy = [call for call in calls if is_heavy(call)]
    light = [call for call in calls if call not in heavy]
    each = max(1, HEAVY_MAPS // max(1, layers))
    dealt = [tuple(heavy[start : start + each]) for start in range(0, len(heavy), each)] or [()]
    return (*light, *dealt[0]), *dealt[1:]


def maps_of(calls: Sequence[MethodCall], layers: Sequence[str]) -> int:
    """Return how many maps a row makes of its image; a heavy map counts as several."""
    return max(1, sum(HEAVY if is_heavy(call) else 1 for call in calls)) * max(1, len(layers))


def rows_of(call: MethodCall, channels: Sequence[int], size: tuple[int, int]) -> int:
    """Return how many rows a call costs for one target, beside the one of the image as it is.

    Args:
        call: that the pass over the image as it is does not answer.
        channels: how many each layer has.
        size: height and width of the model's input.
    """
    if call.augmented:
        return len(AUGMENTED) * _apart(replace(call, augmented=False), channels, size)
    return METHODS[call.name].rows(call.parameters, channels, size, lambda name: _apart(part(name), channels, size))


def channels_of(model: ModelInfo, layers: Sequence[str]) -> list[int]:
    """Return how many channels the layers have."""
    return [_channels(model.layers[name]) for name in layers]


def _channels(layer: LayerInfo) -> int:
    axis = {"nchw": 1, "nhwc": 3, "tokens": 2}[layer.layout.axes] if layer.layout else 1
    return layer.shape[axis]


def _apart(call: MethodCall, channels: Sequence[int], size: tuple[int, int]) -> int:
    """Return what a call costs that is examined by itself, with a pass over the image as it is of its own."""
    return 1 + (0 if is_clean(call) or is_plain_gradient(call) else rows_of(call, channels, size))


def part(name: str) -> MethodCall:
    """Call a method that another one is made of, with its defaults."""
    return MethodCall(name, {parameter.name: parameter.default for parameter in METHODS[name].parameters})
