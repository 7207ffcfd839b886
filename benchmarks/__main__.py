"""`python -m benchmarks [PART ...]`: measure, print the tables, and with `--write` put them into RESULTS.md."""

import argparse
import os
import sys
from dataclasses import replace
from pathlib import Path

MALLOC = {"MALLOC_MMAP_THRESHOLD_": "268435456", "MALLOC_TRIM_THRESHOLD_": "536870912"}
"""As the container has it, for every contestant that runs in this process: else large batches pay for page faults."""

LONG = ("long_requests", "contention")
"""Parts that take long: the first one is left out of a quick run, the second one runs only if it is named."""

AGAINST = 8  # rounds of a comparison of checkouts: one ratio is worth little where a machine's speed changes


def main() -> None:
    """Measure the parts that are asked for, or all of them."""
    import torch  # noqa: PLC0415 -- after the restart

    from benchmarks import contention, cost, engine, long_requests, memory, neighbours, page, results, served, stages  # noqa: PLC0415 -- after the restart
    from benchmarks.front import measure as front  # noqa: PLC0415
    from benchmarks.scale import SCALES  # noqa: PLC0415

    parts = {
        "engine": engine.measure,
        "served": served.measure,
        "stages": stages.measure,
        "memory": memory.measure,
        "cost": cost.measure,
        "long_requests": long_requests.measure,
        "neighbours": neighbours.measure,
        "front": front.measure,
        "page": page.measure,
        "contention": contention.measure,
    }
    asked = _arguments(list(parts), list(SCALES))
    scale = SCALES[asked.scale]
    if asked.threads or scale.threads:
        torch.set_num_threads(asked.threads or scale.threads)
        os.environ["CAMSERVE_THREADS"] = str(torch.get_num_threads())  # for the servers
    if asked.models:
        scale = scale.of(tuple(asked.models))
    scale = replace(scale, compiled=asked.compiled)
    if asked.batches:
        scale = replace(scale, batches=tuple(asked.batches))
    scale = replace(scale, processes=asked.processes or scale.processes, against=asked.against)
    scale = replace(scale, rounds=asked.rounds or (AGAINST if asked.against else scale.rounds))
    for name in asked.parts or [one for one in parts if one not in LONG or (scale.photos and one == "long_requests")]:
        load = os.getloadavg()[0]
        part = parts[name](scale)
        print(f"\n## {name}\n\n{results.as_text(part)}", flush=True)
        if asked.write:
            results.write(part, _said(asked.folder), load, asked.folder)


def _said(folder: Path) -> str:
    """Return the command that this is, but for where its results go."""
    words = [word for word in sys.argv[1:] if word not in ("--write", "--folder", str(folder))]
    return " ".join(("python -m benchmarks", *words))


def _arguments(parts: list[str], scales: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks", description="Measure what camserve costs.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(parts)}; all if none is named")
    parser.add_argument("--scale", choices=scales, default="quick", help="how much is measured (default: quick)")
    parser.add_argument("--quick", dest="scale", action="store_const", const="quick", help="some minutes")
    parser.add_argument("--full", dest="scale", action="store_const", const="full", help="everything, half an hour")
    parser.add_argument("--models", nargs="+", metavar="NAME", help="of torchvision, instead of the scale's own")
    parser.add_argument(
        "--batches", nargs="+", type=int, metavar="N", help="for the engine, instead of the scale's own"
    )
    parser.add_argument("--compiled", action="store_true", help="time compiled models too: minutes more")
    parser.add_argument("--threads", type=int, help="of torch, here and in the server (default: one a core)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="in which everything takes turns, instead of the scale's"
    )
    parser.add_argument(
        "--processes", type=_counts, metavar="N,N", help="of a server, for front (default: 1; with --full 1,2)"
    )
    parser.add_argument("--against", type=Path, metavar="PATH", help="compare front or contention with a checkout")
    parser.add_argument("--write", action="store_true", help="put what is found into RESULTS.md")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of RESULTS.md")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(parts):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(parts)}")
    if asked.against and (asked.parts not in (["front"], ["contention"]) or asked.write):
        parser.error("--against compares front or contention with another checkout: name one, and write nothing")
    return asked


def _counts(words: str) -> tuple[int, ...]:
    return tuple(int(word) for word in words.split(","))


if __name__ == "__main__":
    if os.environ.keys().isdisjoint(MALLOC):  # glibc reads them once, when a process starts
        os.environ.update(MALLOC)
        os.execv(sys.executable, [sys.executable, "-m", "benchmarks", *sys.argv[1:]])  # noqa: S606 -- this program
    main()
