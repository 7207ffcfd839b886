"""Choose from what was measured; pure."""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from camserve_server.core.errors import ConfigError
from camserve_server.tuning.survey import GAIN, Cell, Survey

Way = tuple[int, int]
"""How a server computes, whatever the model: images in a batch at most, and threads."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What was chosen.

    Attributes:
        batch: images in a batch at most.
        threads: to compute with.
        cells: of each model, what was measured of it that way, in the precision chosen.
        reason: in words.
    """

    batch: int
    threads: int
    cells: Mapping[str, Cell]
    reason: str


def choose(found: Survey, usual: Mapping[str, str], latency: float, *, any_precision: bool = False) -> Choice:
    """Choose the fastest way for the model that it serves worst, compared with that model's own fastest.

    Of ways that are as fast but for 5 %, the one with the smallest batches, which are answered soonest.

    Args:
        found: what was measured.
        usual: of each model, the precision that it is in if nothing else is asked for.
        latency: seconds that a batch may take, where any takes less.
        any_precision: whether another precision may be taken because it is faster. Numbers are not traded for speed
            unasked.

    Raises:
        ConfigError: no way was measured for every model.
    """
    ways = _ways(cell for cell in found.cells if any_precision or cell.line.precision == usual[cell.line.model])
    complete = {way: cells for way, cells in ways.items() if len(cells) == len(usual)}
    if not complete:
        raise ConfigError("there was no time to measure every model: allow more seconds")
    quick = {way: cells for way, cells in complete.items() if _longest(cells) <= latency}
    allowed = quick or {min(complete, key=lambda way: _longest(complete[way])): {}}
    allowed = {way: complete[way] for way in allowed}
    scores = {way: _score(cells, allowed.values()) for way, cells in allowed.items()}
    enough = max(scores.values()) / GAIN
    batch, threads = min((way for way in allowed if scores[way] >= enough), key=lambda way: (way[0], -scores[way]))
    cells = allowed[batch, threads]
    words = _why_batch((batch, threads), complete, latency) if quick else _why_slow(cells, latency)
    return Choice(batch, threads, cells, f"{_named(batch, 'image')} a batch and {_named(threads, 'thread')}: {words}")


def _ways(cells: Iterable[Cell]) -> dict[Way, dict[str, Cell]]:
    """Find each model's fastest cell of each way."""
    ways: dict[Way, dict[str, Cell]] = defaultdict(dict)
    for cell in cells:
        here, name = ways[cell.batch, cell.line.threads], cell.line.model
        if name not in here or cell.rate > here[name].rate:
            here[name] = cell
    return ways


def _longest(cells: Mapping[str, Cell]) -> float:
    return max(cell.seconds for cell in cells.values())


def _score(cells: Mapping[str, Cell], others: Iterable[Mapping[str, Cell]]) -> float:
    """Return the least share that a model gets of its own greatest speed."""
    every = list(others)
    return min(cell.rate / max(other[name].rate for other in every) for name, cell in cells.items())


def _why_batch(way: Way, ways: Mapping[Way, Mapping[str, Cell]], latency: float) -> str:
    batch, threads = way
    if (larger := ways.get((2 * batch, threads))) is None:
        return "larger batches were not measured"
    if (took := _longest(larger)) > latency:
        return f"{2 * batch} would take {_milliseconds(took)}, and {_milliseconds(latency)} is the limit"
    gain = max(cell.rate / ways[way][name].rate for name, cell in larger.items()) - 1
    return f"{2 * batch} would bring {gain:.0%} more" if gain > 0 else f"{2 * batch} would bring nothing more"


def _why_slow(cells: Mapping[str, Cell], latency: float) -> str:
    return (
        f"a batch takes {_milliseconds(_longest(cells))}, and nothing measured takes less than {_milliseconds(latency)}"
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f} ms"


def _named(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
