"""Both servers, each in processes of its own on loopback, with the same weights, threads and allocator."""

import contextlib
import http.client
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torchvision.models import resnet50

import camserve
from benchmarks.serving import reserved_port

ARCHIVE = Path(__file__).parent / "archive"
ROOT = Path(__file__).parents[2]
PACKAGES = (
    "torchserve==0.12.0",
    "torch-model-archiver==0.12.0",
    *("torch", "torchvision", "captum", "opencv-python-headless", "pillow", "pyyaml", "packaging"),
)
START_SECONDS, STOP_SECONDS = 180, 20
BATCH, DELAY_MS = 8, 20

# What service/Dockerfile sets: the allocator keeps what a batch frees, up to a bound. Both servers get it.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "536870912"}

Models = Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Group:
    """The processes of a server: a group of the system's, which the first of them leads."""

    leader: int

    def cpu(self) -> float:
        """Return the seconds of processor time that they have used, as far as they still run."""
        return sum(used for group, used in map(_books, Path("/proc").glob("[0-9]*/stat")) if group == self.leader)


def _books(path: Path) -> tuple[int, float]:
    """Return the group of a process, and its seconds of processor time: fields 5, 14 and 15 of proc(5)."""
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:  # it has just ended
        return 0, 0.0
    return int(fields[2]), (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class TorchServe:
    """Addresses of a TorchServe, HOST:PORT each, and its processes."""

    rest: str
    grpc: str
    group: Group


def make_venv(folder: Path) -> None:
    """Make the virtual environment that TorchServe runs in, unless it is there: some minutes, and gigabytes."""
    if (folder / ".done").exists():
        return
    print(f"making {folder} with {', '.join(PACKAGES)}", flush=True)
    run(sys.executable, "-m", "venv", folder)
    pip: tuple[str | Path, ...] = (
        folder / "bin" / "python",
        "-m",
        "pip",
        "install",
        "-q",
        "--disable-pip-version-check",
    )
    run(*pip, "-c", ROOT / "constraints.txt", *PACKAGES)
    (folder / ".done").touch()


def write_weights(path: Path) -> None:
    """Write the weights that both servers load: random, seeded; the first class is the most probable for any photo.

    Random logits are so alike that another precision would explain another class.
    """
    torch.manual_seed(0)
    state = resnet50(weights=None).state_dict()
    state["fc.bias"][0] = 100
    torch.save(state, path)


def write_archives(venv: Path, folder: Path, weights: Path) -> Models:
    """Write the three archives into a folder; return what TorchServe's configuration says of them.

    "integrated" is TorchServe's own image classifier, whose explanation is integrated gradients; "hooks" and "captum"
    are the handler in `archive/`.
    """
    handlers: dict[str, str | Path] = {
        "integrated": "image_classifier",
        "hooks": ARCHIVE / "handler.py",
        "captum": ARCHIVE / "handler.py",
    }
    for name, handler in handlers.items():
        settings = folder / f"{name}.yaml"
        settings.write_text(f"by: {name}\n", encoding="utf-8")
        run(
            *(venv / "bin" / "torch-model-archiver", "--force", "--model-name", name, "--version", "1.0"),
            *("--model-file", ARCHIVE / "network.py", "--serialized-file", weights, "--handler", handler),
            *("--config-file", settings, "--export-path", folder),
            env=os.environ | {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}"},
        )
    return {name: _served(name) for name in handlers}


def _served(name: str) -> dict[str, object]:
    # One is TorchServe's own default, and its handler takes the class to explain from a batch's first request.
    batch = 1 if name == "integrated" else BATCH
    return {
        "1.0": {
            "defaultVersion": True,
            "marName": f"{name}.mar",
            "minWorkers": 1,
            "maxWorkers": 1,
            "batchSize": batch,
            "maxBatchDelay": DELAY_MS,
            "responseTimeout": 300,
        }
    }


@contextlib.contextmanager
def torchserve(venv: Path, folder: Path, models: Models, threads: int) -> Iterator[TorchServe]:
    """Run TorchServe inside the block, ready to answer; its logs are in the folder's `logs`."""
    with contextlib.ExitStack() as stack:
        addresses = [f"127.0.0.1:{stack.enter_context(reserved_port())}" for _ in range(5)]
        yield stack.enter_context(_torchserve(venv, folder, models, threads, addresses))


@contextlib.contextmanager
def _torchserve(
    venv: Path, folder: Path, models: Models, threads: int, addresses: Sequence[str]
) -> Iterator[TorchServe]:
    rest, management, metrics, grpc, grpc_management = addresses
    settings = {
        "inference_address": f"http://{rest}",
        "management_address": f"http://{management}",
        "metrics_address": f"http://{metrics}",
        "grpc_inference_address": "127.0.0.1",
        "grpc_inference_port": grpc.rpartition(":")[2],
        "grpc_management_address": "127.0.0.1",
        "grpc_management_port": grpc_management.rpartition(":")[2],
        "disable_system_metrics": "true",
        "async_logging": "true",
        "models": json.dumps(models),
        "load_models": ",".join(f"{name}.mar" for name in models),
    }
    written = folder / "config.properties"
    written.write_text("".join(f"{key}={value}\n" for key, value in settings.items()), encoding="utf-8")
    command = (
        *(venv / "bin" / "torchserve", "--start", "--foreground", "--ncs", "--disable-token-auth"),
        *("--ts-config", written, "--model-store", folder),
    )
    # It starts its workers as "python", and keeps its process id and its sockets in the temporary folder.
    own = {"PATH": f"{venv / 'bin'}:{os.environ['PATH']}", "TMPDIR": str(folder), "TEMP": str(folder), "PYTHONPATH": ""}
    with running(command, folder, own | {"OMP_NUM_THREADS": str(threads)}) as group:
        until(lambda: all(_ready(management, name) for name in models), "TorchServe")
        yield TorchServe(rest, grpc, group)


def _ready(management: str, name: str) -> bool:
    with contextlib.closing(http.client.HTTPConnection(management)) as connection:
        try:
            connection.request("GET", f"/models/{name}")
            reply = connection.getresponse()
        except OSError:  # it does not listen yet
            return False
        workers = json.load(reply)[0]["workers"] if reply.status == http.client.OK else []
        return bool(workers) and all(worker["status"] == "READY" for worker in workers)


@contextlib.contextmanager
def camserve_server(folder: Path, weights: Path, threads: int) -> Iterator[tuple[str, Group]]:
    """Run camserve's server inside the block, with a model "float32" and a model "bfloat16"; yield where it is."""
    source = f"torchvision:resnet50?weights={weights}"
    own = {"OMP_NUM_THREADS": str(threads)}
    with reserved_port() as port:
        address = f"127.0.0.1:{port}"
        command = (
            *(sys.executable, "-c", "from camserve_server.cli import main; main()", "serve", "--address", address),
            *("--model", f"float32={source}", "--model", f"bfloat16={source}&precision=bfloat16"),
            *("--threads", str(threads)),
        )
        with running(command, folder, own) as group, camserve.Client(address, retries=0) as client:
            until(lambda: _serving(client), "camserve")
            yield address, group


def _serving(client: camserve.Client) -> bool:
    with contextlib.suppress(camserve.Unavailable):
        return client.health() is camserve.Health.SERVING
    return False


@contextlib.contextmanager
def running(command: tuple[str | Path, ...], folder: Path, own: dict[str, str]) -> Iterator[Group]:
    """Run a server and its children inside the block, in a process group that is ended as a whole."""
    with (folder / f"{Path(command[0]).name}.log").open("wb") as log:
        process = subprocess.Popen(  # noqa: S603 -- our own command
            command,
            cwd=folder,
            env=os.environ | ALLOCATOR | own,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        try:
            yield Group(process.pid)
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(STOP_SECONDS)
        os.killpg(process.pid, signal.SIGKILL)  # what did not hear the first: nothing, as a rule
    process.wait()


def until(ready: Callable[[], bool], name: str) -> None:
    """Wait until a server is ready.

    Raises:
        TimeoutError: it does not get ready.
    """
    late = time.monotonic() + START_SECONDS
    while not ready():
        if time.monotonic() > late:
            raise TimeoutError(f"{name} was not ready after {START_SECONDS} s: run with --keep and look into its logs")
        time.sleep(0.5)


def run(*command: str | Path, env: Mapping[str, str] | None = None) -> None:
    """Run a command to its end.

    Raises:
        subprocess.CalledProcessError: it failed.
    """
    subprocess.run(command, check=True, env=env)  # noqa: S603 -- our own command
