"""`python -m benchmarks.pyramid`: measure how well a detector's pyramid finds small and large objects."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.pyramid import cost
from benchmarks.pyramid.measure import measure

INTRO = """# Pyramids of detectors

Written by `{command}`; do not edit. {machine}. {versions}.

Toy detectors of synthetic scenes, {seeds} of each neck, each trained from another seed. Every object that a detector
finds in {scenes} new scenes is explained. Small objects have sides of 6 to 11 pixels, large ones of 30 to 44, in images
of 96 by 96. Energy is the share of a map's positive values in the object's box; pointing is the share of maps with the
highest value in it. "One layer" is the last layer that all scales depend on; the other rows are fusions of the three
scales that the heads read: the mean and the maximum of normalised maps, their mean weighted by the norm of the gradient
at each scale, and the sum of the signed maps as densities, which is camserve's `layers=["pyramid"]`.
"""


def main() -> None:
    """Measure, print the tables, and with `--write` put them into RESULTS.md."""
    asked = _arguments()
    torch.set_num_threads(asked.threads)
    part = measure(asked.seeds, asked.scenes)
    part.tables += cost.measure(asked.rounds).tables if asked.rounds else []
    text = results.as_text(part)
    print(f"\n{text}", flush=True)
    if asked.write:
        command = " ".join(("python -m benchmarks.pyramid", *sys.argv[1:]))
        numbers = {"seeds": asked.seeds, "scenes": asked.scenes}
        intro = INTRO.format(command=command, machine=results.machine(), versions=results.versions(), **numbers)
        (asked.folder / "RESULTS.md").write_text(f"{intro}\n{text}", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.pyramid", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, metavar="N", help="detectors of each neck (default: 3)")
    parser.add_argument("--scenes", type=int, default=40, metavar="N", help="scenes for each (default: 40)")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="timed requests; 0 for none (default: 5)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--write", action="store_true", help="put what is found into RESULTS.md of this folder")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
