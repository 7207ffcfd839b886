"""A long night in short: a real server at saturation, and what it has left when it is over.

    python -m robustness.soak [--saturation SECONDS] [--minutes MINUTES] [--model MODEL]

First callers that ask for one thing, more of them than the queue has room for, beside as many as keep the server busy.
Then callers that ask for everything, with mistakes, deadlines too short and calls taken back among it; the second half
of their time says whether memory grows. It prints what it measures and holds it to the limits below; it ends with 1 if
one is not kept.
"""

import argparse
import asyncio
import io
import itertools
import json
import os
import sys
import tempfile
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import numpy as np
from PIL import Image

from camserve.v1 import explain_pb2
from robustness import crowd, soaked, tree
from server_process import ServerProcess, server_process

HERE = Path(__file__).parents[1]
MODEL = "efficientnet_lite0"
WATCHED = "{0}=robustness.soaked:{0}?size=64"
QUEUE = 32  # rows
CROWD = 64
BUSY = (16, 24)  # callers that keep the server busy, and are never refused

GOODPUT = 0.95  # of the peak, with more callers than there is room for
REFUSAL = 0.050  # seconds that a refusal may take, 99 of 100
BESIDE = 0.1  # of the machine that others may use meanwhile
RISE, LEFT = 300.0, 0.05  # MB that memory may rise under load; share that may be left of it later
SLOPE = 1.0  # MB a minute
SPEED = "goodput / peak", "refusals' p99, s"
MEMORY = "memory's slope in the second half, MB a minute"
GRPC, GRPC_THREADS = "event_engine", 16  # a pool that grows under load and shrinks by itself
OBJECTS = 1000  # of Python: tables that are filled as methods are first used


@dataclass
class Report:
    """What was measured, and which limits were not kept."""

    figures: dict = field(default_factory=dict)
    broken: list = field(default_factory=list)

    def hold(self, name, value, limit, *, least=False):
        self.figures[name] = value
        if not (value >= limit if least else value <= limit):
            self.broken.append(f"{name}: {value:.4g}, and {limit:g} is the limit")


@dataclass
class Served:
    """A server, and the file in which its engine writes what it holds."""

    process: ServerProcess
    counted: Path


