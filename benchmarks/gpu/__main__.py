"""`python -m benchmarks.gpu [PART ...]`: measure, print the tables, and with `--out FILE.md` write them.

Everything fits in nine minutes on a machine with a GPU, and what does not is left out in words. It needs no network:
models have random weights, photos are those of scikit-image and scikit-learn. `--device cpu --quick` shows that it
runs. Beside the page that it writes there is FILE.json with the same.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.gpu import model, photos, served
from benchmarks.gpu.scale import Clock, Scale, scale_of
from benchmarks.results import Part, Table

PARTS: Mapping[str, Callable[[Scale, Clock], Part]] = {
    "likeness": model.likeness,
    "engine": model.engine,
    "served": served.measure,
    "photos": photos.measure,
    "waits": model.waits,
    "memory": model.memory,
    "graphs": model.graphs,
}
"""What is measured, the most wanted first."""

SECONDS = 480.0


def main() -> None:
    """Measure the parts that are asked for, or all of them."""
    asked = _arguments()
    scale, clock = scale_of(asked.device, quick=asked.quick), Clock.start(asked.seconds)
    about = f"`python -m benchmarks.gpu {' '.join(sys.argv[1:])}`. {machine(scale)}"
    print(about, flush=True)
    if scale.gpu:
        torch.cuda.set_device(scale.device)
    found = []
    for name in asked.parts or PARTS:
        found.append(_measured(name, scale, clock))
        print(f"\n## {name}\n\n{results.as_text(found[-1])}", flush=True)
        if asked.out:
            write(asked.out, about, found)


def _measured(name: str, scale: Scale, clock: Clock) -> Part:
    """Measure a part; one that fails says how, and the others are measured."""
    try:
        return PARTS[name](scale, clock)
    except Exception:  # noqa: BLE001 -- whatever it is
        words = traceback.format_exc()
        print(words, file=sys.stderr, flush=True)
        return Part(name, [Table(f"Failed: {words.strip().splitlines()[-1]}", (), [])])


def machine(scale: Scale) -> str:
    """Say in words what this is measured on."""
    gpu = f"{torch.cuda.get_device_name(scale.device)}, CUDA {torch.version.cuda}, " if scale.gpu else ""
    load = f"the load before it began was {os.getloadavg()[0]:.1f}"
    return f"{gpu}{results.machine()}. {results.versions()}; {load}."


def write(path: Path, about: str, found: list[Part]) -> None:
    """Write what has been found so far: a page, and the same as JSON beside it."""
    page = "\n\n".join([f"# On a GPU\n\n{about}", *(f"## {part.name}\n\n{results.as_text(part)}" for part in found)])
    path.with_suffix(".md").write_text(page, encoding="utf-8")
    kept = {"about": about} | {part.name: asdict(part) for part in found}
    path.with_suffix(".json").write_text(json.dumps(kept, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.gpu", description="Measure what camserve does on a GPU.")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"any of {', '.join(PARTS)}; all if none is named")
    parser.add_argument("--device", default="cuda:0", help="cuda:N or cpu (default: cuda:0)")
    parser.add_argument("--quick", action="store_true", help="just enough to see that it runs")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"for everything (default: {SECONDS:g})")
    parser.add_argument("--out", type=Path, metavar="FILE", help="page to write; a .json is written beside it")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"there is no part {', '.join(sorted(unknown))}: there are {', '.join(PARTS)}")
    if asked.device != "cpu" and not torch.cuda.is_available():
        parser.error(f'torch sees no CUDA device for "{asked.device}": --device cpu --quick shows that it runs')
    return asked


if __name__ == "__main__":
    main()
