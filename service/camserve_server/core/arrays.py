"""Types of the arrays that packages exchange."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
"""RGB, uint8 [height, width, 3]."""

Photo: TypeAlias = NDArray[np.uint8] | NDArray[np.uint16] | NDArray[np.float32]
"""A decoded photo [height, width, channels]: uint8 RGB, unless its file or its model has others."""

Map: TypeAlias = NDArray[np.float32]
"""A raw map, float32 [h, w]: signed, not normalised, on the layer's own grid."""

Input: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
"""Input of a model: uint8 [h, w, channels], not yet normalised, or float32 likewise, already normalised."""

Mask: TypeAlias = NDArray[np.bool_]
"""A region of an image, bool [h, w]."""
