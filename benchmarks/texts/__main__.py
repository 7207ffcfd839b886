"""`python -m benchmarks.texts`: train the toy CLIP, and print how often each method finds the quadrant of a caption."""

import argparse

import torch

from benchmarks.texts import measure, toy


def main() -> None:
    """Train, measure, and print the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.texts", description="Planted truth for texts.")
    parser.add_argument("--scenes", type=int, default=measure.SCENES, metavar="N", help="scenes of four captions")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    with measure.served() as client:
        share = measure.recall(client, asked.scenes)
        rows = measure.measure(client, count=asked.scenes)
    print(f"{asked.scenes} scenes, {toy.STEPS} steps; captions among the four most probable: {share:.2f}\n")
    print(measure.table(rows))


if __name__ == "__main__":
    main()
