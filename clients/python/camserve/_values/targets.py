"""Targets: the score to explain, such as a class, a contrast of two classes, or a detected object."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, SupportsIndex, TypeAlias, cast

from camserve._core.checks import invalid
from camserve._values.picture import Box

if TYPE_CHECKING:
    from camserve._values.prediction import Prediction

ClassLike: TypeAlias = "str | SupportsIndex"
BoxLike: TypeAlias = "Box | tuple[float, float, float, float]"


@dataclass(frozen=True, slots=True)
class Contrast:
    """The logit of one class minus the logit of another; each is a label or an index in the model's output.

    Attributes:
        why: The class to explain.
        why_not: The class to explain it against.

    Example:
        >>> camserve.contrast("tabby", "tiger cat")
        Contrast(why='tabby', why_not='tiger cat')
    """

    why: ClassLike
    why_not: ClassLike


@dataclass(frozen=True, slots=True)
class Probability:
    """The probability of a class instead of its logit.

    Attributes:
        why: The class to explain, a label or an index in the model's output.

    Example:
        >>> camserve.probability("tabby")
        Probability(why='tabby')
    """

    why: ClassLike


@dataclass(frozen=True, slots=True)
class Finer:
    """The logit of a class minus the weighted logits of similar classes.

    Attributes:
        why: The class to explain, a label or an index in the model's output.
        against: The similar classes; empty for the three whose logits are nearest.
        weight: Weight of the similar classes, 0 to 1.

    Example:
        >>> camserve.finer("tabby", "tiger cat", "lynx", weight=0.5)
        Finer(why='tabby', against=('tiger cat', 'lynx'), weight=0.5)
    """

    why: ClassLike
    against: tuple[ClassLike, ...] = ()
    weight: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Similarity:
    """The cosine similarity between the embeddings of the image and of another one.

    Attributes:
        image: The other image, in any form that ``Client.explain`` takes.

    Example:
        >>> camserve.similarity("cat.jpg").image
        'cat.jpg'
    """

    image: object


@dataclass(frozen=True, slots=True)
class Text:
    """The score that a model gives the image and a text.

    Attributes:
        text: The text.

    Example:
        >>> camserve.text("a photo of a cat")
        Text(text='a photo of a cat')
    """

    text: str


@dataclass(frozen=True, slots=True)
class Segment:
    """The mean logit of a class over a region of the image.

    Attributes:
        why: The class to explain, a label or an index in the model's output.
        region: The region in pixels of the photo; None for the pixels for which the model predicts the class.

    Example:
        >>> camserve.segment("cat", (10, 20, 110, 220))
        Segment(why='cat', region=(10, 20, 110, 220))
    """

    why: ClassLike
    region: BoxLike | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Mask:
    """The mean logit of a class over a part of the image that a mask shows.

    Attributes:
        why: The class to explain, a label or an index in the model's output.
        image: The mask, with the height and width of the photo: pixels that are not 0 are in the part.

    Example:
        >>> import numpy as np
        >>> part = np.zeros((300, 451), bool)
        >>> part[120:180, 40:90] = True
        >>> camserve.mask("cat", part).why
        'cat'
    """

    why: ClassLike
    image: object


@dataclass(frozen=True, slots=True)
class Detection:
    """The score of one detected object.

    Attributes:
        why: The class of the object, a label or an index in the model's output.
        box: Place of the object in pixels of the photo; None for the object with the highest score.

    Example:
        >>> camserve.detection("dog", (10, 20, 110, 220))
        Detection(why='dog', box=(10, 20, 110, 220))
    """

    why: ClassLike
    box: BoxLike | None = None


TargetLike: TypeAlias = (
    "str | SupportsIndex | Contrast | Probability | Finer | Similarity | Text | Segment | Mask | Detection | Prediction"
)


def contrast(why: ClassLike, why_not: ClassLike) -> Contrast:
    """Explain why the model predicts one class rather than another: the difference of their logits.

    In a segmentation it is the mean difference over the pixels for which the model predicts the first class.
    For a detector it is the difference of the scores that the first class's most certain object has in both classes.

    Args:
        why: The class to explain, by label or index.
        why_not: The class to explain it against.

    Example:
        >>> explanation = client.explain("cat.jpg", targets=camserve.contrast("tiger cat", "tabby")).explanations[0]
        >>> explanation.title, round(explanation.score, 1)  # the logit of the tiger cat is higher by this much
        ('tiger cat, not tabby', 0.6)
    """
    return Contrast(why, why_not)


def probability(why: ClassLike) -> Probability:
    """Explain the probability of a class instead of its logit.

    The probability is the softmax, or the sigmoid for a model whose task is "multilabel". A softmax
    depends on all classes: evidence against another class is evidence for this one.

    Args:
        why: The class to explain, by label or index.

    Example:
        >>> explanation = client.explain("cat.jpg", targets=camserve.probability("tiger cat")).explanations[0]
        >>> round(explanation.score, 2)
        0.32
    """
    return Probability(why)


def finer(why: ClassLike, *against: ClassLike, weight: float = 1.0) -> Finer:
    """Explain what distinguishes a class from similar ones (FinerCAM, Zhang et al. 2025).

    The score is the logit of the class minus ``weight`` times the mean of the other logits, weighted
    by the softmax over these other classes.

    Args:
        why: The class to explain, by label or index.
        against: The similar classes, up to 8. Default: the three whose logits are nearest.
        weight: Weight of the similar classes, 0 to 1.

    Example:
        >>> explanation = client.explain("cat.jpg", targets=camserve.finer("Egyptian cat")).explanations[0]
        >>> explanation.resolved  # the server chose three similar classes
        Finer(why=285, against=(282, 281, 287), weight=1.0)
    """
    return Finer(why, against, weight)


def similarity(image: object) -> Similarity:
    """Explain what makes the image similar to another one: the cosine between their embeddings.

    For a model that returns embeddings, or for a classifier or regressor that ends in a linear layer: its
    embedding is the input of that layer.

    Args:
        image: The other photo: a path, bytes, a PIL image or a ``uint8 [H, W, 3]`` RGB array.

    Example:
        >>> explanation = client.explain("cat.jpg", targets=camserve.similarity("cat.jpg")).explanations[0]
        >>> round(explanation.score, 2)  # the two photos are the same
        1.0
    """
    return Similarity(image)


def text(text: str) -> Text:
    """Explain the similarity of the image and a text, for models such as CLIP and SigLIP.

    The score is the model's own: the cosine between the two embeddings, times the model's scale, plus its bias.

    Args:
        text: The text, up to 1000 characters.

    Example:
        >>> targets = [camserve.text("red"), camserve.text("blue")]
        >>> red, blue = client.explain("cat.jpg", model="clip", targets=targets).explanations
        >>> red.score > blue.score  # the cat is ginger
        True
    """
    return Text(text)


def segment(why: ClassLike, region: BoxLike | None = None) -> Segment:
    """Explain a class of a semantic segmentation: its mean logit over a region.

    Args:
        why: The class to explain, by label or index.
        region: Left, top, right and bottom of the region, in pixels of the photo. Default: the pixels for which the
            model predicts the class.

    Example:
        >>> target = camserve.segment("red", (100, 50, 300, 250))
        >>> explanation = client.explain("cat.jpg", model="segmenter", targets=target).explanations[0]
        >>> explanation.title, explanation.resolved
        ('red', Segment(why=1, region=Box(left=100.0, top=50.0, right=300.0, bottom=250.0)))
    """
    return Segment(why, region)


def mask(why: ClassLike, image: object) -> Mask:
    """Explain a class of a semantic segmentation: its mean logit over a part of any shape.

    Args:
        why: The class to explain, by label or index.
        image: The part, as a mask with the height and width of the photo, in which every pixel that is not 0 is in
            the part: a ``bool`` or ``uint8 [H, W]`` array, a PIL image of mode "1" or "L", or a grey PNG file (a
            path or bytes).

    Example:
        >>> import numpy as np
        >>> part = np.zeros((300, 451), bool)  # the height and width of the photo
        >>> part[120:180, 40:90] = True
        >>> target = camserve.mask("red", part)
        >>> explanation = client.explain("cat.jpg", model="segmenter", targets=target).explanations[0]
        >>> explanation.title, explanation.verdict
        ('red', <Verdict.OK: 'OK'>)
    """
    return Mask(why, image)


def detection(why: ClassLike, box: BoxLike | None = None) -> Detection:
    """Explain the score of a detected object.

    Args:
        why: The object's class, by label or index.
        box: Left, top, right and bottom, in pixels of the photo; the detected object of the class that best matches
            the box is explained. Default: the class's object with the highest score. The box of a prediction is its
            own object: ``detection(found.class_index, found.box)``, for which you can also pass ``found`` itself.

    Example:
        >>> explanation = client.explain("cat.jpg", model="detector", targets=camserve.detection("red")).explanations[0]
        >>> explanation.target.box, round(explanation.score, 1)  # the reddish part is the whole photo
        (Box(left=0.0, top=0.0, right=451.0, bottom=300.0), 0.8)
    """
    return Detection(why, box)


def to_box(box: object, field: str) -> Box:
    """Return a ``BoxLike`` as a box.

    Raises:
        InvalidArgument: It does not have four numbers; the error names the field.
    """
    edges = (box.left, box.top, box.right, box.bottom) if isinstance(box, Box) else box
    try:
        return Box(*map(float, edges))  # type: ignore[call-overload]  # not yet checked
    except (TypeError, ValueError) as error:
        raise invalid(field, f"a box must be (left, top, right, bottom), not {box!r}") from error


def as_iterable(targets: TargetLike | Iterable[TargetLike] | None) -> Iterable[TargetLike]:
    """Return one target, several targets or None as an iterable of targets."""
    if targets is None:
        return ()
    is_number = getattr(targets, "ndim", None) == 0  # an array or a tensor without axes, which claims to be iterable
    if isinstance(targets, Iterable) and not isinstance(targets, str) and not is_number:
        return targets
    return (cast("TargetLike", targets),)
