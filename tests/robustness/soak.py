"""Soak test: a real server at saturation and under mixed load, and the resources that it still holds afterwards.

    python -m robustness.soak [--saturation SECONDS] [--minutes MINUTES] [--model MODEL]

The first part sends one kind of request, from more callers than the queue has room for, and compares this with as many
callers as keep the server busy. The second part sends all kinds of requests, also invalid ones, short deadlines and
cancelled calls; the second half of its time shows whether memory grows. The program prints the figures and compares
them with the limits below. It exits with 1 if a figure is beyond its limit.
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
from robustness import load, soak_models, tree
from server_process import ServerProcess, server_process

HERE = Path(__file__).parents[1]
MODEL = "efficientnet_lite0"
SOAK_MODEL = "{0}=robustness.soak_models:{0}?size=64"
QUEUE = 32  # rows
CROWD = 64
BUSY = (16, 24)  # callers that keep the server busy and are never refused

GOODPUT = 0.95  # least share of the peak rate, with more callers than the queue has room for
REFUSAL = 0.050  # seconds, 99th percentile
OTHER_LOAD = 0.1  # share of the machine that other programs may use meanwhile
RISE, LEFT = 300.0, 0.05  # MB that memory may rise under load, and the share that may remain later
SLOPE = 1.0  # MB a minute
SPEED = "goodput / peak", "refusals' p99, s"
MEMORY = "memory's slope in the second half, MB a minute"
GRPC, GRPC_THREADS = "event_engine", 16  # a pool that grows under load and shrinks by itself
SETTLE_TIMEOUT = 120.0  # seconds after which what a load has left counts as leaked; only leaks last that long
OBJECTS = 1000  # Python objects: methods fill tables at their first use


@dataclass
class Report:
    """Figures, and a text for each that is beyond its limit."""

    figures: dict = field(default_factory=dict)
    broken: list = field(default_factory=list)

    def hold(self, name, value, limit, *, least=False):
        self.figures[name] = value
        if not (value >= limit if least else value <= limit):
            self.broken.append(f"{name}: {value:.4g}, and {limit:g} is the limit")


@dataclass
class Served:
    """A server, and the file that its worker writes its counts to."""

    process: ServerProcess
    counted: Path


@contextmanager
def served(*models):
    """Serve models, also those of `soak_models`, with half of the cores."""
    threads = str(max(1, len(os.sched_getaffinity(0)) // 2))
    with tempfile.TemporaryDirectory() as folder:
        counted = Path(folder) / "counted"
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        flags = ("--threads", threads, "--max-queue-rows", str(QUEUE))
        with (
            patch.dict(os.environ, {"PYTHONPATH": path, soak_models.COUNTS_FILE: str(counted)}),
            server_process(models, *flags) as process,
        ):
            yield Served(process, counted)


# --- saturation ---


@dataclass
class Round:
    """Figures of a round; `others` is the share of the machine that neither the server nor its callers used."""

    rate: float
    peak: float
    late: float
    others: float
    memory: float
    codes: Counter


def settle(has_settled):
    """Wait until the server has released what a load took; with a leak, until `SETTLE_TIMEOUT`."""
    until = time.monotonic() + SETTLE_TIMEOUT
    while not has_settled() and time.monotonic() < until:
        time.sleep(0.2)  # real timeout: an interval between two looks


def saturation(server, seconds, rounds=3, enough=lambda _answers: True):
    """Let 64 callers send requests in rounds, compared with callers that are never refused; then let the server rest.

    The callers go on until `enough` is true of their answers.

    Other programs make a round slower, never faster. So the best of the rounds with an idle machine counts. Without
    such a round the server's speed is unknown, and `disturbed` is set.
    """
    report, server = Report(), server.process
    load.run(server.address, BUSY[-1], min(3.0, seconds / 4))
    idle = tree.memory(server.pid)
    results = [_round(server, seconds / rounds, enough) for _ in range(rounds)]
    settle(lambda: tree.memory(server.pid) / idle - 1 <= LEFT)
    codes = sum((result.codes for result in results), Counter())
    report.figures |= {"answers": dict(codes), "disturbed": min(result.others for result in results) > OTHER_LOAD}
    report.figures["rounds"] = [
        [result.rate, result.peak, result.rate / (result.peak or 1.0), result.late, result.others] for result in results
    ]
    report.hold("other codes", len(codes.keys() - {"OK", "RESOURCE_EXHAUSTED"}), 0)
    if quiet := [result for result in results if result.others <= OTHER_LOAD]:
        report.hold(SPEED[0], max(result.rate / (result.peak or 1.0) for result in quiet), GOODPUT, least=True)
        report.hold(SPEED[1], min(result.late for result in quiet), REFUSAL)
    report.hold("memory's rise, MB", max(result.memory for result in results) - idle, RISE)
    report.hold("memory left, share", tree.memory(server.pid) / idle - 1, LEFT)
    return report


def _round(server, seconds, enough):
    began, before = time.monotonic(), _others(server)
    peak = max(_goodput(server, callers, seconds / 4)[0] for callers in BUSY)
    rate, answers = _goodput(server, CROWD, seconds, enough=enough)
    others = (_others(server) - before) / (time.monotonic() - began) / os.cpu_count()
    late = [answer.took for answer in answers if answer.code is not load.OK]
    codes = Counter(answer.code.name for answer in answers)
    return Round(rate, peak, float(np.percentile(late, 99)) if late else 0.0, others, tree.memory(server.pid), codes)


def _others(server):
    """Return the seconds of processor time that programs other than the server and this one have used."""
    return tree.busy() - tree.cpu(server.pid) - time.process_time()


def _goodput(server, callers, seconds, **options):
    """Return the explanations a second and all answers."""
    began = time.perf_counter()
    answers, _ = load.run(server.address, callers, seconds, **options)
    warm = min(1.0, seconds / 4)
    return load.rate(answers, began + warm, began + seconds), answers


# --- mixed load ---


@dataclass
class Sample:
    """The server's resources at one time, and the processor time that it and its callers had used."""

    at: float
    memory: float
    files: int
    threads: Counter
    server: float
    callers: float


