"""Counts of a server's work: photos decoded, places taken in the queue, rows run."""

import contextlib
from collections import Counter
from unittest import mock

from camserve_server.imaging import images
from camserve_server.serving.pool_health import PoolHealth


@contextlib.contextmanager
def counting(served):
    """Count inside the block; yield a function that returns the counts."""
    batcher, done = served.pipeline.batcher, Counter()
    decode, take, before = images.decode, batcher._admission._take, batcher.stats.rows

    def decoding(*given):
        done["decoded"] += 1
        return decode(*given)

    def taking(*given):
        done["admitted"] += 1
        return take(*given)

    def counted():
        rows = batcher.stats.rows - before
        return dict(done) | ({"rows": rows} if rows else {})

    with (
        mock.patch.object(images, "decode", decoding),
        mock.patch.object(batcher._admission, "_take", taking),
        mock.patch.object(PoolHealth, "_canary_succeeds", well),
    ):
        yield counted


async def well(_):
    """Stand in for the explanation that a server makes for itself after ten seconds without a request."""
    return True
