"""Counters of a server's work: photos decoded, requests admitted to the queue, rows run."""

import contextlib
from collections import Counter
from unittest import mock

from camserve_server.imaging import images
from camserve_server.serving.pool_health import PoolHealth


@contextlib.contextmanager
def counting(served):
    """Count inside the block; yield a function that returns the counts."""
    batcher, work = served.pipeline.batcher, Counter()
    decode, take, before = images.decode, batcher._admission._take, batcher.stats.rows

    def counting_decode(*given, **options):
        work["decoded"] += 1
        return decode(*given, **options)

    def counting_take(*given):
        work["admitted"] += 1
        return take(*given)

    def counts():
        rows = batcher.stats.rows - before
        return dict(work) | ({"rows": rows} if rows else {})

    with (
        mock.patch.object(images, "decode", counting_decode),
        mock.patch.object(batcher._admission, "_take", counting_take),
        mock.patch.object(PoolHealth, "_canary_succeeds", succeed),
    ):
        yield counts


async def succeed(_):
    """Replace the health check's own explanation, which a server runs after ten seconds without a request."""
    return True
