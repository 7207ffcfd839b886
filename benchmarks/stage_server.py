"""The server as it is, with a clock around its stages. A line on its input makes it print what they took so far.

Nothing in the service knows of it: functions are wrapped from outside, by their names, in the server and in the process
of its engine. One that is not there (any more) is left out, and said so.
"""

import functools
import gc
import importlib
import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Client, Listener
from pathlib import Path
from typing import Any

Books = dict[str, Any]

STAGES = {
    "decode": "imaging.images.decode",
    "fit": "imaging.fitting.fit",
    "receipt": "serving.receipts.receipt_of",
    "steps": "serving.explain._run_step",
    "intensity": "imaging.scales.scale_map",
    "encode": "imaging.render._encode",
    "draw": "imaging.render.draw",
    "answer": "serving.drawing._draw",
    "read": "api.codec.read_explanation",
    "respond": "api.codec.explain_response",
    "engine": "engine.Engine.run",
    "inputs": "engine.cam.make_inputs",
    "forward": "engine.cam.forward",
    "maps": "engine.cam._results",
}
"""What is timed, by where it is found in the package; some are parts of others."""

SERVER = {"loop": ("MainThread",), "image": ("image",), "handing": ("engine", "worker")}
ENGINE = {"engine": ("MainThread", "stream"), "handing": ("reading", "heartbeat")}
"""Threads of the server, and of the engine's process, by what they do, and how their names begin."""

PLACE = "STAGES_OF_ENGINES"  # in the environment: the folder of the sockets at which engines are asked for their books


class Clocks:
    """Counts since the server started."""

    def __init__(self, threads: Mapping[str, tuple[str, ...]]) -> None:
        self._threads = threads
        self.spent: dict[str, list[float]] = {}
        self.kinds: dict[str, str] = {}
        self.missing: list[str] = []
        self.collections = [0, 0.0]
        self._lock = threading.Lock()
        self._collecting = 0.0

    def wrap(self, label: str, where: str) -> None:
        """Put a clock around a function or method of the package."""
        module, names = resolve(where)
        *owners, name = names
        try:
            owner = functools.reduce(getattr, owners, module)
            setattr(owner, name, self._timed(label, getattr(owner, name)))
        except AttributeError:
            self.missing.append(where)

    def _timed(self, label: str, function: Callable[..., Any]) -> Callable[..., Any]:
        total = self.spent.setdefault(label, [0, 0.0, 0.0])

        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            wall, cpu = time.perf_counter(), time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                cpu, wall = time.thread_time() - cpu, time.perf_counter() - wall
                self.kinds[label] = self._kind(threading.current_thread().name)
                with self._lock:
                    total[0] += 1
                    total[1] += wall
                    total[2] += cpu

        return timed

    def collecting(self, phase: str, _info: dict[str, int]) -> None:
        """Count the garbage collector's work."""
        if phase == "start":
            self._collecting = time.perf_counter()
        else:
            self.collections[0] += 1
            self.collections[1] += time.perf_counter() - self._collecting

    def books(self) -> Books:
        """Return everything."""
        return {
            "spent": self.spent,
            "kinds": self.kinds,
            "missing": self.missing,
            "threads": self._by_thread(),
            "process": time.process_time(),
            "collections": self.collections,
        }

    def _by_thread(self) -> dict[str, float]:
        """Return the seconds of processor time that threads have used, by what they do."""
        ours = {thread.native_id: thread.name for thread in threading.enumerate()}
        total: dict[str, float] = {}
        for task in Path("/proc/self/task").iterdir():
            name = ours.get(int(task.name)) or (task / "comm").read_text(encoding="ascii").strip()
            kind = self._kind(name)
            total[kind] = total.get(kind, 0.0) + _spent(task)
        return total

    def _kind(self, thread: str) -> str:
        known = (kind for kind, names in self._threads.items() if thread.startswith(names))
        # The threads of OpenMP have no name of their own, but that of the program; gRPC's have one each.
        return next(known, "torch" if thread.startswith(("python", "pt_", "cuda")) else "grpc")


def together(one: Books, other: Books) -> Books:
    """Return the books of two processes as those of one."""
    kinds, labels = one["threads"] | other["threads"], one["spent"] | other["spent"]
    return {
        "spent": {label: _sum(one["spent"].get(label), other["spent"].get(label)) for label in labels},
        "kinds": one["kinds"] | other["kinds"],
        "missing": sorted({*one["missing"], *other["missing"]}),
        "threads": {kind: one["threads"].get(kind, 0.0) + other["threads"].get(kind, 0.0) for kind in kinds},
        "process": one["process"] + other["process"],
        "collections": _sum(one["collections"], other["collections"]),
    }


def _sum(one: Sequence[float] | None, other: Sequence[float] | None) -> Sequence[float]:
    return [a + b for a, b in zip(one, other, strict=True)] if one and other else one or other or ()


def resolve(where: str) -> tuple[Any, list[str]]:
    """Import as much of a dotted name as is a module; return it with the names that are left."""
    module, names = importlib.import_module("camserve_server"), where.split(".")
    while len(names) > 1:
        try:
            module = importlib.import_module(f"{module.__name__}.{names[0]}")
        except ModuleNotFoundError:
            break
        names.pop(0)
    return module, names


def _spent(task: Path) -> float:
    try:
        return int((task / "schedstat").read_text(encoding="ascii").split()[0]) / 1e9
    except OSError:  # a kernel that keeps no such books keeps them by the tick
        fields = (task / "stat").read_text(encoding="ascii").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _listen(clocks: Clocks) -> None:
    for _ in sys.stdin:
        books = clocks.books()
        for place in Path(os.environ[PLACE]).iterdir():
            with Client(str(place)) as engine:
                books = together(books, engine.recv())
        print(json.dumps(books), flush=True)


def _report(clocks: Clocks) -> None:
    with Listener(f"{os.environ[PLACE]}/{os.getpid()}") as listener:
        while True:
            with listener.accept() as asking:
                asking.send(clocks.books())


def _clocks(threads: Mapping[str, tuple[str, ...]], say: Callable[[Clocks], None], *, engine: bool) -> None:
    clocks = Clocks(threads)
    for label, where in STAGES.items():
        if where.startswith("engine.") is engine:
            clocks.wrap(label, where)
    gc.callbacks.append(clocks.collecting)
    threading.Thread(target=say, args=(clocks,), daemon=True, name="clocks").start()


def main() -> None:
    """Serve, as `camserve-server serve` does."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[PLACE] = folder
        _clocks(SERVER, _listen, engine=False)
        from camserve_server import cli  # noqa: PLC0415 -- after what it is made of was wrapped
        from camserve_server.workers import child  # noqa: PLC0415 -- the same

        run = child.run

        def clocked(number: int) -> None:
            _clocks(ENGINE, _report, engine=True)
            run(number)

        child.run = clocked
        sys.argv[1:1] = ["serve", "--log-level", "warning"]
        cli.main()


if __name__ == "__main__":
    main()
