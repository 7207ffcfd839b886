"""Measure what it costs a server to be watched: to count its requests, and to trace them.

python -m benchmarks.telemetry [--write]
"""

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent import futures
from pathlib import Path

import click
import grpc
import numpy as np
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from torch import nn

import camserve
from benchmarks.results import machine, page_with
from benchmarks.serving import serving
from benchmarks.timing import in_turn
from camserve_server.telemetry import BatchRun, RequestTrace, ServerSnapshot, Telemetry
from camserve_server.telemetry.prometheus import PrometheusMetrics
from camserve_server.telemetry.traces import Traces

PAGE = Path(__file__).parents[1] / "docs" / "metrics.md"

MODEL = "small=benchmarks.telemetry:small?size=32"
ONE = ("--threads", "1")  # of torch: threads that wait for one another cost time too
PHOTO = np.zeros((32, 32, 3), np.uint8)
TRACE = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-"
KEPT, LEFT = {"traceparent": TRACE + "01"}, {"traceparent": TRACE + "00"}
ALONE, COUNTED, TRACED, UNKEPT = "neither", "metrics", "metrics and traces", "metrics, and traces that are not kept"


def small() -> nn.Module:
    """Return a model that costs next to nothing, so that all else shows."""
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5))


class _Nowhere(SpanExporter):
    """Sends spans nowhere."""

    def export(self, _spans: Sequence[ReadableSpan]) -> SpanExportResult:
        return SpanExportResult.SUCCESS


class _Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Takes spans, and forgets them."""

    def Export(  # noqa: N802 -- the RPC's name
        self, _request: trace_service_pb2.ExportTraceServiceRequest, _context: grpc.ServicerContext
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        return trace_service_pb2.ExportTraceServiceResponse()


def recorded(telemetry: Telemetry, metadata: dict[str, str]) -> None:
    """Tell of a request of four stages, alone in its batch, as the server does."""
    one = telemetry.begin(RequestTrace("Explain", "id"), "camserve.v1.ExplainService/Explain", metadata)
    one.about("small", ["gradcam"])
    for stage in ("admission", "decode", "queue"):
        one.stage(stage, 1.0, 2.0)
    telemetry.batch_finished(BatchRun("small@1", "cam", 1, 1.0, 2.0, [one]))
    one.stage("render", 2.0, 3.0)
    one.explained.append(("gradcam", "OK"))
    telemetry.end(one, "OK")


def by_itself(rounds: int, times: int = 200) -> dict[str, float]:
    """Return the microseconds of processor time that telling of one request takes of the server's own thread.

    Of many rounds the least: what else the machine does is not its doing. Spans are sent by a thread of their own.
    """

    def spent(telemetry: Telemetry, metadata: dict[str, str]) -> float:
        began = time.thread_time()
        for _ in range(times):
            recorded(telemetry, metadata)
        return (time.thread_time() - began) / times * 1e6

    with contextlib.closing(Traces([_Nowhere()])) as traces:
        counting, both = Telemetry(PrometheusMetrics(_no_state), None), Telemetry(PrometheusMetrics(_no_state), traces)
        ways = {COUNTED: (counting, {}), UNKEPT: (both, LEFT), TRACED: (both, KEPT)}
        return {name: min(spent(*way) for _ in range(rounds)) for name, way in ways.items()}


def _no_state() -> ServerSnapshot:
    raise NotImplementedError  # nobody scrapes here


def as_served(rounds: int, requests: int) -> dict[str, float]:
    """Return the milliseconds of processor time that a server and its engine spend on a request, asked in turn."""
    with contextlib.ExitStack() as stack:
        servers = {ALONE: stack.enter_context(serving([MODEL], *ONE))}
        servers[COUNTED] = stack.enter_context(serving([MODEL], *ONE, "--metrics-address", "127.0.0.1:0"))
        stack.enter_context(_collecting())
        servers[TRACED] = stack.enter_context(serving([MODEL], *ONE, "--metrics-address", "127.0.0.1:0", "--traces"))
        runs = {
            name: _asking(stack.enter_context(camserve.Client(server.address)), requests)
            for name, server in servers.items()
        }
        in_turn(runs, 0)  # the first are slower
        before = {name: server.cpu() for name, server in servers.items()}
        in_turn(runs, rounds - 1)  # which warms up by a round
        spent = {name: server.cpu() - before[name] for name, server in servers.items()}
    return {name: seconds / rounds / requests * 1e3 for name, seconds in spent.items()}


def _asking(client: camserve.Client, requests: int) -> Callable[[], object]:
    return lambda: [client.explain(PHOTO, overlay=None) for _ in range(requests)]


@contextlib.contextmanager
def _collecting() -> Iterator[None]:
    """Run a collector inside the block, which servers that are started there send their spans to."""
    server = grpc.server(futures.ThreadPoolExecutor(2))
    add = trace_service_pb2_grpc.add_TraceServiceServicer_to_server
    add(_Collector(), server)  # type: ignore[no-untyped-call]  # generated
    os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"] = f"http://127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        yield
    finally:
        server.stop(None).wait()
        del os.environ["OTEL_EXPORTER_OTLP_ENDPOINT"]


def table(alone: Mapping[str, float], served: Mapping[str, float]) -> str:
    """Return what was found in Markdown."""
    lines = ["| on | recording a request | a whole request |", "|---|---|---|"]
    for name in (ALONE, *alone):
        recording, whole = (f"{one[name]:.{digits}f} {unit}" if name in one else "" for one, digits, unit in (
            (alone, 0, "µs"), (served, 2, "ms")
        ))  # fmt: skip
        lines.append(f"| {name} | {recording} | {whole} |")
    return "\n".join(lines)


@click.command()
@click.option("--rounds", default=15, help="How often everything is measured in turn.")
@click.option("--requests", default=100, help="Requests of a round.")
@click.option("--write", is_flag=True, help=f"Write the table into docs/{PAGE.name}.")
def main(rounds: int, requests: int, *, write: bool) -> None:
    """Measure what metrics and traces cost."""
    found = table(by_itself(rounds), as_served(rounds, requests))
    text = f"{machine()}:\n\n{found}"
    print(text)
    if write:
        PAGE.write_text(page_with(PAGE.read_text(encoding="utf-8"), "telemetry", text), encoding="utf-8")


if __name__ == "__main__":
    main()
