"""Parts of the test suite: files that one process of pytest tests."""

import json
import random
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

FOLDERS = ("tests", "service/camserve_server", "clients/python/camserve")
SECONDS = "tools/suite/seconds.json"
ALL_SLOW = re.compile(r"^pytestmark = (\[\s*)?pytest\.mark\.slow", re.MULTILINE)
GENERATED = "_sync"  # folder whose examples are slow: conftest.py marks them

CHOICES = {"fast": "not slow and not search", "slow": "slow and not search", "all": "not search"}
"""Expressions that choose tests by their markers."""

PART_SECONDS = 100  # of a part, if there are fewer than MOST_PARTS
MOST_PARTS = 8  # the start of each takes 4 s of processor time, most of it for what the tests compare with
DEFAULT_SECONDS = 0.3  # of a file that is not listed in SECONDS

ONE_THREAD = {"OMP_NUM_THREADS": "1"}
GROUPS: dict[str, dict[str, str]] = {
    "tests/simulated/": ONE_THREAD,  # its simulated GPU changes torch for the whole process
    "tests/e2e/": {},  # its workers compute with as many threads as in production
    "tests/robustness/": {},
    "": ONE_THREAD,
}
"""Folders whose files share a process with no others, and the environment variables of the process."""


@dataclass(frozen=True)
class Part:
    """Files that one process tests.

    Attributes:
        files: paths below the root.
        seconds: expected time.
    """

    files: tuple[str, ...]
    seconds: float

    @property
    def title(self) -> str:
        """The folders, or the only file."""
        folders = dict.fromkeys("/".join(file.split("/")[:-1][:2]) for file in self.files)
        return self.files[0] if len(self.files) == 1 else ", ".join(folders)

    @property
    def variables(self) -> dict[str, str]:
        """Environment variables of the process, beside those of this one."""
        return GROUPS[_group(self.files[0])]


def _group(file: str) -> str:
    return next(folder for folder in GROUPS if file.startswith(folder))


def find(root: Path, choice: str) -> Iterator[str]:
    """Yield the files with tests or examples, but no file of which all tests have the other marker."""
    for path in sorted(each for folder in FOLDERS for each in (root / folder).rglob("*.py") if "_pb2" not in each.name):
        text = path.read_text(encoding="utf-8")
        has_slow = "mark.slow" in text or GENERATED in path.parts
        chosen = {"fast": not ALL_SLOW.search(text), "slow": has_slow, "all": True}[choice]
        if chosen and (path.name.startswith("test_") or ">>> " in text):
            yield path.relative_to(root).as_posix()


def divide(files: Iterable[str], seconds: Mapping[str, float], seed: int | None = None) -> list[Part]:
    """Divide files into parts; files of a folder stay together, because they share fixtures.

    Parts that test servers come first, as they often wait, and other parts compute meanwhile; then the longest parts.

    With a seed, the order of folders, of the files in each, and of the parts is random.
    """
    chance, order = random.Random(seed), sorted(files)  # noqa: S311 -- an order to repeat, no secret
    if seed is not None:
        order = _shuffled(order, chance)
    times = {file: seconds.get(file, DEFAULT_SECONDS) for file in order}
    limit = max(PART_SECONDS, sum(times.values()) / MOST_PARTS)
    parts = [
        part
        for group in GROUPS
        for part in _cut({file: time for file, time in times.items() if _group(file) == group}, limit)
    ]
    if seed is None:
        return sorted(parts, key=lambda part: (bool(part.variables), -part.seconds))
    return chance.sample(parts, len(parts))


def _shuffled(files: list[str], chance: random.Random) -> list[str]:
    folders = defaultdict(list)
    for file in files:
        folders[file.rpartition("/")[0]].append(file)
    order = chance.sample(list(folders), len(folders))
    return [file for folder in order for file in chance.sample(folders[folder], len(folders[folder]))]


def _cut(times: dict[str, float], limit: float) -> Iterator[Part]:
    """Cut a list of files with their times into parts that are about equally long, and about as long as the limit."""
    length = sum(times.values()) / max(1, round(sum(times.values()) / limit))
    chosen = defaultdict[int, list[str]](list)
    total = 0.0
    for file, time in times.items():
        chosen[int((total + time / 2) / length)].append(file)
        total += time
    for files in chosen.values():
        yield Part(tuple(files), sum(times[file] for file in files))


def expected_seconds(root: Path, choice: str) -> dict[str, float]:
    """Return the listed time of each file."""
    result = defaultdict[str, float](float)
    for speed in _speeds(choice):
        for file, seconds in _listed(root).get(speed, {}).items():
            result[file] += seconds
    return result


def record_seconds(root: Path, choice: str, measured: Mapping[tuple[str, str], float]) -> None:
    """List the times of the files that took a second or more."""
    listed = _listed(root)
    for chosen in _speeds(choice):
        times = ((file, round(seconds)) for (speed, file), seconds in sorted(measured.items()) if speed == chosen)
        listed[chosen] = {file: seconds for file, seconds in times if seconds}
    (root / SECONDS).write_text(json.dumps(listed, indent=2) + "\n", encoding="utf-8")


def _speeds(choice: str) -> tuple[str, ...]:
    return ("fast", "slow") if choice == "all" else (choice,)


def _listed(root: Path) -> dict[str, dict[str, float]]:
    path = root / SECONDS
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
