"""Workers, which run batches on models: in this process, or in a process that is watched and replaced when it dies.

It may import `jobs` and the rooms below.
"""

from camserve_server.workers.fork_server import open_fork_server
from camserve_server.workers.in_process import InProcessWorker
from camserve_server.workers.messages import Setup
from camserve_server.workers.protocol import WorkerProtocol
from camserve_server.workers.worker import Worker

__all__ = ["InProcessWorker", "Setup", "Worker", "WorkerProtocol", "open_fork_server"]
