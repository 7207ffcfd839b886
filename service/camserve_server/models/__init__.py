"""Models: from a name on a command line to a frozen, probed module on its device."""

from camserve_server.models.load import LoadedModel, digest, load
from camserve_server.models.spec import EMBEDDED, ModelSpec, parse

__all__ = ["EMBEDDED", "LoadedModel", "ModelSpec", "digest", "load", "parse"]
