"""Compare the fronts of two checkouts: bursts alternate between their servers, and ratios are taken within a round."""

import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.front import lock
from benchmarks.front.bursts import SLEEPING, Load, Sample, Server, sample, started
from benchmarks.front.load import KINDS, Generator, generator
from benchmarks.results import Part, Table
from benchmarks.scale import Scale

UNDER_WAY = 32
THEIRS, OURS = "other checkout", "this checkout"

Say = Callable[[str], None]
Figure = Callable[["Turn"], float | None]

_NOTE = (
    "Both servers were started anew with the sleeping model. In each of {rounds} rounds both had a burst of "
    "{seconds:g} s of overlays with 32 under way, and one with a single request under way; their order alternates "
    "(ABBA). A ratio is this checkout / the other one within a round. {lock} The load generator does the same work for "
    "both: how far its ratio is from 1 is the noise of the machine."
)
_LOCK = "Lock is the wall-clock time under the front's interpreter lock by py-spy."


@dataclass(frozen=True, slots=True)
class Turn:
    """Figures of one server in one round: with many requests under way, and with one."""

    many: Sample
    alone: Sample


FIGURES: Mapping[str, Figure] = {
    "lock ms": lambda turn: turn.many.lock,
    "front ms": lambda turn: turn.many.front,
    "front and workers ms": lambda turn: turn.many.front + turn.many.workers,
    "p50 ms of one under way": lambda turn: turn.alone.p50,
    "load generator ms": lambda turn: turn.many.client,
    "ms between answers": lambda turn: 1 / turn.many.rate,
}
"""Figures of a turn in seconds, by their names in milliseconds."""


def measure(scale: Scale, other: Path, *, say: Say = print) -> Part:
    """Compare this checkout's server with the one of another checkout."""
    found: dict[str, list[Turn]] = {THEIRS: [], OURS: []}
    with generator() as clients, started(tree=other.resolve()) as theirs, started() as ours:
        servers = {THEIRS: theirs, OURS: ours}
        for server in servers.values():
            _turn(clients, server, scale.stretch)  # dropped: the first requests fill caches
        for number in range(scale.rounds):
            for name in order(number):
                found[name].append(_turn(clients, servers[name], scale.stretch))
            say(f"front: round {number + 1} of {scale.rounds}: {', '.join(_words(found))}")
    words = _NOTE.format(
        rounds=scale.rounds, seconds=scale.stretch, lock=_LOCK if lock.program() else f"{lock.MISSING}."
    )
    columns = ("figure", THEIRS, OURS, "ratio", "all rounds")
    return Part("front", [Table(f"{OURS} / {other}", columns, list(rows(found)), (words,))])


def order(number: int) -> tuple[str, str]:
    """Return the order of the servers in a round: ABBA over two rounds, so that drift counts for both alike."""
    return (OURS, THEIRS) if number % 2 else (THEIRS, OURS)


def _turn(clients: Generator, server: Server, seconds: float) -> Turn:
    many = sample(clients, server, Load(KINDS[0], SLEEPING, UNDER_WAY), seconds, locked=True)
    alone = sample(clients, server, Load(KINDS[0], SLEEPING, 1), seconds / 2)
    return Turn(many, alone)


def ratios(found: Mapping[str, Sequence[Turn]], figure: Figure) -> list[float]:
    """Return this checkout's figure over the other one's, of the rounds that have it."""
    pairs = [(figure(a), figure(b)) for a, b in zip(found[OURS], found[THEIRS], strict=True)]
    return [a / b for a, b in pairs if a is not None and b]


def rows(found: Mapping[str, Sequence[Turn]]) -> Iterator[tuple[str, ...]]:
    """Return a row for each figure: its medians, and its ratio as median and of all rounds."""
    for name, figure in FIGURES.items():
        if shares := ratios(found, figure):
            yield (
                name,
                *(f"{1e3 * statistics.median(figure(turn) or 0.0 for turn in found[each]):.2f}" for each in found),
                f"{statistics.median(shares):.3f}",
                " ".join(f"{one:.2f}" for one in shares),
            )
        else:
            yield (name, "–", "–", "–", "no py-spy")


def _words(found: Mapping[str, Sequence[Turn]]) -> Iterator[str]:
    last = {name: turns[-1:] for name, turns in found.items()}
    return (f"{name} {shares[0]:.2f}" for name, figure in FIGURES.items() if (shares := ratios(last, figure)))
