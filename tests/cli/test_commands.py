"""`camserve-server` from the command line: start, stop and error messages."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest
from click.testing import CliRunner
from PIL import Image

import fork_server
from camserve.v1 import explain_pb2, explain_pb2_grpc
from camserve_server.cli import commands
from support import wait_until

PROGRAM = Path(sys.executable).with_name("camserve-server")
FLAGS = ("--isolation", "thread", "--address", "127.0.0.1:0", "--device", "cpu", "--threads", "1")


def flags(*given):
    """Return the given flags, and those of FLAGS that are not given."""
    pairs = zip(FLAGS[::2], FLAGS[1::2], strict=True)
    return [word for pair in pairs if pair[0] not in given for word in pair] + list(given)


NETS = '''
import time
from collections import OrderedDict
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent


class Sleepy(nn.Module):
    """Network that sleeps in its forward pass once it is switched to do so."""

    def forward(self, x):
        if (HERE / "sleep").exists():
            (HERE / "asleep").touch()
            time.sleep(3600)
        return x


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        features=nn.Conv2d(3, 4, 3, 2, 1), sleepy=Sleepy(), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(),
        head=nn.Linear(4, 5),
    ))


def forever():
    (HERE / "loading").touch()
    time.sleep(3600)
    return tiny()


def busy():
    matrix = torch.ones(600, 600)
    (HERE / "loading").touch()
    while True:
        torch.linalg.svd(matrix)


def broken():
    raise ValueError("one\\ntwo\\nthree")


def nothing():
    return None
'''


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to a folder with a module of models, and remove settings from the environment."""
    (tmp_path / "command_nets.py").write_text(NETS)
    Image.new("RGB", (40, 30), "red").save(tmp_path / "photo.png")
    for name in os.environ:
        if name.startswith("CAMSERVE_"):
            monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", sys.path[:])
    monkeypatch.delitem(sys.modules, "command_nets", raising=False)
    logger = logging.getLogger("camserve_server")
    before = logger.handlers[:], logger.level, logger.propagate
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    logger.handlers[:], logger.level, logger.propagate = before
    sys.modules.pop("command_nets", None)


def installed(*arguments, **options):
    """Start the command as users do."""
    return subprocess.Popen([PROGRAM, *arguments], **options)


# A shell that starts a program in the background makes it ignore Ctrl-C, and its children do too.
HEEDING = f"import signal; signal.signal(signal.SIGINT, signal.default_int_handler); {fork_server.SERVER}"


def forked(*arguments, **options):
    """Start the command in a process that has already imported torch."""
    return fork_server.start(HEEDING, *arguments, **options)


class Served:
    """`camserve-server serve` in its own process."""

    def __init__(self, folder, *arguments, model="tiny", start=forked):
        self.log = folder / "log.txt"
        given = flags("--model", f"command_nets:{model}?size=32", *arguments)
        with self.log.open("wb") as log:
            self.process = start("serve", *given, cwd=folder, stdout=log, stderr=log)

    def port(self):
        """Return the port, once the server serves."""
        serving = wait_until(lambda: re.search(r" serving port=(\d+)", self.log.read_text()) or self.ended())
        return int(serving[1])

    def ended(self):
        assert self.process.poll() is None, self.log.read_text()

    def tell(self, number=signal.SIGTERM):
        self.process.send_signal(number)

    def end(self):
        """Wait for the end; return the exit code and the log."""
        code = self.process.wait()
        return code, self.log.read_text()


@contextmanager
def served(*arguments, **options):
    server_process = Served(*arguments, **options)
    try:
        yield server_process
    finally:
        server_process.process.kill()
        server_process.process.wait()


def connected(server):
    return grpc.insecure_channel(f"127.0.0.1:{server.port()}")


def explain(channel, folder):
    """Request an explanation; return the future of its response."""
    request = explain_pb2.ExplainRequest(image=(folder / "photo.png").read_bytes())
    return explain_pb2_grpc.ExplainServiceStub(channel).Explain.future(request, timeout=60)


@pytest.mark.parametrize("start", [forked, pytest.param(installed, marks=pytest.mark.slow)])
def test_serve_exits_with_0_after_a_signal(folder, start):
    with served(folder, start=start) as server, connected(server) as channel:
        reply = explain(channel, folder).result()
        server.tell(signal.SIGTERM)
        code, log = server.end()

    assert code == 0
    assert len(reply.explanations) == 1
    assert [re.sub(r"^.{23} INFO (\S+).*", r"\1", line) for line in log.splitlines()] == [
        "gRPC",
        "model",
        "serving",
        "Explain",
        "draining",
        "stopped",
    ]


