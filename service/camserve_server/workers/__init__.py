"""Where an engine lives: in this process, or in one of its own that is watched, and started anew when it dies."""

from camserve_server.workers.local import Local
from camserve_server.workers.messages import Setup
from camserve_server.workers.nursery import open_nursery
from camserve_server.workers.port import Port
from camserve_server.workers.worker import Worker

__all__ = ["Local", "Port", "Setup", "Worker", "open_nursery"]
