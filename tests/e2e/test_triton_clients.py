"""An unmodified Triton client gets the same values as our own API, in one process with our own client."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import needs
from support import PHOTOS, serving

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow  # tests/api/test_open_inference.py has the protocol itself
PYTHON = ROOT / ".venv-triton/bin/python"
LABELS = ("cat", "dog", "owl", "bee", "elk")
PAGE = (ROOT / "docs/triton-and-kserve.md").read_text(encoding="utf-8")
OUTPUTS = ["overlay", "heatmap", "class_id", "score", "label", "verdict"]


@pytest.fixture(scope="module")
def responses(tmp_path_factory):
    """Responses to a process that has tritonclient and our client, but not the server's packages."""
    if not PYTHON.exists():
        pytest.skip(needs.TRITONCLIENT)
    labels = tmp_path_factory.mktemp("labels") / "labels.txt"
    labels.write_text("\n".join(LABELS))
    models = (f"tiny=robustness.nets:tiny?size=32&labels={labels}", "other=robustness.nets:tiny?size=32")
    with serving(models=models, device="cpu", threads=1, admin=True) as served:
        result = subprocess.run(
            [PYTHON, Path(__file__).with_name("with_tritonclient.py"), served.address, PHOTOS["rocket"]],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "clients/python")},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr
    return json.loads(result.stdout)


def test_health_covers_the_server_and_each_model_and_version(responses):
    about = responses["about"]

    assert (about["live"], about["ready"]) == (True, True)
    assert about["models"] == [True, True, False]
    assert about["versions"] == [True, False]


def test_metadata_and_configuration_agree_on_every_output(responses):
    server, metadata, config = (responses["about"][part] for part in ("server", "metadata", "config"))
    types = {"TYPE_STRING": "BYTES", "TYPE_FP32": "FP32", "TYPE_INT64": "INT64"}

    assert server["name"] == "camserve"
    assert {"statistics", "model_configuration", "model_repository"} <= set(server["extensions"])
    assert (metadata["name"], metadata["versions"]) == ("tiny", ["1"])
    assert [entry["name"] for entry in metadata["inputs"]] == [entry["name"] for entry in config["input"]] == ["image"]
    assert [entry["name"] for entry in metadata["outputs"]] == OUTPUTS
    assert config["max_batch_size"] == 8
    for output, configured in zip(metadata["outputs"], config["output"], strict=True):
        assert output["name"] == configured["name"]
        assert output["datatype"] == types[configured["data_type"]]
        assert output["shape"] == ["-1", *configured["dims"]]


def test_overlay_and_numbers_equal_camserves_own_api_byte_for_byte(responses):
    expected = responses["inferred"]["ours"]
    triton = responses["inferred"]["triton"]["file"]

    assert triton["values"] == expected
    assert triton["kinds"] == {
        "label": "BYTES",
        "overlay": "BYTES",
        "class_id": "INT64",
        "score": "FP32",
        "heatmap": "FP32",
        "verdict": "BYTES",
    }
    assert bytes.fromhex(expected["label"][0]) == b"owl"
    assert bytes.fromhex(expected["overlay"][0]).startswith(b"\xff\xd8\xff")
    assert (triton["id"], triton["model"]) == ("file", ["tiny", "1"])
    assert triton["shapes"]["heatmap"] == [1, 16, 16]


@pytest.mark.parametrize("way", ["rows of pixels", "planes", "floats", "planes of floats"])
def test_pixels_of_any_layout_and_type_give_the_same_explanation(responses, way):
    assert responses["inferred"]["triton"][way]["values"] == responses["inferred"]["ours by pixels"]


def test_outputs_of_several_images_are_stacked(responses):
    one, two = (responses["inferred"]["triton"][way] for way in ("file", "two files"))

    assert two["shapes"] == {name: [2, *shape[1:]] for name, shape in one["shapes"].items()}
    assert two["values"]["overlay"] == one["values"]["overlay"] * 2
    assert two["values"]["label"] == one["values"]["label"] * 2


def test_outputs_have_the_requested_order(responses):
    triton = responses["inferred"]["triton"]

    assert triton["file"]["order"] == ["label", "overlay", "class_id", "score", "heatmap", "verdict"]
    assert triton["one"]["order"] == ["label"]
    assert triton["all"]["order"] == OUTPUTS


