"""`camserve diff` and `camserve-server diff` with real models find a changed network, and nothing in the same one."""

import json
import sys

import numpy as np
import pytest
from click.testing import CliRunner
from PIL import Image

from camserve import cli
from camserve_server.cli.commands import program as server_program
from support import serving

NETS = """
import torch
from torch import nn


def base():
    torch.manual_seed(0)
    # Without a neighbourhood, a mirrored photo has the mirrored map.
    body = (nn.Conv2d(3, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 1), nn.ReLU())
    return nn.Sequential(nn.AvgPool2d(4), *body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 5))


def rescaled():
    net = base()
    with torch.no_grad():
        net[-1].weight.mul_(2)
        net[-1].bias.mul_(2)
    return net


def changed():
    net = base()
    torch.manual_seed(1)
    net[3].reset_parameters()
    return net


def flat():
    net = base()
    with torch.no_grad():
        net[3].weight.zero_()
        net[3].bias.fill_(1)
    return net


def wide():
    torch.manual_seed(0)
    return nn.Sequential(*list(base())[:-1], nn.Linear(16, 6))
"""
SIDE, COUNT = 32, 10  # the fewest photos that diff compares
OUTPUTS = ("index.html", "report.json", "junit.xml")


@pytest.fixture(scope="module", autouse=True)
def nets(tmp_path_factory):
    """Module with the networks."""
    folder = tmp_path_factory.mktemp("nets")
    (folder / "diff_nets.py").write_text(NETS)
    sys.path.insert(0, str(folder))
    yield
    sys.path.remove(str(folder))


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """Photos of blocks in random colours."""
    folder = tmp_path_factory.mktemp("photos")
    for index in range(COUNT):
        blocks = np.random.default_rng(index).integers(0, 256, (8, 8, 3), np.uint8)
        Image.fromarray(blocks).resize((SIDE, SIDE), Image.Resampling.NEAREST).save(folder / f"{index:03}.png")
    return folder


def spec(name):
    return f"{name}=diff_nets:{name}?size={SIDE}"


@pytest.fixture
def run(photos, tmp_path, monkeypatch):
    """Run `camserve-server diff` on the photos; the result has the report, if there is one."""
    monkeypatch.delenv("GITHUB_STEP_SUMMARY", raising=False)
    monkeypatch.setenv("COLUMNS", "200")

    def diff(baseline, candidate, *flags, program=server_program):
        out = tmp_path / "out"
        command = ["diff", photos, "--baseline", baseline, "--candidate", candidate, "-o", out, *flags]
        done = CliRunner().invoke(program, list(map(str, command)))
        done.report = json.loads((out / "report.json").read_bytes()) if (out / "report.json").exists() else None
        return done

    return diff


def test_same_weights_look_at_the_same(run):
    done = run(spec("base"), spec("base"))

    assert (done.exit_code, done.stderr) == (0, "")
    assert {case["spearman"] for case in done.report["cases"]} == {1}
    assert done.report["baseline"]["digest"] == done.report["candidate"]["digest"]
    assert done.report["baseline"]["versions"].keys() >= {"camserve", "torch"}


@pytest.mark.slow
def test_change_that_moves_no_evidence_is_not_found(run):
    done = run(spec("base"), spec("rescaled"))

    assert done.exit_code == 0, done.output
    assert done.report["baseline"]["digest"] != done.report["candidate"]["digest"]
    assert min(abs(case["score_change"]) for case in done.report["cases"]) > 0
    # Float16 has ties where float32 has none.
    assert min(case["spearman"] for case in done.report["cases"]) > 0.999


def test_random_layer_is_found(run):
    done = run(spec("base"), spec("changed"))
    (check,) = done.report["checks"]

    assert done.exit_code == 1, done.output
    assert check["changed"]
    assert check["median"]["high"] < check["floor_limit"]


def test_model_that_looks_at_nothing_is_found(run):
    done = run(spec("base"), spec("flat"))

    assert done.exit_code == 1
    assert {case["candidate"]["verdict"] for case in done.report["cases"]} <= {"FLAT", "ALL_NEGATIVE"}
    assert done.report["checks"][0]["median"]["value"] is None


def test_models_with_other_classes_cannot_be_compared(run, tmp_path):
    done = run(spec("base"), spec("wide"))

    assert done.exit_code == 2
    assert done.stderr == "error: the models have different numbers of classes, 5 and 6\n"
    assert not any((tmp_path / "out" / name).exists() for name in OUTPUTS)


@pytest.mark.slow
def test_network_with_flat_maps_cannot_be_calibrated(run):
    done = run(spec("flat"), spec("flat"))

    assert done.exit_code == 2
    assert "gradcam on 4 cannot be calibrated" in done.stderr


@pytest.mark.parametrize("missing", ["diff_nets:nobody", "no_such_module:net", "nonsense"])
def test_missing_model_is_one_line(run, missing):
    done = run(spec("base"), missing)

    assert done.exit_code == 2
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert missing.partition(":")[0] in line


def test_baseline_is_recorded_without_a_server_and_compared_with_one(run, tmp_path):
    """Two servers and this process give the same numbers for the same weights."""
    methods = ("--method", "gradcam", "--method", "smoothgrad:samples=2")
    recorded = run(f"{tmp_path}/base/", spec("base"), "--accept", *methods)
    assert recorded.exit_code == 0, recorded.output
    with serving(models=(spec("base"),)) as old, serving(models=(spec("changed"), spec("base"))) as new:
        same = run(f"{tmp_path}/base", f"base@{new.address}", program=cli.main)
        again = run(f"base@{old.address}", f"base@{new.address}", *methods, program=cli.main)
        other = run(f"{tmp_path}/base", f"@{new.address}", program=cli.main)
    assert [each.exit_code for each in (same, again, other)] == [0, 0, 1], (same.output, again.output, other.output)
    assert [check["method"] for check in other.report["checks"]] == ["gradcam", "smoothgrad"]
    for each in (same, again):
        assert [check["median"]["value"] for check in each.report["checks"]] == [1, 1]
