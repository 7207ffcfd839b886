"""Method calls, parameter values, and the edits of perturbation methods."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

ParameterValue: TypeAlias = float | str

Fusion: TypeAlias = Literal["mean", "max", "product", "sum"]
"""Ways to combine the maps of several layers into one. All but the sum normalise each map first."""


@dataclass(frozen=True, slots=True)
class MethodCall:
    """A method and its parameters, defaults filled in.

    Attributes:
        name: the method's name.
        parameters: values by name.
        augmented: True for the mean of the maps of copies of the image, flipped and rescaled in intensity.
        eigen: True for the first principal component of the channels' terms, instead of their sum.
        input_channels: channels of the model's input to make a map of each; empty for one map of all channels.
    """

    name: str
    parameters: Mapping[str, ParameterValue] = field(default_factory=dict)
    augmented: bool = False
    eigen: bool = False
    input_channels: tuple[int, ...] = ()

    @property
    def key(self) -> tuple[object, ...]:
        """Key that is equal for equal calls."""
        return self.name, self.augmented, self.eigen, self.input_channels, *sorted(self.parameters.items())


@dataclass(frozen=True, slots=True, eq=False)
class Edit:
    """A change to the normalised input [3,H,W], or to a layer's output: keep · x + (1 − keep) · fill.

    Attributes:
        keep: share of each pixel that is kept, float32 [H,W]; None for all.
        fill: replacement for the rest, float32 [3,H,W]; None for zeros, which are the mean colour.
        silenced: index of the channel of the pass's layer that is set to zero; None for none.

    Example:
        >>> import numpy as np
        >>> from camserve_server.methods import Edit
        >>> keep = np.ones((224, 224), np.float32)
        >>> keep[:, 112:] = 0  # hide the right half
        >>> float(Edit(keep).keep.mean())
        0.5
    """

    keep: NDArray[np.float32] | None = None
    fill: NDArray[np.float32] | None = None
    silenced: int | None = None
