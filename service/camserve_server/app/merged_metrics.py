"""Metrics of several processes as one: each sample gets the label `process`."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, Exemplar, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector

Family: TypeAlias = Sequence[Any]
"""A metric and its samples, of types that JSON has."""


def families_of(registry: CollectorRegistry) -> list[Family]:
    """Return all metrics of a server."""
    return [
        (
            metric.name,
            metric.documentation,
            metric.type,
            metric.unit,
            [(each.name, each.labels, each.value, each.timestamp, each.exemplar) for each in metric.samples],
        )
        for metric in registry.collect()
    ]


def encode(
    accept: str, families: Mapping[int, Iterable[Family]], up: Sequence[bool], restarts: Sequence[int]
) -> tuple[str, bytes]:
    """Return the content type and the text of the metrics of all processes, as an Accept header requests.

    Args:
        accept: the Accept header.
        families: metrics of each process that answered, by its number.
        up: for each process, True if its port is open.
        restarts: for each process, how often it was replaced.
    """
    registry = CollectorRegistry()
    registry.register(_Merged([*merge(families), *own_metrics(up, restarts)]))
    encoder, content_type = choose_encoder(accept)
    return content_type, encoder(registry)


def merge(families: Mapping[int, Iterable[Family]]) -> Iterator[Metric]:
    """Yield each metric with the samples of every process."""
    merged: dict[str, Metric] = {}
    for process, own in sorted(families.items()):
        for name, documentation, kind, unit, samples in own:
            metric = merged.setdefault(name, Metric(name, documentation, kind, unit))
            for sample, labels, value, timestamp, exemplar in samples:
                labels_here = {**labels, "process": str(process)}
                metric.add_sample(sample, labels_here, value, timestamp, Exemplar(*exemplar) if exemplar else None)
    yield from merged.values()


def own_metrics(up: Sequence[bool], restarts: Sequence[int]) -> Iterator[Metric]:
    """Yield the supervisor's own metrics."""
    gauge = GaugeMetricFamily("camserve_process_up", "1 while a process listens on the port.", labels=("process",))
    counter = CounterMetricFamily(
        "camserve_process_restarts", "Processes that ended and were replaced.", labels=("process",)
    )
    for number, (is_up, count) in enumerate(zip(up, restarts, strict=True)):
        gauge.add_metric((str(number),), is_up)
        counter.add_metric((str(number),), count)
    yield gauge
    yield counter


class _Merged(Collector):
    """Collector of metrics that are merged already."""

    def __init__(self, metrics: Iterable[Metric]) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Metric]:
        """Return the metrics."""
        return self._metrics
