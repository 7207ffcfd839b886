"""Read the values of options: methods, targets, interventions and paths."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import click

import camserve
from camserve import dataset
from camserve._files.finding import scheme_of

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_METHOD_FLAGS = ("augmentation_smoothing", "eigen_smoothing", "per_channel")
"""Options of a method that need no value, in the order of Method's fields."""


def parse_method(text: str) -> camserve.Method:
    """Read NAME[:KEY=VALUE,...]."""
    name, _, rest = text.partition(":")
    items = [item.strip() for item in rest.split(",") if item.strip()]
    pairs = [item.partition("=") for item in items if item not in _METHOD_FLAGS]
    for key, equals, _value in pairs:
        if not equals:
            raise click.BadParameter(f"{key!r} is neither KEY=VALUE nor one of {', '.join(_METHOD_FLAGS)}")
    values = {key.strip(): value.strip() for key, _, value in pairs}
    channels = _parse_channels(values.pop("per_channel", ""))
    parameters = {key: parse_number_or_text(value) for key, value in values.items()}
    method = camserve.Method(name, parameters, *(option in items for option in _METHOD_FLAGS))
    return replace(method, per_channel=channels) if channels else method


def _parse_channels(text: str) -> tuple[int, ...]:
    try:
        return tuple(map(int, text.split("+"))) if text else ()
    except ValueError as error:
        raise click.BadParameter(f"per_channel is a channel or several, such as 3+7, not {text!r}") from error


def parse_target(text: str) -> camserve.TargetLike:
    """Read a class, CLASS vs CLASS, or KIND:VALUE."""
    kind, colon, rest = text.partition(":")
    if colon and kind in _TARGET_PARSERS:
        return _TARGET_PARSERS[kind](rest.strip())
    why, versus, why_not = text.partition(" vs ")
    if versus:
        return camserve.contrast(_parse_class(why), _parse_class(why_not))
    return _parse_class(why)


def _parse_finer(text: str) -> camserve.TargetLike:
    why, _, against = text.partition(" vs ")
    return camserve.finer(_parse_class(why), *map(_parse_class, against.split(",") if against else ()))


def _parser_with_box(
    create: Callable[[str | int, camserve.BoxLike | None], camserve.TargetLike],
) -> Callable[[str], camserve.TargetLike]:
    """Return a parser of CLASS or CLASS@LEFT,TOP,RIGHT,BOTTOM."""

    def parse(text: str) -> camserve.TargetLike:
        class_, _, edges = text.partition("@")
        return create(_parse_class(class_), _parse_edges(edges) if edges else None)

    return parse


def _parse_mask(text: str) -> camserve.TargetLike:
    class_, _, path = text.partition("@")
    if not path:
        raise click.BadParameter(f"{text!r} is not CLASS@MASK.png")
    return camserve.mask(_parse_class(class_), path)


def _parse_edges(text: str) -> tuple[float, float, float, float]:
    try:
        left, top, right, bottom = map(float, text.split(","))
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is not LEFT,TOP,RIGHT,BOTTOM") from error
    return left, top, right, bottom


def parse_box(text: str) -> camserve.Box:
    """Read LEFT,TOP,RIGHT,BOTTOM."""
    return camserve.Box(*_parse_edges(text))


_TARGET_PARSERS: dict[str, Callable[[str], camserve.TargetLike]] = {
    "probability": lambda text: camserve.probability(_parse_class(text)),
    "finer": _parse_finer,
    "similarity": camserve.similarity,
    "text": camserve.text,
    "segment": _parser_with_box(camserve.segment),
    "mask": _parse_mask,
    "detection": _parser_with_box(camserve.detection),
}


def parse_number_or_text(text: str) -> float | str:
    """Read a number, or else a word."""
    try:
        return float(text)
    except ValueError:
        return text


def _parse_class(text: str) -> int | str:
    text = text.strip()
    return int(text) if text.isdecimal() else text


def parse_bands(text: str) -> tuple[int, ...]:
    """Read BAND or RED,GREEN,BLUE."""
    return tuple(map(int, text.split(","))) if text else ()


def parse_intervention(text: str) -> camserve.Intervention:
    """Read CHANGE:LAYER[:OPTION...]."""
    change, _, rest = text.partition(":")
    layer, *parts = rest.split(":")
    pairs = [part.partition("=") for part in parts if part != "input"]
    try:
        options = {name: _INTERVENTION_OPTIONS[name](value) for name, _, value in pairs}
        return _INTERVENTIONS[change](layer, **options, **({"input": True} if "input" in parts else {}))
    except KeyError as error:
        known = _INTERVENTIONS if error.args[0] == change else [*_INTERVENTION_OPTIONS, "input"]
        raise click.BadParameter(f"{error.args[0]!r} in {text!r} is not one of {', '.join(known)}") from error
    except (TypeError, ValueError, camserve.InvalidArgument) as error:
        needed = "scale needs factor=, clip_gradient limit=, and channels= are numbers such as 12,40"
        raise click.BadParameter(f"cannot read {text!r}: {needed}") from error


_INTERVENTIONS: dict[str, Callable[..., camserve.Intervention]] = {
    function.__name__: function
    for function in (
        camserve.silence,
        camserve.scale,
        camserve.clamp,
        camserve.replace_mean,
        camserve.clip_gradient,
    )
}
_INTERVENTION_OPTIONS: dict[str, Callable[[str], object]] = {
    "channels": lambda text: [int(index) for index in text.split(",")],
    "factor": float,
    "minimum": float,
    "maximum": float,
    "limit": float,
}


class ImagePath(click.ParamType[str]):
    """A file, a folder, a glob with a match, or a URI."""

    name = "path"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        """Reject a path that does not exist before any work starts."""
        if not dataset.exists(value):
            self.fail(f"Path {value!r} does not exist.", param, ctx)
        return str(value)


class LocalFolder(click.Path):
    """A local folder."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """Reject a URI, which would become a local path."""
        if scheme_of(str(value)):
            reason = "the folder must be local; `camserve-server ray explain` writes to object stores"
            self.fail(f"{value} is a URI: {reason}", param, ctx)
        return super().convert(value, param, ctx)


def none_if_omitted(context: click.Context, option: click.Parameter, value: T) -> T | None:
    """Return None for an option that was not given, so that the server chooses its value."""
    is_default = context.get_parameter_source(option.name or "") is click.core.ParameterSource.DEFAULT
    return None if is_default else value
