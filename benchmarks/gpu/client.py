"""One of several clients: every line on its input is a stretch of load to send, and its answer a line of JSON."""

import dataclasses
import json
import sys
from dataclasses import dataclass

from benchmarks import load


@dataclass(frozen=True, slots=True)
class Answers:
    """Answers that a client received.

    Attributes:
        rate: explanations a second.
        count: explanations.
        p50: median latency, seconds.
        p99: its 99th percentile.
        cpu: seconds of processor time that the client used.
    """

    rate: float
    count: int
    p50: float
    p99: float
    cpu: float


def sent(address: str, under_way: int, seconds: float) -> Answers:
    """Keep a number of requests in flight for some seconds."""
    stretch = load.closed(address, under_way, seconds)
    p50, p99 = stretch.latency(50), stretch.latency(99)
    return Answers(stretch.rate(under_way), stretch.count, p50, p99, stretch.client)


def main(address: str) -> None:
    """Send what is asked for, until the input ends."""
    for line in sys.stdin:
        under_way, seconds = line.split()
        print(json.dumps(dataclasses.asdict(sent(address, int(under_way), float(seconds)))), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
