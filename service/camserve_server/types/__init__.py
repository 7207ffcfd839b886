"""Deprecated aliases of `Edit` and `View`: import them from `camserve_server.methods`.

This module is removed in the next release.
"""

import warnings
from typing import Any

from camserve_server import methods

_MOVED = ("Edit", "View")


def __getattr__(name: str) -> Any:
    """Return a class from its new module, with a deprecation warning."""
    if name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn(f"import {name} from camserve_server.methods", DeprecationWarning, stacklevel=2)
    return getattr(methods, name)
