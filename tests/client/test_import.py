"""The client is light: what it imports, and what it does not."""

from __future__ import annotations

import json
import subprocess
import sys

import camserve

PROBE = "import sys, json; import {}; print(json.dumps(sorted(sys.modules)))"


def modules(name: str) -> set[str]:
    """Import a module in an interpreter of its own; return the top-level names that came along."""
    done = subprocess.run([sys.executable, "-c", PROBE.format(name)], check=True, capture_output=True, text=True)
    return {each.partition(".")[0] for each in json.loads(done.stdout)}


def test_importing_it_brings_nothing_heavy() -> None:
    heavy = {"torch", "torchvision", "timm", "cv2", "camserve_server"}

    assert modules("camserve") & {*heavy, "rich", "click"} == set()
    assert modules("camserve.cli") & heavy == set()


def test_the_probe_sees_what_is_imported() -> None:
    assert {"grpc", "numpy", "PIL", "camserve"} <= modules("camserve")


def test_every_public_name_is_there_and_documented() -> None:
    assert sorted(camserve.__all__) == camserve.__all__
    aliases = {"ImageLike", "MethodLike", "TargetLike"}
    for name in set(camserve.__all__) - aliases:
        assert getattr(camserve, name).__doc__
