"""`python -m benchmarks.diff`: measure how often `camserve diff` is wrong; with `--speed`, how long it takes."""

import argparse
import sys
from pathlib import Path

import torch

from benchmarks import results
from benchmarks.diff.measure import measure

INTRO = """# Error rates of a comparison of two models

Written by `{command}`; do not edit. {machine}. {versions}.

The columns floor, limit and ceiling are rank correlations of the baseline's maps: with those of photos with a little
noise (median, and the 5 % quantile), and with those of random weights (median). The column median is that of the
candidate. The last columns are the shares of the runs with 25 and with 64 photos in which each rule says that the
candidate differs: `diff` is the rule of `camserve diff`, and "without a test" takes any share above 5 % for a change.
"""


def main() -> None:
    """Measure, print the tables, and with `--write` put them into RESULTS.md."""
    asked = _arguments()
    if asked.threads:
        torch.set_num_threads(asked.threads)
    if asked.speed:
        from benchmarks.diff import speed  # noqa: PLC0415 -- starts a server

        print(f"\n{results.as_text(speed.measure(asked.photos))}", flush=True)
        return
    part = measure(asked.runs, asked.draws, with_real=not asked.toy)
    text = results.as_text(part)
    print(f"\n{text}", flush=True)
    if asked.write:
        command = " ".join(("python -m benchmarks.diff", *sys.argv[1:]))
        intro = INTRO.format(command=command, machine=results.machine(), versions=results.versions())
        (asked.folder / "RESULTS.md").write_text(f"{intro}\n{text}", encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser("python -m benchmarks.diff", description=__doc__)
    parser.add_argument("--runs", type=int, default=4, metavar="N", help="number of toy models (default: 4)")
    parser.add_argument("--draws", type=int, default=200, metavar="N", help="draws of photos from each (default: 200)")
    parser.add_argument("--toy", action="store_true", help="leave out the default model and its real photos")
    parser.add_argument("--speed", action="store_true", help="measure the speed and the memory instead")
    parser.add_argument("--photos", type=int, default=300, metavar="N", help="for --speed (default: 300)")
    parser.add_argument("--threads", type=int, help="of torch (default: one a core)")
    parser.add_argument("--write", action="store_true", help="put what is found into RESULTS.md of this folder")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="of RESULTS.md")
    return parser.parse_args()


if __name__ == "__main__":
    main()
