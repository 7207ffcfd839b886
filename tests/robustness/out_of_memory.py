"""Send requests that run out of memory to a server in this process; print the outcome and the memory as JSON.

The entry `leaking` is that of an engine with a planted fault: it keeps the errors, and with them their frames.
"""

import contextlib
import json
import sys

import numpy as np
import torch

import camserve
from camserve_server.core.errors import OutOfMemory
from camserve_server.core.process import resident
from robustness import error_checks, soak_models
from support import give_back_memory, serving

POISONED = "poisoned=robustness.soak_models:poisoned?size=32"
OPTIONS = {"overlay": None, "targets": 2}
PHOTO = np.random.default_rng(0).integers(0, 120, (32, 32, 3), np.uint8)


def memory():
    give_back_memory()
    return resident()


def run_out_of_memory(client, times):
    """Fail a number of times; return the errors' classes, what is wrong with them, and the bytes that they left."""
    errors, wrong = [], []

    def fail():
        try:
            client.explain(soak_models.image("out of memory"), **OPTIONS)
        except camserve.CamserveError as error:
            errors.append(type(error).__name__)
            wrong.extend(error_checks.client_faults(error))

    for _ in range(5):  # fills caches
        fail()
    before = memory()
    for _ in range(times):
        fail()
    return {"errors": errors, "wrong": wrong, "left": memory() - before}


@contextlib.contextmanager
def leaking(engine):
    """Let an engine keep the errors of a model."""
    leaked, run = [], engine.run
    module = run.__self__._models["poisoned@1"].module

    def leaking_run(*_):
        try:
            return module(torch.tensor([[[[2.0]], [[0.0]], [[0.0]]]]))
        except torch.OutOfMemoryError as error:
            leaked.append(error)
            raise OutOfMemory("no memory") from error

    engine.run = leaking_run
    yield
    engine.run = run


def main():
    torch.set_num_threads(1)
    with (
        serving(models=(POISONED,), threads=1) as served,
        camserve.Client(served.address, retries=0, timeout=600) as client,
    ):
        before = client.explain(PHOTO, **OPTIONS).explanations[0].heatmap
        results = {"sound": run_out_of_memory(client, 30)}
        after = client.explain(PHOTO, **OPTIONS).explanations[0].heatmap
        results |= {"health": client.health().name, "same": np.array_equal(before, after)}
        with leaking(served.pipeline.batcher._workers[0]):
            results["leaking"] = run_out_of_memory(client, 2)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main()
