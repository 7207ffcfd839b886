"""Servers and jobs to record, started as users start them."""

import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import urllib.request
import zipfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

from prometheus_client.parser import text_string_to_metric_families
from pyarrow import parquet

import camserve
import camserve_server
from camserve_server.core import logs
from compatibility import calls, nets
from opened_ports import opened_ports
from support import wait_until

PLAIN = {"device": "cpu", "threads": 1}
EXPORTER = """
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

kept = InMemorySpanExporter()


def make():
    return kept
"""


@contextmanager
def serving():
    """Serve all models of `nets`; yield the address."""
    with camserve_server.running(nets.MODELS, admin=True, **PLAIN) as address:
        yield address


def install(folder, name, entries, files):
    """Write a package with entry points into a folder, as pip does."""
    about = folder / f"{name}-1.0.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n", encoding="utf-8")
    (about / "entry_points.txt").write_text(entries, encoding="utf-8")
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text, encoding="utf-8")


def observe(folder):
    """Return the metrics, spans and log line of a server that answers one request.

    Args:
        folder: An empty folder for the package of the span exporter.
    """
    entries = "[opentelemetry_traces_exporter]\nkept = kept_spans:make\n"
    install(folder, "kept-spans", entries, {"kept_spans.py": EXPORTER})
    environment = {"OTEL_TRACES_EXPORTER": "kept", "OTEL_TRACES_SAMPLER": "always_on"}
    with (
        mock.patch.dict(os.environ, environment),
        mock.patch.object(sys, "path", [str(folder), *sys.path]),
        _capture_log() as lines,
    ):
        with (
            opened_ports() as ports,
            camserve_server.running(nets.MODELS[:1], traces=True, metrics_address="0", **PLAIN) as address,
            camserve.Client(address) as client,
        ):
            port = ports["metrics"]
            at_rest = _read_metrics(port)
            client.explain(calls.PIXELS)
            wait_until(lambda: 'camserve_request_duration_seconds_count{code="OK"' in _text(port))
            after = _read_metrics(port)
        spans = sys.modules.pop("kept_spans").kept.get_finished_spans()
    keys = [dict.fromkeys(json.loads(line), "") for line in lines if "explanations" in line]
    return {
        "at rest": at_rest,
        "after a request": after,
        "spans": {span.name: dict.fromkeys(sorted(span.attributes), "") for span in spans},
        "log": keys[0],
    }


@contextmanager
def _capture_log():
    """Yield a list that receives the server's log lines, as JSON, when the block ends."""
    stream, logger = io.StringIO(), logging.getLogger("camserve_server")
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logs.JsonFormatter())
    exporter_logger = logging.getLogger("opentelemetry")
    before = logger.level, exporter_logger.handlers[:], exporter_logger.propagate
    logger.addHandler(handler)
    logger.setLevel("INFO")
    lines = []
    try:
        yield lines
        lines += stream.getvalue().splitlines()
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before[0])
        exporter_logger.handlers[:], exporter_logger.propagate = before[1:]


def _text(port):
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics") as answer:
        return answer.read().decode()


MACHINE_LABELS = {"version", "torch", "python", "implementation", "major", "minor", "patchlevel"}


def _read_metrics(port):
    """Return the type of each metric, and the values of each label of its samples."""
    metrics = {}
    for family in text_string_to_metric_families(_text(port)):
        samples = {}
        for sample in family.samples:
            labels = samples.setdefault(sample.name, {})
            for name, value in sample.labels.items():
                labels.setdefault(name, {})["" if name in MACHINE_LABELS else value] = ""
        metrics[family.name] = {"type": family.type, "samples": samples}
    return metrics


JOB = """
import time
from pathlib import Path

import torch
from torch import nn


class Noted(nn.Module):
    def forward(self, images):
        with Path("computed.txt").open("a") as file:
            for image in images:
                file.write(f"{round((image[0].mean().item() * 0.229 + 0.485) * 255)}\\n")
        if Path("slow").exists():
            time.sleep(0.3 * len(images))  # real timeout: the job is killed while it sleeps
        return images


def net():
    body = nn.Conv2d(3, 4, 3, 2, 1)
    head = nn.Linear(4, 5)
    with torch.no_grad():
        for module in (body, head):
            for each in module.parameters():
                each.copy_((torch.arange(each.numel()) % 7 - 3).reshape(each.shape) / 8)
    return nn.Sequential(Noted(), body, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), head)
"""
"""The module of the job's model. It logs the red of each image, and is slow while a file named `slow` exists."""

JOB_MODEL = "net=job_net:net?size=16"
RECORDED = "/recorded"
"""The folder of the recorded job, as its results name it."""

REDS = tuple(range(10, 250, 20))


def red_of(key):
    """Return the red of a photo of the job, which is in its file name."""
    return int(re.search(r"(\d+)\.png$", key)[1])


def rows(folder):
    """Return the results of a job."""
    parts = sorted(folder.glob("out/results/*.parquet"))
    return [row for part in parts for row in parquet.read_table(part).to_pylist()]


def move(folder, before, after):
    """Replace the folder of the photos in a job's results, which name them by absolute path."""
    for part in folder.glob("out/results/*.parquet"):
        table = parquet.read_table(part)
        keys = [after + key.removeprefix(before) for key in table.column("image").to_pylist()]
        index = table.schema.get_field_index("image")
        parquet.write_table(table.set_column(index, table.schema.field(index), [keys]), part, compression="zstd")


def stopped_job(folder):
    """Start `camserve-server explain --resume` in a folder, and kill it after it has written its first results."""
    (folder / "photos").mkdir(parents=True)
    (folder / "job_net.py").write_text(JOB, encoding="utf-8")
    (folder / "slow").touch()
    for red in REDS:
        (folder / "photos" / f"{red:03}.png").write_bytes(calls.png(calls.PIXELS[:, :16] * 0 + red))
    command = "from camserve_server.cli import main; main()"
    flags = ("explain", "photos", "-o", "out", "--resume", "--model", JOB_MODEL, "--device", "cpu")
    job = subprocess.Popen([sys.executable, "-c", command, *flags], cwd=folder, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: list(folder.glob("out/results/part-*.parquet")) or job.poll() is not None)
    finally:
        job.send_signal(signal.SIGKILL)
        job.wait()
    (folder / "slow").unlink()
    (folder / "computed.txt").unlink()
    move(folder, str(folder), RECORDED)


def pack(folder, path):
    """Write a folder to a zip file without timestamps."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as file:
        for source in sorted(folder.rglob("*")):
            if source.is_file() and "__pycache__" not in source.parts:
                file.writestr(
                    zipfile.ZipInfo(str(source.relative_to(folder))), source.read_bytes(), zipfile.ZIP_DEFLATED
                )


def unpack(path, folder):
    with zipfile.ZipFile(path) as file:
        file.extractall(folder)
    return Path(folder)
