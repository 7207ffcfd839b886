"""Interventions: changes to what the layers of a model return while a request is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex

from camserve._core.checks import indices

if TYPE_CHECKING:
    from collections.abc import Iterable


@dataclass(frozen=True, slots=True, repr=False)
class Intervention:
    """A change to what a layer returns, made by a function such as ``silence``.

    Attributes:
        change: Name of the change: "silence", "scale", "clamp", "replace_mean" or "clip_gradient".
        layer: Name of the layer.
        channels: The channels that change; empty for all.
        input: True if the layer's input changes instead of its output.
        factor: The factor of ``scale``.
        minimum: The minimum of ``clamp``; None without one.
        maximum: The maximum of ``clamp``; None without one.
        limit: The limit of ``clip_gradient``.

    Example:
        >>> intervention = camserve.silence("bn2", channels=[287])
        >>> intervention.change, intervention.layer, intervention.channels
        ('silence', 'bn2', (287,))
        >>> intervention
        silence('bn2', channels=[287])
    """

    change: str
    layer: str
    channels: tuple[int, ...] = ()
    input: bool = False
    factor: float | None = None
    minimum: float | None = None
    maximum: float | None = None
    limit: float | None = None

    def __repr__(self) -> str:
        """Return the call that makes this value."""
        numbers = {name: getattr(self, name) for name in ("factor", "minimum", "maximum", "limit")}
        parts = [repr(self.layer), *(f"{name}={value!r}" for name, value in numbers.items() if value is not None)]
        parts += [f"channels={list(self.channels)}"] if self.channels else []
        return f"{self.change}({', '.join(parts + ['input=True'] * self.input)})"


def silence(layer: str, channels: Iterable[SupportsIndex] = (), *, input: bool = False) -> Intervention:  # noqa: A002 -- the field's name
    """Set channels of a layer to zero: what would the model predict without them?

    A layer's channels are the second axis of a convolution's output [B, C, h, w], and the last one of a
    transformer's [B, N, C] or [B, h, w, C].

    Args:
        layer: Name of the layer, as ``Client.layers`` lists them.
        channels: Indices of the channels, from 0, each once, up to 8192. Default: all channels.
        input: True to change the first tensor that the layer receives, instead of the one that it returns.

    Raises:
        InvalidArgument: The channels are not a list of indices. ``explain`` raises it for a channel that the
            layer does not have, and ``NotFound`` for an unknown layer.

    Example:
        >>> result = client.explain("cat.jpg", interventions=[camserve.silence("bn2", channels=[216, 826])])
        >>> [round(predictions[0].probability, 2) for predictions in (result.unchanged_predictions, result.predictions)]
        [0.38, 0.44]
    """
    return Intervention("silence", layer, indices(channels, "channels"), input)


def scale(layer: str, factor: float, channels: Iterable[SupportsIndex] = (), *, input: bool = False) -> Intervention:  # noqa: A002 -- as above
    """Multiply channels of a layer by a factor.

    Args:
        layer: Name of the layer.
        factor: The factor, a finite number.
        channels: The channels, as for ``silence``.
        input: As for ``silence``.

    Raises:
        InvalidArgument: As for ``silence``.

    Example:
        >>> result = client.explain("cat.jpg", interventions=[camserve.scale("bn2", 2.0)])
        >>> [round(predictions[0].probability, 2) for predictions in (result.unchanged_predictions, result.predictions)]
        [0.38, 0.51]
    """
    return Intervention("scale", layer, indices(channels, "channels"), input, factor=factor)


def clamp(
    layer: str,
    minimum: float | None = None,
    maximum: float | None = None,
    channels: Iterable[SupportsIndex] = (),
    *,
    input: bool = False,  # noqa: A002 -- as above
) -> Intervention:
    """Limit the values of channels to a range.

    Args:
        layer: Name of the layer.
        minimum: Smaller values become this one. Default: no minimum, and then there must be a maximum.
        maximum: Larger values become this one, which is at least the minimum. Default: no maximum.
        channels: The channels, as for ``silence``.
        input: As for ``silence``.

    Raises:
        InvalidArgument: As for ``silence``.

    Example:
        >>> result = client.explain("cat.jpg", interventions=[camserve.clamp("bn2", maximum=1)])
        >>> [round(predictions[0].score, 1) for predictions in (result.unchanged_predictions, result.predictions)]
        [8.9, 3.2]
    """
    return Intervention("clamp", layer, indices(channels, "channels"), input, minimum=minimum, maximum=maximum)


def replace_mean(layer: str, channels: Iterable[SupportsIndex] = (), *, input: bool = False) -> Intervention:  # noqa: A002 -- as above
    """Replace channels by their means over the grid of the image, which removes all information about positions.

    The tokens before and after a transformer's grid, such as the class token, stay as they are. A layer
    without a grid is refused.

    Args:
        layer: Name of the layer.
        channels: The channels, as for ``silence``.
        input: As for ``silence``.

    Raises:
        InvalidArgument: As for ``silence``.

    Example:
        >>> result = client.explain("cat.jpg", interventions=[camserve.replace_mean("bn2")])
        >>> result.explanations[0].verdict  # without places, the map is the same everywhere
        <Verdict.FLAT: 'FLAT'>
    """
    return Intervention("replace_mean", layer, indices(channels, "channels"), input)


def clip_gradient(layer: str, limit: float, channels: Iterable[SupportsIndex] = ()) -> Intervention:
    """Limit the gradient at a layer's output, value by value, to a range around zero.

    The predictions stay the same. The maps of this layer, and of layers before it, are computed from the
    limited gradient.

    Args:
        layer: Name of the layer.
        limit: The largest absolute value, above 0.
        channels: The channels, as for ``silence``.

    Raises:
        InvalidArgument: As for ``silence``.

    Example:
        >>> clipped = camserve.clip_gradient("bn2", 1e-5)
        >>> result = client.explain("cat.jpg", interventions=[clipped])
        >>> [round(predictions[0].score, 1) for predictions in (result.unchanged_predictions, result.predictions)]
        [8.9, 8.9]
        >>> result.explanations[0].scale < client.explain("cat.jpg").explanations[0].scale
        True
    """
    return Intervention("clip_gradient", layer, indices(channels, "channels"), limit=limit)
