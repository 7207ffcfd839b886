"""Port of a server's metrics: tests let the system choose it, and read it from the log as an operator does."""

import contextlib
import logging

from camserve_server.app import metrics_endpoint


@contextlib.contextmanager
def metrics_port():
    """Yield a function that returns the port of the metrics that were opened last inside the block."""
    ports, logger, handler = [], metrics_endpoint.log, logging.Handler()
    handler.addFilter(lambda record: record.msg == "metrics")
    handler.emit = lambda record: ports.append(record.fields["port"])
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lambda: ports[-1]
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