def sample(server):
    held = tree.memory(server.pid), tree.files(server.pid), tree.threads(server.pid)
    return Sample(time.monotonic(), *held, tree.cpu(server.pid), time.process_time())


def slope(samples):
    """Return the median of all slopes between two samples, in MB a minute: outliers have little effect on it."""
    at, memory = np.array([item.at for item in samples]) / 60, np.array([item.memory for item in samples])
    first, second = np.triu_indices(len(samples), 1)
    return float(np.median((memory[second] - memory[first]) / (at[second] - at[first])))


def soak(server, model, seconds, *, every=1.0, seed=0, enough=lambda _answers: True):
    """Send all kinds of requests for some time; compare the server's resources afterwards with those before.

    Args:
        server: the server, from `served`.
        model: name of a model of `soak_models`.
        seconds: duration of the load.
        every: seconds between samples.
        seed: seed of the random requests.
        enough: function of the answers; the load goes on until it is true.
    """
    requests = load.seeded_requests(seed, model=model, poisons=poisons(model))
    load.run(server.process.address, CROWD, min(5.0, seconds / 3), requests)  # fills caches
    time.sleep(min(2.0, seconds / 4))
    before, had = sample(server.process), worker_counts(server, model)
    answers, samples = asyncio.run(_everything(server.process, model, requests, seconds, every, enough))
    busy = sample(server.process)
    settle(lambda: not _left(before, sample(server.process)))
    after, rise = sample(server.process), worker_counts(server, model)
    rise.subtract(had)
    half = samples[len(samples) // 2 :]
    report = Report()
    report.figures |= {
        "answers": dict(Counter(answer.code.name for answer in answers)),
        "a second": sum(answer.code is load.OK for answer in answers) / seconds,
        "processor, callers": (busy.callers - before.callers) / seconds,
        "processor, server": (busy.server - before.server) / seconds,
        "memory, MB": [round(item.memory) for item in (before, half[0], half[-1], after)],
    }
    report.hold("answers that are not right", sum(not answer.right for answer in answers), 0)
    report.hold(MEMORY, slope(half), SLOPE)
    report.hold("open files more than before", after.files - before.files, 0)
    threads = Counter(after.threads)
    threads.subtract(before.threads)
    report.figures["threads, by name"] = {name: (before.threads[name], count) for name, count in after.threads.items()}
    report.hold("gRPC's threads", after.threads[GRPC], GRPC_THREADS)
    report.hold("other threads more than before", threads.total() - threads[GRPC], 0)
    report.hold("hooks more than before", rise["hooks"], 0)
    # Half of the counts, which are the sum of two methods. Caches are filled by the first requests.
    report.hold("objects in the engine more than before", rise["objects"] / 2, OBJECTS)
    report.hold("heap of the engine in use more than before, MB", rise["heap"] / 2, max(1.0, SLOPE * seconds / 60))
    return report


def _left(before, after):
    """Return True if a server holds more files or threads than it may."""
    threads = after.threads.total() - after.threads[GRPC] - before.threads.total() + before.threads[GRPC]
    return after.files > before.files or after.threads[GRPC] > GRPC_THREADS or threads > 0


async def _everything(server, model, requests, seconds, every, enough):
    """Send requests for some time; return the answers, and samples of the server meanwhile."""
    samples = []

    async def watch():
        while True:
            samples.append(await asyncio.to_thread(sample, server))
            await asyncio.sleep(every)

    async with load.Callers(server.address) as callers:
        watching = asyncio.create_task(watch())
        item = explain_pb2.ExplainStreamRequest(request_id="r", request=load.request(load.photo(0), model=model))
        streams = callers.stream(seconds, item.SerializeToString())
        await asyncio.gather(callers.closed(CROWD - 1, seconds, requests, enough), streams)
        watching.cancel()
        return callers.answers, samples


def poisons(model):
    """Return requests on which the model fails: out of memory, a hook that raises, a layer that does not run."""
    pictures = [soak_models.image(name) for name in ("out of memory", "raising hook", "bad layer")]
    return [load.request(png(picture), ("gradcam", {}), model=model).SerializeToString() for picture in pictures]


def png(image):
    packed = io.BytesIO()
    Image.fromarray(image).save(packed, "PNG")
    return packed.getvalue()


def worker_counts(server, model):
    """Return the counts of `soak_models.counts` in the worker, summed over a CAM and a gradient method."""
    total = Counter()
    for method in ("gradcam", "saliency"):
        server.counted.unlink(missing_ok=True)
        packed = load.request(png(soak_models.image("count")), (method, {}), model=model).SerializeToString()
        (answer, *_), _ = load.run(server.process.address, 1, 0.01, itertools.repeat(load.Item(packed)))
        if answer.code is not load.OK:
            raise RuntimeError(f"the model did not write its counts: {answer.code.name}")
        total.update(json.loads(server.counted.read_text()))
    return total


# --- the program ---


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--saturation", type=float, default=60.0, help="seconds; 0 leaves it out")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument(
        "--model", default="poisoned", help="a function of soak_models.py; `leaking` has leaks to detect"
    )
    chosen = parser.parse_args()
    reports = {}
    if chosen.saturation:
        with served(MODEL) as server:
            reports["saturation"] = print_report("saturation", saturation(server, chosen.saturation))
    if chosen.minutes:
        with served(SOAK_MODEL.format(chosen.model)) as server:
            reports["soak"] = print_report("soak", soak(server, chosen.model, 60 * chosen.minutes))
    return int(any(report.broken for report in reports.values()))


def print_report(name, report):
    for figure, value in report.figures.items():
        shown = (
            f"{value:.4g}" if isinstance(value, float) else json.dumps(value, default=lambda number: round(number, 3))
        )
        print(f"{name}: {figure}: {shown}", flush=True)  # noqa: T201 -- a program that reports
    for line in report.broken:
        print(f"{name}: NOT KEPT: {line}", flush=True)  # noqa: T201
    return report


if __name__ == "__main__":
    sys.exit(main())
