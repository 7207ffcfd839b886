"""A command `diff` that is killed or interrupted leaves no report, and goes on when it is started again."""

from __future__ import annotations

import json
import os
import signal
from typing import TYPE_CHECKING, Any

import pytest

import fork_server
from client.diff.looks import Looks, write_photos
from support import wait_until

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COUNT, HELD = 12, 5  # photos; the server answers this number at first
# A shell that starts a program in the background makes it ignore Ctrl-C, and its children do too.
# A program that hangs ends by itself, and prints where it waited.
PROGRAM = (
    "import faulthandler, signal; faulthandler.dump_traceback_later(300, exit=True);"
    "signal.signal(signal.SIGINT, signal.default_int_handler); from camserve.diff import rule; rule._RESAMPLES = 20;"
    "from camserve.cli import main; main()"
)


@pytest.fixture
def looks(server: Any) -> Iterator[Looks]:
    looks = Looks(dark={"large"})
    looks.install(server)
    yield looks
    looks.release.set()


@pytest.fixture
def start(server: Any, tmp_path: Path, looks: Looks) -> Any:  # noqa: ARG001 -- it answers
    """Function that starts the command in a process of its own."""
    photos = write_photos(tmp_path / "photos", COUNT)
    environment = {key: value for key, value in os.environ.items() if key != "GITHUB_STEP_SUMMARY"}
    environment |= {"CAMSERVE_SERVER": server.address}

    def run(*flags: object) -> Command:
        return Command(tmp_path, environment, "diff", photos, *flags)

    return run


class Command:
    """The command in a process of its own."""

    def __init__(self, folder: Path, environment: dict[str, str], *arguments: object) -> None:
        self._printed = [folder / "standard output", folder / "standard error"]
        with self._printed[0].open("w") as out, self._printed[1].open("w") as errors:
            options: dict[str, Any] = {"environment": environment, "stdout": out, "stderr": errors}
            self.process = fork_server.start(PROGRAM, *arguments, **options)

    def communicate(self) -> tuple[str, ...]:
        """Return what the process has printed, once it has ended."""
        self.process.wait()
        return tuple(path.read_text() for path in self._printed)


def ended(command: Command) -> int:
    """Return the exit code of a process, whose output is shown if the test fails."""
    print(*command.communicate())  # noqa: T201 -- see above
    return int(command.process.returncode)


def interrupt(command: Command, photos: Path, number: int) -> tuple[str, ...]:
    """Send a signal when the first photos are recorded; return what the process printed."""

    def recorded() -> bool:
        assert command.process.poll() is None, command.communicate()
        return photos.exists() and photos.read_bytes().count(b"\n") == HELD

    wait_until(recorded)
    command.process.send_signal(number)
    return command.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_interrupted_diff_goes_on_and_reports_the_same(
    start: Any, server: Any, looks: Looks, tmp_path: Path, number: int
) -> None:
    models = ("--sample", "4", "--baseline", "tiny", "--candidate", "large", "-o")
    whole, out = tmp_path / "whole", tmp_path / "out"
    assert ended(start(*models, whole)) == 1
    before = len(looks.explained)

    looks.hold_after = before + HELD
    server.stream_ended.clear()
    killed = start(*models, out)
    printed = interrupt(killed, out / "recordings/baseline/photos.jsonl", number)
    server.stream_ended.wait()  # from now on no request of that process counts
    left = {path.name for path in out.iterdir()}
    looks.hold_after = 1 << 30
    looks.release.set()
    explained = len(looks.explained)
    again = start(*models, out)
    output = again.communicate()

    assert printed == (
        "",
        "error: interrupted: run the same command again to go on\n" if number == signal.SIGINT else "",
    )
    assert killed.process.returncode == (2 if number == signal.SIGINT else -signal.SIGKILL)
    assert left == {".lock", "recordings"}
    assert again.process.returncode == 1, output
    assert json.loads((out / "report.json").read_bytes()) == json.loads((whole / "report.json").read_bytes())
    # The rest of the baseline, the calibration, and the candidate.
    assert len(looks.explained) - explained == before - HELD
    assert not list(out.rglob("*.tmp"))


@pytest.mark.slow
def test_killed_accept_keeps_the_baseline_and_goes_on(start: Any, looks: Looks, tmp_path: Path) -> None:
    base = tmp_path / "base"
    command = ("--sample", "4", "--accept", "--baseline", base, "--candidate")
    assert ended(start(*command, "tiny")) == 0
    before = {path.name: path.read_bytes() for path in base.iterdir()}

    looks.hold_after = len(looks.explained) + HELD
    killed = start(*command, "large")
    interrupt(killed, base / ".new/baseline/photos.jsonl", signal.SIGKILL)
    assert {path.name: path.read_bytes() for path in base.iterdir() if path.is_file()} == before
    looks.hold_after = 1 << 30
    looks.release.set()

    assert ended(start(*command, "large")) == 0
    assert {path.name for path in base.iterdir()} == set(before)
    assert json.loads((base / "recording.json").read_bytes())["model"] == "large"