def test_tensor_contents_equal_raw_bytes_also_for_the_async_client(responses):
    overlay = responses["inferred"]["ours"]["overlay"]

    assert [responses["typed"]] == responses["awaited"] == overlay


def test_stream_answers_in_order_and_continues_after_an_error(responses):
    """The first request takes the most rows, and its response is still the first."""
    answers = responses["streamed"]["answers"]

    assert answers[:3] + answers[4:] == [["0", [0]], ["1", [1]], ["2", [2]], ["4", [4]], ["5", [0]]]
    assert answers[3].startswith('tiny has no label "no such label"')
    assert responses["streamed"]["final"] is True


def test_errors_have_the_status_of_our_own_api(responses):
    errors = responses["refused"]

    assert errors["model"][0] == "StatusCode.NOT_FOUND"
    assert errors["version"] == ["StatusCode.NOT_FOUND", 'tiny has the version 1, and not "7"']
    assert errors["image"] == ["StatusCode.INVALID_ARGUMENT", "not a JPEG, PNG, WebP, BMP, TIFF or NPY file"]
    assert 'there is no parameter "methd" (did you mean "method"?)' in errors["parameter"][1]
    assert 'there is no parameter "sequence_' in errors["sequence"][1]
    assert '(did you mean "owl"?)' in errors["label"][1]
    assert errors["too late"][0] == "StatusCode.DEADLINE_EXCEEDED"
    assert errors["shared memory"][0] == "StatusCode.UNIMPLEMENTED"
    assert errors["unload"][0] == "StatusCode.NOT_FOUND"
    assert errors["load"][0] == "StatusCode.INVALID_ARGUMENT"


def test_statistics_count_requests_and_the_time_of_each_stage(responses):
    ((stats),) = responses["statistics"]
    stages = {name: stage for name, stage in stats["inference_stats"].items() if name not in ("success", "fail")}

    assert (stats["name"], stats["version"]) == ("tiny", "1")
    assert {int(stage["count"]) for stage in stages.values()} == {int(stats["inference_stats"]["success"]["count"])}
    assert int(stats["inference_count"]) == int(stats["inference_stats"]["success"]["count"]) + 1
    assert 1 <= int(stats["execution_count"]) <= int(stats["inference_count"])
    spent = sum(int(stage["ns"]) for stage in stages.values())
    assert 0 < spent <= int(stats["inference_stats"]["success"]["ns"])


def test_model_is_reloaded_unloaded_and_loaded(responses):
    states = responses["repository"]["states"]

    assert states[0] == {"name": "other", "version": "2", "state": "READY"}
    assert states[1] == {"name": "other", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert states[2] == {"name": "other", "version": "3", "state": "READY"}
    assert responses["repository"]["ready"] == ["tiny"]


def test_messages_coexist_with_tritonclients_and_serialize_alike(responses):
    assert responses["beside"] == ["m", "7", "x", 0.5]


def code(kind, opening):
    """Return the code block of the page that begins with this text."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if block.startswith(opening))


@pytest.fixture
def beside_a_cat(tmp_path):
    shutil.copy(PHOTOS["chelsea"], tmp_path / "cat.jpg")
    return tmp_path


@pytest.mark.skipif(not PYTHON.exists(), reason=needs.TRITONCLIENT)
def test_python_of_the_page_runs_as_printed(served, beside_a_cat):
    text = code("python", "import numpy").replace("localhost:50051", served.address)
    run = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", text], cwd=beside_a_cat, capture_output=True, text=True, check=False
    )

    assert run.stdout.startswith("Egyptian cat 8.97"), run.stderr
    assert (beside_a_cat / "why.jpg").stat().st_size > 10_000


@pytest.mark.parametrize(("number", "words"), [(0, '"versions": ['), (2, '"rawOutputContents"')])
def test_commands_of_the_page_need_no_client_and_no_protos(served, beside_a_cat, number, words):
    command = code("sh", "buf curl").split("\n\n")[number].replace("localhost:50051", served.address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=beside_a_cat,
        env={"PATH": path, "HOME": str(beside_a_cat)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert words in run.stdout, run.stderr
