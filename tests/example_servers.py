"""Servers for the examples in docstrings: one with several models, and one that asks for a token."""

from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from camserve_server.api import tokens
from camserve_server.models import Preprocess, Source
from coloured import Colours, Finder
from support import serving, without_canaries

PREPROCESS = Preprocess((64, 64), (64, 64), "bilinear", (0.45,) * 3, (0.225,) * 3)
LABELS = ("background", "red", "green")


def segmenter():
    """Return a segmentation model of red, green and other pixels."""
    return Source(Colours(), PREPROCESS, LABELS)


def smoother():
    """Return the same segmentation model with smoother maps, like a new version of it."""
    network = Colours()
    network.smooth = nn.AvgPool2d(16, 2, 7)
    return Source(network, PREPROCESS, LABELS)


def detector():
    """Return a detector of one red and one green object."""
    return Source(Finder(), PREPROCESS, LABELS)


OWN_MODELS = (
    "segmenter=example_servers:segmenter",
    "segmenter-2=example_servers:smoother",
    "detector=example_servers:detector",
    "clip=coloured:named",
)


@dataclass(frozen=True)
class ExampleServers:
    """Running servers.

    Attributes:
        address: address of the server with the default model and `OWN_MODELS`.
        guarded_address: address of the server that asks for a token.
        token: a token for it, with which images can be explained but no models be loaded.
    """

    address: str
    guarded_address: str
    token: str


@contextmanager
def example_servers(folder):
    """Start the servers; their file of tokens is in a folder."""
    token, record = tokens.new("reader", ("explain", "observe"))
    tokens_file = folder / "tokens"
    tokens_file.write_text(record.line())
    models = ("efficientnet_lite0", *OWN_MODELS)
    with (
        without_canaries(),
        serving(models=models, threads=1, admin=True, max_message_mib=1) as open_server,
        serving(models=OWN_MODELS[:1], threads=1, admin=True, tokens_file=str(tokens_file)) as guarded_server,
    ):
        yield ExampleServers(open_server.address, guarded_server.address, token)
