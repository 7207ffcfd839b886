"""Names of the arrays that pass between the rooms."""

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Pixels: TypeAlias = NDArray[np.uint8]
"""RGB, uint8 [height, width, 3]."""

Map: TypeAlias = NDArray[np.float32]
"""A raw map, float32 [h, w]: signed, not normalised, on the layer's own grid."""

Input: TypeAlias = NDArray[np.uint8] | NDArray[np.float32]
"""What a model sees of an image: uint8 [h,w,3], to be normalised, or float32 [h,w,3], which is already normalised."""

Mask: TypeAlias = NDArray[np.bool_]
"""A part of an image, bool [h,w]."""
