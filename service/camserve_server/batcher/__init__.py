"""Gathers rows of many requests into batches; an engine that is free pulls one.

`queue` says whose rows come next, `capacity` how many fit in a batch, and `run` has the engines run it. The package
knows jobs and methods by what their rows cost, and nothing of the wire.
"""

from camserve_server.batcher.queue import Collect
from camserve_server.batcher.run import PLACE, Batcher

__all__ = ["PLACE", "Batcher", "Collect"]
