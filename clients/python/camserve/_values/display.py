"""HTML and plots of values. The room that draws registers a function for each type, so that values need no drawing."""

from __future__ import annotations

from functools import singledispatch
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from PIL import Image


@singledispatch
def html(value: object) -> str:
    """Return a value as HTML for a notebook."""
    raise NotImplementedError(f"{type(value).__name__} has no HTML")


@singledispatch
def plot(value: object) -> Image.Image:
    """Draw a value as a picture."""
    raise NotImplementedError(f"{type(value).__name__} has no plot")
