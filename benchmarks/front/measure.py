"""Measure the front: requests a second, processor time and lock time of each kind of request, beside their floors."""

import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack

from benchmarks.front import against, tables
from benchmarks.front.bursts import INSTANT, SLEEPING, Load, Sample, Server, knows, sample, started
from benchmarks.front.echo import echoing
from benchmarks.front.floor import processor_time
from benchmarks.front.load import KINDS, Generator, generator
from benchmarks.front.tables import Rounds
from benchmarks.results import Part
from benchmarks.scale import Scale
from benchmarks.serving import SERVE, environment_of
from benchmarks.timing import ratio

ALONE, MANY = 1, 32  # requests under way
OVERLAY, RAW, _, STREAM = KINDS
MOST = 1.4  # times its floor that the front may take for a request
FLAG = "--processes"
SPREAD = 16  # connections to several processes: the kernel deals them out at random

LOADS = (
    *(Load(kind, SLEEPING, under_way) for kind in KINDS for under_way in (ALONE, MANY)),
    *(Load(OVERLAY, INSTANT, under_way) for under_way in (ALONE, MANY)),
)

Say = Callable[[str], None]


def measure(scale: Scale, *, say: Say = print) -> Part:
    """Measure this server's front; or, if the scale names another checkout, compare both."""
    if scale.against is not None:
        return against.measure(scale, scale.against, say=say)
    part = Part("front")
    with generator() as clients, started() as server:
        found = _rounds(scale, clients, server, say)
    part.tables += [tables.load_table(found.server), tables.floor_table(found)]
    hold(part, found)
    load = Load(OVERLAY, SLEEPING, MANY)
    if counts := counts_of(scale, say):
        part.tables.append(tables.processes_table(load.name, _of_processes(scale, counts, load, say)))
    part.tables.append(tables.cores_table(found.server[load]))
    return part


def _rounds(scale: Scale, clients: Generator, server: Server, say: Say) -> Rounds:
    """Let the server, the bare servers and the picture work take turns, after a burst of each load that warms up."""
    found = Rounds()
    warm = {load: sample(clients, server, load, scale.stretch / 6) for load in LOADS}
    with ExitStack() as stack:
        sizes = {kind: round(warm[Load(kind, SLEEPING, MANY)].size) for kind in KINDS}
        bare = {kind: Server.of(stack.enter_context(echoing(size))) for kind, size in sizes.items()}
        for number in range(scale.rounds):
            for load in LOADS:
                _turn(found, clients, (server, bare[load.kind]), load, scale.stretch)
            for kind in KINDS:
                found.pictures.setdefault(kind, []).append(processor_time(kind, scale.stretch / 6))
            took = (f"{load.name} {1e3 * samples[-1].front:.2f}" for load, samples in found.server.items())
            say(f"front: round {number + 1}, ms of processor time a request: {'; '.join(took)}")
    return found


def _turn(found: Rounds, clients: Generator, servers: tuple[Server, Server], load: Load, seconds: float) -> None:
    """Measure a load on the server and on the bare one."""
    server, bare = servers
    many = load.under_way == MANY
    one = sample(clients, server, load, seconds if many else seconds / 2, locked=many)
    found.server.setdefault(load, []).append(one)
    found.bare.setdefault(load, []).append(sample(clients, bare, load, seconds / 6).front)


def hold(part: Part, found: Rounds) -> None:
    """Hold the front's processor time to its bars."""
    for kind in (OVERLAY, RAW):
        load = Load(kind, SLEEPING, MANY)
        part.at_most(f"{load.name}: front's processor time / floor", MOST, statistics.median(found.multiples(load)))
    stream, unary = ([one.front for one in found.server[Load(kind, SLEEPING, MANY)]] for kind in (STREAM, OVERLAY))
    part.at_most("front's processor time: stream / unary", 1.0, ratio(stream, unary))


def counts_of(scale: Scale, say: Say) -> list[int]:
    """Return the numbers of processes above one to measure; none if the server does not know the flag."""
    counts = [count for count in scale.processes if count > 1]
    if counts and not knows(FLAG, serve_help()):
        say(f"front: skipped {FLAG} {','.join(map(str, counts))}: this server has no such flag")
        return []
    return counts


def serve_help() -> str:
    """Return the help of `camserve-server serve`."""
    command, environment = [sys.executable, *SERVE, "--help"], environment_of(None)
    ran = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)  # noqa: S603 -- ours
    return ran.stdout


def _of_processes(scale: Scale, counts: Sequence[int], load: Load, say: Say) -> dict[int, list[Sample]]:
    """Let a server of one process and servers of several take turns."""
    found = dict[int, list[Sample]]()
    with ExitStack() as stack:
        clients = stack.enter_context(generator())
        servers = {count: stack.enter_context(started(*flags_of(count))) for count in (1, *counts)}
        for count, server in servers.items():
            say(f"front: {FLAG} {count}: number of processes that listen: {len(server.fronts)}")
            sample(clients, server, load, scale.stretch / 6, channels=SPREAD)
        for _ in range(scale.rounds):
            for count, server in servers.items():
                found.setdefault(count, []).append(sample(clients, server, load, scale.stretch, channels=SPREAD))
    return found


def flags_of(processes: int) -> tuple[str, ...]:
    """Return the flags that start a server of several processes; none for one, which every server is without them."""
    return (FLAG, str(processes)) if processes > 1 else ()
