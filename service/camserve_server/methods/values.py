"""Values that methods are called with, and the edits that they make."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

ParameterValue: TypeAlias = float | str

Fusion: TypeAlias = Literal["mean", "max", "product"]
"""How the maps of several layers become one."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method and its parameters, defaults filled in.

    Attributes:
        name: of the method.
        parameters: by name.
        augmented: whether the map is the mean over mirrored and brightened copies of the image.
        eigen: whether the map is the first principal component of the channels' terms, rather than their sum.
    """

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    augmented: bool = False
    eigen: bool = False

    @property
    def key(self) -> tuple[object, ...]:
        """What makes two calls the same."""
        return self.name, self.augmented, self.eigen, *sorted(self.parameters.items())


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A change to the normalised input [3,H,W], or to a layer's output: keep · x + (1 − keep) · fill.

    Attributes:
        keep: share of each pixel that stays, float32 [H,W]; None for all.
        fill: what takes its place, float32 [3,H,W]; None for zeros, which is the mean colour.
        silenced: channel of the pass's layer that is set to zero; None for none.
    """

    keep: NDArray[np.float32] | None = None
    fill: NDArray[np.float32] | None = None
    silenced: int | None = None
