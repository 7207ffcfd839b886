"""Classes of libraries that may not be imported."""

import sys


def imported(module: str, name: str) -> tuple[type, ...]:
    """Return a class of a module if that is imported, as the second argument of `isinstance`; else an empty tuple.

    No object can be of a class whose module is not imported. So a check for it need not import the module, which may
    take seconds.
    """
    kind = getattr(sys.modules.get(module), name, None)
    return (kind,) if isinstance(kind, type) else ()
