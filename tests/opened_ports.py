"""Ports of servers in this process: tests let the system choose them, and read them from the log as operators do."""

import contextlib
import logging


@contextlib.contextmanager
def opened_ports():
    """Yield the ports that were opened last inside the block, by name: "gRPC" and "metrics"."""
    ports, logger, handler = {}, logging.getLogger("camserve_server.app"), logging.Handler()

    def note(record):
        fields = getattr(record, "fields", {})
        if record.msg == "gRPC":
            ports["gRPC"] = int(fields["address"].rpartition(":")[2])
        elif record.msg == "metrics":
            ports["metrics"] = fields["port"]

    handler.emit = note
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield ports
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)
