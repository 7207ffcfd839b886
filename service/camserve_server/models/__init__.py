"""Models: from a name on a command line to a frozen, probed module on its device.

It may import `imaging` and `telemetry` and the rooms below.
"""

from camserve_server.imaging.values import KeepAspect, Preprocess
from camserve_server.models.load import load
from camserve_server.models.loaded import LoadedModel
from camserve_server.models.sheets import tiled
from camserve_server.models.source import Source
from camserve_server.models.sources import check, import_libraries, search_current_folder, spec_of_network
from camserve_server.models.spec import EMBEDDED, ModelSpec, parse
from camserve_server.models.text import TextTower
from camserve_server.models.weights import digest

__all__ = [
    "EMBEDDED",
    "KeepAspect",
    "LoadedModel",
    "ModelSpec",
    "Preprocess",
    "Source",
    "TextTower",
    "check",
    "digest",
    "import_libraries",
    "load",
    "parse",
    "search_current_folder",
    "spec_of_network",
    "tiled",
]
