"""Models: from a name on a command line to a frozen, probed module on its device."""

from camserve_server.models.load import LoadedModel, digest, load
from camserve_server.models.sources import Source, check, of_network, search_current_folder
from camserve_server.models.spec import EMBEDDED, ModelSpec, parse
from camserve_server.types import Preprocess

__all__ = [
    "EMBEDDED",
    "LoadedModel",
    "ModelSpec",
    "Preprocess",
    "Source",
    "check",
    "digest",
    "load",
    "of_network",
    "parse",
    "search_current_folder",
]
