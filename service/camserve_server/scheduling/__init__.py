"""Gathers rows of many requests into batches; an engine that is free pulls one.

`queue` says whose rows come next, `capacity` how many fit in a batch, and `batcher` has the engines run it. The package
knows jobs and methods by what their rows cost, and nothing of the wire.

It may import `workers` and the rooms below.
"""

from camserve_server.scheduling.batcher import PLACE, Batcher
from camserve_server.scheduling.queue import Collect

__all__ = ["PLACE", "Batcher", "Collect"]