@contextmanager
def served(*models):
    """Serve models, those of `soaked` among them, with half of the cores."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counted"
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        flags = ("--threads", threads, "--max-queue-rows", str(QUEUE))
        with (
            patch.dict(os.environ, {"PYTHONPATH": path, soaked.COUNTED: str(counted)}),
            server_process(models, *flags) as process,
        ):
            yield Served(process, counted)


# --- more callers than there is room for ---


@dataclass
class Round:
    """What came of a round: `others` is the share of the machine that neither the server nor its callers used."""

    rate: float
    peak: float
    late: float
    others: float
    memory: float
    codes: Counter


def saturation(server, seconds, rest, rounds=3):
    """Let 64 callers ask for so long, in rounds, beside as many as are never refused; then leave the server alone.

    Whatever else a machine does makes a round worse, and never better: the best one counts, of those that had the
    machine for themselves. If there was none, how fast the server was is not known, and `disturbed` is set.
    """
    report, server = Report(), server.process
    crowd.run(server.address, BUSY[-1], min(3.0, seconds / 4))
    idle = tree.memory(server.pid)
    made = [_round(server, seconds / rounds) for _ in range(rounds)]
    time.sleep(rest)
    codes = sum((one.codes for one in made), Counter())
    report.figures |= {"answers": dict(codes), "disturbed": min(one.others for one in made) > BESIDE}
    report.figures["rounds"] = [[one.rate, one.peak, one.rate / one.peak, one.late, one.others] for one in made]
    report.hold("other codes", len(codes.keys() - {"OK", "RESOURCE_EXHAUSTED"}), 0)
    if quiet := [one for one in made if one.others <= BESIDE]:
        report.hold(SPEED[0], max(one.rate / one.peak for one in quiet), GOODPUT, least=True)
        report.hold(SPEED[1], min(one.late for one in quiet), REFUSAL)
    report.hold("memory's rise, MB", max(one.memory for one in made) - idle, RISE)
    report.hold("memory left, share", tree.memory(server.pid) / idle - 1, LEFT)
    return report


def _round(server, seconds):
    began, before = time.monotonic(), _others(server)
    peak = max(_goodput(server, callers, seconds / 4)[0] for callers in BUSY)
    rate, answers = _goodput(server, CROWD, seconds)
    others = (_others(server) - before) / (time.monotonic() - began) / os.cpu_count()
    late = [one.took for one in answers if one.code is not crowd.OK]
    codes = Counter(one.code.name for one in answers)
    return Round(rate, peak, float(np.percentile(late, 99)), others, tree.memory(server.pid), codes)


def _others(server):
    """Return the seconds of processor time that others than the server and this process have used."""
    return tree.busy() - tree.cpu(server.pid) - time.process_time()


def _goodput(server, callers, seconds):
    """Return explanations a second, and all answers."""
    began = time.perf_counter()
    answers, _ = crowd.run(server.address, callers, seconds)
    warm = min(1.0, seconds / 4)
    return crowd.rate(answers, began + warm, began + seconds), answers


# --- everything at once ---


@dataclass
class Sample:
    """What the server held at one time, and the processor time that it and its callers had used."""

    at: float
    memory: float
    files: int
    threads: Counter
    server: float
    callers: float


def taken(server):
    held = tree.memory(server.pid), tree.files(server.pid), tree.threads(server.pid)
    return Sample(time.monotonic(), *held, tree.cpu(server.pid), time.process_time())


def slope(samples):
    """Return the median of all slopes between two samples, in MB a minute: a few odd ones do not count."""
    at, memory = np.array([one.at for one in samples]) / 60, np.array([one.memory for one in samples])
    first, second = np.triu_indices(len(samples), 1)
    return float(np.median((memory[second] - memory[first]) / (at[second] - at[first])))


def soak(server, model, seconds, *, every=1.0, seed=0):
    """Let callers ask for everything for so long; hold what the server has left to what it had.

    Args:
        server: that is served.
        model: of `soaked`.
        seconds: that they ask.
        every: seconds a sample is taken.
        seed: of their questions.
    """
    questions = crowd.seeded(seed, model=model, poisons=poisons(model))
    crowd.run(server.process.address, CROWD, min(5.0, seconds / 3), questions)  # so that what is made once is there
    time.sleep(min(2.0, seconds / 4))
    before, had = taken(server.process), held(server, model)
    answers, samples = asyncio.run(_everything(server.process, model, questions, seconds, every))
    busy = taken(server.process)
    time.sleep(min(20.0, seconds / 4))
    after, more = taken(server.process), held(server, model)
    more.subtract(had)
    half = samples[len(samples) // 2 :]
    report = Report()
    report.figures |= {
        "answers": dict(Counter(one.code.name for one in answers)),
        "a second": sum(one.code is crowd.OK for one in answers) / seconds,
        "processor, callers": (busy.callers - before.callers) / seconds,
        "processor, server": (busy.server - before.server) / seconds,
        "memory, MB": [round(one.memory) for one in (before, half[0], half[-1], after)],
    }
    report.hold("answers that are not right", sum(not one.right for one in answers), 0)
    report.hold(MEMORY, slope(half), SLOPE)
    report.hold("open files more than before", after.files - before.files, 0)
    threads = Counter(after.threads)
    threads.subtract(before.threads)
    report.figures["threads, by name"] = {name: (before.threads[name], count) for name, count in after.threads.items()}
    report.hold("gRPC's threads", after.threads[GRPC], GRPC_THREADS)
    report.hold("other threads more than before", threads.total() - threads[GRPC], 0)
    report.hold("hooks more than before", more["hooks"], 0)
    # Half of what was counted twice; what is kept for the next request is there after the first ones.
    report.hold("objects in the engine more than before", more["objects"] / 2, OBJECTS)
    report.hold("heap of the engine in use more than before, MB", more["heap"] / 2, max(1.0, SLOPE * seconds / 60))
    return report


async def _everything(server, model, questions, seconds, every):
    """Let callers ask for so long; return their answers, and samples of the server meanwhile."""
    samples = []

    async def watch():
        while True:
            samples.append(await asyncio.to_thread(taken, server))
            await asyncio.sleep(every)

    async with crowd.Crowd(server.address) as callers:
        watching = asyncio.create_task(watch())
        item = explain_pb2.ExplainStreamRequest(request_id="r", request=crowd.request(crowd.photo(0), model=model))
        streamed = callers.streamed(seconds, item.SerializeToString())
        await asyncio.gather(callers.closed(CROWD - 1, seconds, questions), streamed)
        watching.cancel()
        return callers.answers, samples


def poisons(model):
    """Requests that the model fails: for want of memory, because a hook raises, because a layer is not reached."""
    colours = [soaked.image(name) for name in ("out of memory", "raising hook", "bad layer")]
    return [crowd.request(png(one), ("gradcam", {}), model=model).SerializeToString() for one in colours]


def png(image):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return packed.getvalue()


def held(server, model):
    """What the engine holds, by the model's own count, while it is explained and while it is differentiated."""
    total = Counter()
    for method in ("gradcam", "saliency"):
        server.counted.unlink(missing_ok=True)
        asked = crowd.request(png(soaked.image("count")), (method, {}), model=model).SerializeToString()
        (answer, *_), _ = crowd.run(server.process.address, 1, 0.01, itertools.repeat(crowd.Asked(asked)))
        if answer.code is not crowd.OK:
            raise RuntimeError(f"the model does not tell what it holds: {answer.code.name}")
        total.update(json.loads(server.counted.read_text()))
    return total


# --- the program ---


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--saturation", type=float, default=60.0, help="seconds; 0 leaves it out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--model", default="poisoned", help="a function of soaked.py; leaking is there to be found out")
    chosen = parser.parse_args()
    reports = {}
    if chosen.saturation:
        with served(MODEL) as server:
            reports["saturation"] = told("saturation", saturation(server, chosen.saturation, 30.0))
    if chosen.minutes:
        with served(WATCHED.format(chosen.model)) as server:
            reports["soak"] = told("soak", soak(server, chosen.model, 60 * chosen.minutes))
    return int(any(report.broken for report in reports.values()))


def told(name, report):
    for figure, value in report.figures.items():
        shown = f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=lambda one: round(one, 3))
        print(f"{name}: {figure}: {shown}", flush=True)  # noqa: T201 -- a program that reports
    for line in report.broken:
        print(f"{name}: NOT KEPT: {line}", flush=True)  # noqa: T201
    return report


if __name__ == "__main__":
    sys.exit(main())
