"""A server with default settings works with 1.5 GiB of memory: the kernel kills no worker."""

import contextlib
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import grpc
import pytest

import needs
from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.core.hardware import CGROUPS, GROUPS_OF_THIS
from robustness import tree
from support import PHOTOS, wait_until

PROGRAM = Path(sys.executable).with_name("camserve-server")
MEMORY = 3 * 2**29  # bytes
JOIN_GROUP = ("sh", "-c", 'echo $$ > "$0" && exec "$@"')
PHOTO = PHOTOS["rocket"].read_bytes()


def own_control_group():
    """Return the folder of this process's memory control group, and the names of its files for limit and kills."""
    for line in GROUPS_OF_THIS.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            return CGROUPS / "memory" / path.lstrip("/"), "memory.limit_in_bytes", "memory.oom_control"
    return CGROUPS, "memory.max", "memory.events"  # in version 2, a group that has processes cannot have child groups


@pytest.fixture
def group():
    """Make a memory control group with a limit; yield its folder, and the file that counts killed processes."""
    try:
        parent, limit, kills = own_control_group()
        folder = parent / f"camserve-{os.getpid()}"
        folder.mkdir()
    except OSError:
        pytest.skip(needs.MEMORY_GROUP)
    try:
        if not (folder / limit).exists():
            pytest.skip(needs.MEMORY_GROUP)
        (folder / limit).write_text(str(MEMORY))
        yield folder, folder / kills
    finally:
        folder.rmdir()


@contextlib.contextmanager
def serve_in_group(folder, log):
    """Run `camserve-server serve` with default settings in a control group; yield its process id and port."""
    command = [*JOIN_GROUP, folder / "cgroup.procs", PROGRAM, "serve", "--address", "127.0.0.1:0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("CAMSERVE_", "OMP_"))}
    with log.open("wb") as log_file, subprocess.Popen(command, stderr=log_file, env=environment) as process:
        try:
            ready = wait_until(lambda: re.search(r" serving port=(\d+)", log.read_text()) or process.poll() is not None)
            assert ready is not True, log.read_text()
            yield process.pid, int(ready[1])
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait()
            wait_until(lambda: not (folder / "cgroup.procs").read_text())


def explain(port, name, samples, count):
    """Explain a photo `count` times; return the errors."""
    method = explain_pb2.Method(name=name, parameters={"samples": explain_pb2.Parameter(number=samples)})
    request = explain_pb2.ExplainRequest(image=PHOTO, methods=[method])
    requests = (explain_pb2.ExplainStreamRequest(request_id=str(i), request=request) for i in range(count))
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        replies = list(explain_pb2_grpc.ExplainServiceStub(channel).ExplainStream(requests))
    assert {reply.request_id for reply in replies} == {str(i) for i in range(count)}
    return [reply.error.message for reply in replies if reply.HasField("error")]


@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    ("name", "samples", "count"),
    [
        pytest.param("smoothgrad", 16, 4, marks=pytest.mark.slow),
        pytest.param("rise", 2048, 1, marks=pytest.mark.search),
    ],
)
def test_default_server_works_within_its_memory_limit(group, tmp_path, name, samples, count):
    folder, kills = group
    with serve_in_group(folder, tmp_path / "log.txt") as (process, port):
        before = tree.pids(process)
        errors = explain(port, name, samples, count)

        assert errors == []
        assert tree.pids(process) == before
        assert re.search(r"^oom_kill (\d+)$", kills.read_text(), re.MULTILINE)[1] == "0"
