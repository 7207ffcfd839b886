"""Batches of rows from many requests, and the policy that decides whose rows are next.

`batcher` lists the parts. The package sees only the cost of jobs and methods, and nothing of the wire format.

It may import `workers` and the rooms below.
"""

from camserve_server.scheduling.batcher import BYTES_PER_ROW, Batcher
from camserve_server.scheduling.queue import Collect

__all__ = ["BYTES_PER_ROW", "Batcher", "Collect"]