def test_second_signal_ends_the_drain_with_1_even_if_the_model_hangs(folder):
    with served(folder, "--drain-seconds", "3600") as server, connected(server) as channel:
        (folder / "sleep").touch()
        call = explain(channel, folder)
        wait_until((folder / "asleep").exists)
        server.tell(signal.SIGTERM)
        wait_until(lambda: "draining" in server.log.read_text())
        server.tell(signal.SIGINT)
        code, log = server.end()
        error = call.exception()

    assert code == 1
    assert "second signal" in log
    assert "Traceback" not in log
    assert error.code() in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED}


def test_signal_while_the_models_load_exits_with_0(folder):
    with served(folder, model="forever") as server:
        wait_until(lambda: (folder / "loading").exists() or server.ended())
        server.tell()
        code, log = server.end()

    assert code == 0
    assert "Traceback" not in log


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_signal_while_another_thread_computes_ends_explain_with_its_code(number, folder):
    """Python's own exit would end that thread inside of torch, which aborts the process."""
    arguments = ("explain", "photo.png", "--output", "out", "--model", "command_nets:busy?size=32")
    with (folder / "log.txt").open("wb") as log, forked(*arguments, cwd=folder, stderr=log) as program:
        wait_until(lambda: (folder / "loading").exists() or program.poll() is not None)
        program.send_signal(number)

    assert program.returncode == 128 + number
    assert (folder / "log.txt").read_text().strip() == ("error: interrupted" if number == signal.SIGINT else "")


def stopped_in(module, folder, monkeypatch):
    """Stop a server that imports this text as torch; return the exit code and the log."""
    (folder / "torch.py").write_text(module)
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    with served(folder, start=installed) as server:
        wait_until(lambda: (folder / "importing").exists() or server.ended())
        server.tell()
        return server.end()


def test_signal_during_the_import_of_torch_stops_the_server_with_0(folder, monkeypatch):
    """The first process of a container receives only signals for which it has a handler."""
    assert stopped_in(WAITS, folder, monkeypatch) == (0, "")


# In short sleeps: Python runs no handler for a signal that comes after its last look for one and before a sleep begins,
# and would sleep on to the end. On a busy machine a process can lose the processor just there.
WAITS = """
import time

open("importing", "w").close()
while True:
    time.sleep(0.01)  # real timeout: again and again until the signal
"""
FORKS = """
import os, time

def after():
    open("importing", "w").close()
    while True:
        time.sleep(0.01)  # real timeout: again and again until the signal

os.register_at_fork(after_in_parent=after)
os.fork() or os._exit(0)
"""


@pytest.mark.slow
def test_signal_in_a_callback_that_swallows_exceptions_stops_the_server(folder, monkeypatch):
    """Python prints an exception that is raised in a callback after a fork, and continues."""
    assert stopped_in(FORKS, folder, monkeypatch) == (0, "")


