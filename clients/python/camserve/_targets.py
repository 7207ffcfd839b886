"""What is to be explained: a class, one class and not another, a part of an image, an object, a likeness."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, SupportsIndex, TypeAlias

from camserve._errors import InvalidArgument
from camserve._picture import Box
from camserve.v1 import explain_pb2

ClassLike: TypeAlias = "str | SupportsIndex"
BoxLike: TypeAlias = "Box | tuple[float, float, float, float]"

_LARGEST_INDEX = 2**32 - 1


@dataclass(frozen=True, slots=True)
class Contrast:
    """Why one class and not another: labels, or indices in the model's output."""

    why: ClassLike
    why_not: ClassLike


@dataclass(frozen=True, slots=True)
class Probability:
    """The probability of a class instead of its logit."""

    why: ClassLike


@dataclass(frozen=True, slots=True)
class Finer:
    """Why one class and not those that resemble it."""

    why: ClassLike
    against: tuple[ClassLike, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Similarity:
    """How alike the image is to another one."""

    image: object


@dataclass(frozen=True, slots=True)
class Segment:
    """A class over a part of the image."""

    why: ClassLike
    region: BoxLike | None = None


@dataclass(frozen=True, slots=True)
class Detection:
    """One object that was found."""

    why: ClassLike
    box: BoxLike | None = None


TargetLike: TypeAlias = "str | SupportsIndex | Contrast | Probability | Finer | Similarity | Segment | Detection"


def contrast(why: ClassLike, why_not: ClassLike) -> Contrast:
    """Ask why the model says one class and not another.

    >>> contrast("tabby", "tiger cat")
    Contrast(why='tabby', why_not='tiger cat')

    Args:
        why: The class to explain, by label or index.
        why_not: The class to explain it against.
    """
    return Contrast(why, why_not)


def probability(why: ClassLike) -> Probability:
    """Ask for the probability of a class instead of its logit.

    It depends on every other class too: what speaks against those speaks for this one.

    >>> probability("tabby")
    Probability(why='tabby')

    Args:
        why: The class to explain, by label or index.
    """
    return Probability(why)


def finer(why: ClassLike, *against: ClassLike, weight: float = 1.0) -> Finer:
    """Ask what tells a class from those that resemble it (FinerCAM, Zhang et al. 2025).

    >>> finer("tabby")
    Finer(why='tabby', against=(), weight=1.0)

    Args:
        why: The class to explain, by label or index.
        against: The classes that resemble it. Default: the three whose logits are nearest.
        weight: How much they count, 0 to 1.
    """
    return Finer(why, against, weight)


def similarity(image: object) -> Similarity:
    """Ask what makes the image look like another one, to a model that answers with embeddings.

    Args:
        image: The other photo: a path, bytes, a PIL image or a ``uint8 [H, W, 3]`` RGB array.
    """
    return Similarity(image)


def segment(why: ClassLike, region: BoxLike | None = None) -> Segment:
    """Ask what makes a model of semantic segmentation see a class.

    >>> segment("cat", (10, 20, 110, 220)).region
    (10, 20, 110, 220)

    Args:
        why: The class to explain, by label or index.
        region: Where in the photo: left, top, right and bottom, in pixels. Default: wherever the model sees the class.
    """
    return Segment(why, region)


def detection(why: ClassLike, box: BoxLike | None = None) -> Detection:
    """Ask what makes a model of object detection find an object.

    >>> detection("dog")
    Detection(why='dog', box=None)

    Args:
        why: The object's class, by label or index.
        box: Where in the photo: left, top, right and bottom, in pixels; the object found that best matches it is
            explained. Default: the class's most certain object.
    """
    return Detection(why, box)


def message(given: TargetLike, field: str, read_image: Callable[[object], bytes]) -> explain_pb2.Target:
    """Return a target as protobuf.

    Args:
        given: By the caller.
        field: Its name, for errors.
        read_image: Turns whatever stands for an image into its file.

    Raises:
        InvalidArgument: It cannot be a target.
    """
    for kind, say in _KINDS.items():
        if isinstance(given, kind):
            return say(given, field, read_image)
    if isinstance(given, str):
        return explain_pb2.Target(label=given)
    return explain_pb2.Target(class_index=_index(given, field))


def _contrast(given: Contrast, field: str, _read: object) -> explain_pb2.Target:
    sides = explain_pb2.Contrast(
        why=_class_name(given.why, f"{field}.contrast.why"),
        why_not=_class_name(given.why_not, f"{field}.contrast.why_not"),
    )
    return explain_pb2.Target(contrast=sides)


def _probability(given: Probability, field: str, _read: object) -> explain_pb2.Target:
    if isinstance(given.why, str):
        return explain_pb2.Target(label=given.why, softmax=True)
    return explain_pb2.Target(class_index=_index(given.why, field), softmax=True)


def _finer(given: Finer, field: str, _read: object) -> explain_pb2.Target:
    said = explain_pb2.Finer(
        why=_class_name(given.why, f"{field}.finer.why"),
        against=[_class_name(one, f"{field}.finer.against[{at}]") for at, one in enumerate(given.against)],
        weight=given.weight,
    )
    return explain_pb2.Target(finer=said)


def _similarity(given: Similarity, field: str, read: Callable[[object], bytes]) -> explain_pb2.Target:
    try:
        return explain_pb2.Target(similarity=explain_pb2.Similarity(image=read(given.image)))
    except InvalidArgument as error:
        reason = next(iter(error.fields.values()), str(error))
        raise _bad(f"{field}.similarity.image", reason) from error


def _segment(given: Segment, field: str, _read: object) -> explain_pb2.Target:
    field = f"{field}.segment"
    said = explain_pb2.Segment(class_name=_class_name(given.why, f"{field}.class_name"))
    if given.region is not None:
        said.region.CopyFrom(_box(given.region, f"{field}.region"))
    return explain_pb2.Target(segment=said)


def _detection(given: Detection, field: str, _read: object) -> explain_pb2.Target:
    field = f"{field}.detection"
    said = explain_pb2.Detection(class_name=_class_name(given.why, f"{field}.class_name"))
    if given.box is not None:
        said.box.CopyFrom(_box(given.box, f"{field}.box"))
    return explain_pb2.Target(detection=said)


_KINDS: Mapping[type, Callable[[Any, str, Callable[[object], bytes]], explain_pb2.Target]] = {
    Contrast: _contrast,
    Probability: _probability,
    Finer: _finer,
    Similarity: _similarity,
    Segment: _segment,
    Detection: _detection,
}


def _class_name(given: ClassLike, field: str) -> explain_pb2.ClassName:
    if isinstance(given, str):
        return explain_pb2.ClassName(label=given)
    return explain_pb2.ClassName(class_index=_index(given, field))


def _index(given: object, field: str) -> int:
    if isinstance(given, bool) or not isinstance(given, SupportsIndex):
        kind = type(given).__name__
        raise _bad(field, f"a class is a label or an index, not {kind}")
    index = operator.index(given)
    if not 0 <= index <= _LARGEST_INDEX:
        raise _bad(field, f"a class index counts from 0, so it is not {index}")
    return index


def _box(given: object, field: str) -> explain_pb2.Box:
    edges = (given.left, given.top, given.right, given.bottom) if isinstance(given, Box) else given
    try:
        left, top, right, bottom = map(float, edges)  # type: ignore[call-overload]  # whatever it is
    except (TypeError, ValueError) as error:
        raise _bad(field, f"a box is left, top, right and bottom, not {given!r}") from error
    return explain_pb2.Box(left=left, top=top, right=right, bottom=bottom)


def resolved(said: explain_pb2.Target) -> TargetLike | None:
    """Read the target that an answer names, to ask for it again; None where it names none, or no image."""
    kind = said.WhichOneof("kind")
    read = _READ.get(kind or "")
    return read(said) if read else None


def _read_index(said: explain_pb2.Target) -> TargetLike:
    return Probability(said.class_index) if said.softmax else said.class_index


def _read_box(said: explain_pb2.Box) -> Box:
    return Box(said.left, said.top, said.right, said.bottom)


def _read_segment(said: explain_pb2.Target) -> Segment:
    segment = said.segment
    region = _read_box(segment.region) if segment.HasField("region") else None
    return Segment(segment.class_name.class_index, region)


_READ: Mapping[str, Callable[[explain_pb2.Target], TargetLike]] = {
    "class_index": _read_index,
    "contrast": lambda said: Contrast(said.contrast.why.class_index, said.contrast.why_not.class_index),
    "finer": lambda said: Finer(
        said.finer.why.class_index, tuple(one.class_index for one in said.finer.against), said.finer.weight
    ),
    "segment": _read_segment,
    "detection": lambda said: Detection(said.detection.class_name.class_index, _read_box(said.detection.box)),
}


def targets_of(given: TargetLike | Iterable[TargetLike] | None) -> Iterable[TargetLike]:
    """Return one target or several as several."""
    if given is None:
        return ()
    if isinstance(given, Iterable) and not isinstance(given, str):
        return given
    return (given,)


def _bad(field: str, reason: str) -> InvalidArgument:
    return InvalidArgument(f"{field}: {reason}", fields={field: reason})
