"""Start of a worker process."""

import sys
import threading

from camserve_server.workers import Setup, Worker, fork_server
from robustness.forking import running_fork_server

SILENT = "from camserve_server.workers import child; child.HEARTBEAT_INTERVAL = 10**6"


def test_worker_is_ready_before_its_second_heartbeat(monkeypatch):
    ready = threading.Event()
    with running_fork_server(SILENT) as forks:
        monkeypatch.setattr(fork_server, "_fork_servers", [forks])
        worker = Worker(Setup("cpu", 1, path=tuple(sys.path)), on_ready=ready.set)
        try:
            assert ready.wait()
        finally:
            worker.close()