def test_usage_error_is_one_line(folder):
    """gRPC must not add a line either; it writes to the terminal without Python."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        given = flags("--model", "command_nets:tiny?size=32", "--address", address)
        result = fork_server.run(fork_server.SERVER, "serve", *given, cwd=folder)

    assert result.returncode == 2
    assert result.stderr == f"error: cannot listen on {address}: is the port taken, or the host unknown?\n"
    assert result.stdout == ""


WRONG = {
    "no number": (["--threads", "many"], "threads = 'many': "),
    "out of range": (["--max-queue-rows", "0"], "max_queue_rows = '0': "),
    "no such file": (["--config", "missing.toml"], "cannot read missing.toml: No such file or directory"),
    "no such flag": (["--thread", "3"], "--threads"),
    "no such model": (["--model", "timm:resnet5000"], 'timm has no model "resnet5000" (did you mean'),
    "model without a source": (["--model", "resnet50"], "torchvision:resnet50"),
    "no such module": (["--model", "no_such_module:make"], "no_such_module:make cannot be made: ModuleNotFoundError"),
    "model that cannot be made": (["--model", "command_nets:broken"], "ValueError: one two three"),
    "model that is none": (["--model", "command_nets:nothing"], "made a NoneType, not a torch.nn.Module"),
    "no such weights": (["--model", "command_nets:tiny?weights=gone.pth"], "there is no weights file gone.pth"),
    "two models of one name": (["--model", "command_nets:tiny", "--model", "command_nets:tiny"], "two models"),
    "no such device": (["--model", "command_nets:tiny", "--device", "gpu"], 'device "gpu"'),
    "no such GPU": (["--model", "command_nets:tiny", "--device", "cuda:99"], 'device "cuda:99"'),
    "half a GPU": (["--model", "command_nets:tiny", "--device", "cuda:x"], 'device "cuda:x"'),
}


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(("arguments", "words"), WRONG.values(), ids=WRONG)
def test_invalid_setting_exits_with_2_and_one_line(arguments, words):
    result = CliRunner().invoke(commands.program, ["serve", *flags("--log-level", "error", *arguments)])

    assert result.exit_code == 2, result.exception
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert words in result.stderr
    assert result.stdout == ""


def test_photos_are_explained_without_a_server(folder):
    arguments = ["explain", "photo.png", "--output", "out", "--model", "command_nets:tiny?size=32"]
    result = CliRunner().invoke(commands.program, arguments)

    assert result.exit_code == 0, result.stderr
    (written,) = (folder / "out").iterdir()
    with Image.open(written) as overlay:
        assert overlay.size == (40, 30)


def test_receipt_is_replayed_without_a_server(folder):
    model = ["--model", "command_nets:tiny?size=32"]
    written = CliRunner().invoke(commands.program, ["explain", "photo.png", *model, "-o", "out", "--receipts"])
    assert written.exit_code == 0, written.stderr
    (receipt,) = (folder / "out").glob("*.receipt.json")

    same = CliRunner().invoke(commands.program, ["replay", str(receipt), "photo.png", *model])
    receipt.write_text("{}")
    rubbish = CliRunner().invoke(commands.program, ["replay", str(receipt), "photo.png", *model])

    assert (same.exit_code, rubbish.exit_code) == (0, 1)
    assert "byte for byte" in same.stdout
    assert "not a camserve receipt" in rubbish.stderr


def test_model_that_cannot_be_loaded_without_a_server_is_one_line(folder):
    result = CliRunner().invoke(commands.program, ["explain", "photo.png", "--model", "timm:nothing", "-o", "out"])

    assert result.exit_code == 2
    assert re.fullmatch(r'error: timm has no model "nothing".*\n', result.stderr)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("missing", ["torch", pytest.param("pydantic", marks=pytest.mark.slow)])
def test_missing_dependency_names_the_extra_to_install(missing, folder, monkeypatch):
    (folder / "sitecustomize.py").write_text(f'import sys; sys.modules["{missing}"] = None')
    monkeypatch.setenv("PYTHONPATH", str(folder), prepend=os.pathsep)
    result = subprocess.run([PROGRAM, "serve"], cwd=folder, capture_output=True, text=True, check=False)

    assert result.returncode == 2
    assert result.stderr == f'error: no module {missing}: the server needs `pip install "camserve[server]"`\n'


@pytest.mark.slow
def test_help_does_not_import_torch():
    code = "import sys; sys.argv[1:] = ['serve', '--help']; from camserve_server.cli import main\n"
    code += "try: main()\nfinally: assert 'torch' not in sys.modules"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr) == (0, "")
    assert "--max-queue-rows" in result.stdout


def test_server_without_access_control_is_not_started(folder):
    given = flags("--model", "command_nets:forever", "--address", "0.0.0.0:0", "--log-level", "error")
    result = CliRunner().invoke(commands.program, ["serve", *given])

    assert result.exit_code == 2
    assert result.stderr.startswith("error: 0.0.0.0:0 can be reached from other machines: set tls_cert")
    assert result.stderr.count("\n") == 1
    assert not (folder / "loading").exists()


def test_explain_without_a_server_ignores_access_settings(folder, monkeypatch):
    for name in ("TLS_CERT", "TLS_KEY", "TOKENS_FILE", "TOKEN", "CA"):
        monkeypatch.setenv(f"CAMSERVE_{name}", "gone")
    arguments = ["explain", "photo.png", "--output", "out", "--model", "command_nets:tiny?size=32"]
    result = CliRunner().invoke(commands.program, arguments)

    assert result.exit_code == 0, result.stderr
    assert (folder / "out").exists()
