"""Modules that commands do not import: each would delay every start by the time of its import."""

import subprocess
import sys

import pytest

SLOW = (
    "torchvision", "timm", "torch._dynamo", "torch._inductor", "sympy", "scipy", "sklearn", "transformers",
    "huggingface_hub", "matplotlib", "pandas", "pyarrow", "ray", "captum", "opentelemetry", "prometheus_client",
)  # fmt: skip
TORCH = ("torch", "cv2", *SLOW)
SERVE = """
from camserve_server.cli import commands
from camserve_server import workers
from camserve_server.app import server
worker = workers.InProcessWorker(workers.Setup("cpu", 1, partitioned=True))
worker.load("lite0", server.parse("efficientnet_lite0?size=64"))
"""


def imported(code, names):
    """Return which of these modules a new process has imported after running some code."""
    report = f"import sys; print(*({names!r} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", f"{code}\n{report}"], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


@pytest.mark.slow
def test_server_with_the_embedded_model_imports_no_other_library_of_models():
    assert imported(SERVE, {*SLOW}) == set()


@pytest.mark.parametrize("command", ["camserve.cli", "camserve_server.cli.commands"])
def test_commands_import_torch_only_when_they_run_it(command):
    assert imported(f"import {command}", {*TORCH}) == set()


def test_imported_module_is_noticed():
    assert imported("import colorsys", {"colorsys", *SLOW}) == {"colorsys"}
