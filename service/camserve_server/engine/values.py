"""Values that the engine takes and returns: passes, rows and their results."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from camserve_server.core.arrays import Input
from camserve_server.imaging.values import View
from camserve_server.methods.values import Edit, MethodCall
from camserve_server.targets.values import Target

Half: TypeAlias = Literal[0, 1]
"""Which of two batches that an engine runs at once: each has half of a CPU's cores, or one of two streams of a GPU."""


@dataclass(frozen=True, slots=True)
class Row:
    """The unit of batching: one copy of an image with one target.

    The model's input is the image, normalised; then its views; then the method's copy of that; then edited.

    Attributes:
        image: what the model sees; rows of one request share the array.
        target: whose score is differentiated.
        calls: the methods that want this row: any number that take the image as it is, or one that makes copies.
        copy: which of the method's copies of the image this is; None for the image as it is.
        views: of the image, the second of the first and so on.
        edit: of the input; rows of one edit share it.
        features: whether the layers' feature maps are wanted, for "cam".
    """

    image: Input
    target: Target
    calls: tuple[MethodCall, ...] = ()
    copy: int | None = None
    views: tuple[View, ...] = ()
    edit: Edit | None = None
    features: bool = False

    @property
    def input(self) -> Hashable:
        """What the model's input is made of: rows that have it in common share one, and a forward pass of it."""
        copy = None if self.copy is None else (*(call.key for call in self.calls), self.copy)
        return id(self.image), self.views, copy, id(self.edit)
