"""Predictions."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from camserve._values.picture import Box


@dataclass(frozen=True, slots=True)
class Prediction:
    """A predicted class or object. It is also a target: pass it as one to explain it.

    Attributes:
        label: Label of the class; "class 7" if the model has no labels.
        probability: Probability, 0 to 1. Depending on the model's task it is the softmax, the sigmoid
            ("multilabel"), the mean softmax over the pixels with this class ("segment"), the score
            of an object ("detect"), or 0 ("regress").
        class_index: Index in the model's output, from 0.
        score: The logit; for a segmentation its mean over the pixels with this class, for an object
            its score.
        box: Box of a detected object in the photo, else None.
        area: For a class of a segmentation, the share of the model's input with this class, 0 to 1.

    Example:
        >>> prediction = client.explain("cat.jpg").predictions[0]
        >>> prediction.label, prediction.class_index, round(prediction.probability, 2), round(prediction.score, 1)
        ('Egyptian cat', 285, 0.38, 8.9)
        >>> client.explain("cat.jpg", targets=prediction).explanations[0].title
        'Egyptian cat'
    """

    label: str
    probability: float
    class_index: int
    score: float
    box: Box | None = None
    area: float = 0.0

    @property
    def name(self) -> str:
        """The label, or "class 7" if there is no label.

        Example:
            >>> camserve.Prediction(label="", probability=0.9, class_index=7, score=2.2).name
            'class 7'
        """
        return self.label or f"class {self.class_index}"
