"""A client of Triton, unmodified, gets what our own API gives; in one process with our own client."""

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
PYTHON = ROOT / ".venv-triton/bin/python"
LABELS = ("cat", "dog", "owl", "bee", "elk")
PAGE = (ROOT / "docs/triton-and-kserve.md").read_text(encoding="utf-8")
OUTPUTS = ["overlay", "heatmap", "class_id", "score", "label", "verdict"]


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What a process with tritonclient and our client, and nothing of the server, was answered."""
    if not PYTHON.exists():
        pytest.skip(needs.TRITONCLIENT)
    labels = tmp_path_factory.mktemp("labels") / "labels.txt"
    labels.write_text("\n".join(LABELS))
    models = (f"tiny=robustness.nets:tiny?size=32&labels={labels}", "other=robustness.nets:tiny?size=32")
    with serving(models=models, device="cpu", threads=1, admin=True) as served:
        asked = subprocess.run(
            [PYTHON, Path(__file__).with_name("with_tritonclient.py"), served.address, PHOTOS["rocket"]],
            env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "clients/python")},
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
        )
    assert asked.returncode == 0, asked.stderr
    return json.loads(asked.stdout)


def test_health_is_told_of_the_server_and_of_each_model_and_version(found):
    about = found["about"]

    assert (about["live"], about["ready"]) == (True, True)
    assert about["models"] == [True, True, False]
    assert about["versions"] == [True, False]


def test_the_metadata_and_the_configuration_say_the_same_of_every_output(found):
    server, metadata, config = (found["about"][what] for what in ("server", "metadata", "config"))
    types = {"TYPE_STRING": "BYTES", "TYPE_FP32": "FP32", "TYPE_INT64": "INT64"}

    assert server["name"] == "camserve"
    assert {"statistics", "model_configuration", "model_repository"} <= set(server["extensions"])
    assert (metadata["name"], metadata["versions"]) == ("tiny", ["1"])
    assert [one["name"] for one in metadata["inputs"]] == [one["name"] for one in config["input"]] == ["image"]
    assert [one["name"] for one in metadata["outputs"]] == OUTPUTS
    assert config["max_batch_size"] == 8
    for said, configured in zip(metadata["outputs"], config["output"], strict=True):
        assert said["name"] == configured["name"]
        assert said["datatype"] == types[configured["data_type"]]
        assert said["shape"] == ["-1", *configured["dims"]]


def test_overlay_and_numbers_equal_camserves_own_api_byte_for_byte(found):
    ours = found["inferred"]["ours"]
    theirs = found["inferred"]["triton"]["file"]

    assert theirs["values"] == ours
    assert theirs["kinds"] == {
        "label": "BYTES",
        "overlay": "BYTES",
        "class_id": "INT64",
        "score": "FP32",
        "heatmap": "FP32",
        "verdict": "BYTES",
    }
    assert bytes.fromhex(ours["label"][0]) == b"owl"
    assert bytes.fromhex(ours["overlay"][0]).startswith(b"\xff\xd8\xff")
    assert (theirs["id"], theirs["model"]) == ("file", ["tiny", "1"])
    assert theirs["shapes"]["heatmap"] == [1, 16, 16]


@pytest.mark.parametrize("way", ["rows of pixels", "planes", "floats", "planes of floats"])
def test_pixels_in_any_layout_and_kind_are_explained_as_the_photo_that_they_are(found, way):
    assert found["inferred"]["triton"][way]["values"] == found["inferred"]["ours by pixels"]


def test_several_images_of_one_message_are_stacked(found):
    one, two = (found["inferred"]["triton"][way] for way in ("file", "two files"))

    assert two["shapes"] == {name: [2, *shape[1:]] for name, shape in one["shapes"].items()}
    assert two["values"]["overlay"] == one["values"]["overlay"] * 2
    assert two["values"]["label"] == one["values"]["label"] * 2


def test_outputs_come_in_the_requested_order_and_all_by_default(found):
    triton = found["inferred"]["triton"]

    assert triton["file"]["order"] == ["label", "overlay", "class_id", "score", "heatmap", "verdict"]
    assert triton["one"]["order"] == ["label"]
    assert triton["all"]["order"] == OUTPUTS


def test_tensor_contents_equal_raw_bytes_also_for_the_async_client(found):
    overlay = found["inferred"]["ours"]["overlay"]

    assert [found["typed"]] == found["awaited"] == overlay


def test_a_stream_answers_in_order_and_goes_on_after_an_error(found):
    """The first costs many rows, and is still the first to come."""
    answers = found["streamed"]["answers"]

    assert answers[:3] + answers[4:] == [["0", [0]], ["1", [1]], ["2", [2]], ["4", [4]], ["5", [0]]]
    assert answers[3].startswith('tiny has no label "no such label"')
    assert found["streamed"]["final"] is True


def test_what_is_wrong_is_said_with_the_status_of_our_own_api(found):
    said = found["refused"]

    assert said["model"][0] == "StatusCode.NOT_FOUND"
    assert said["version"] == ["StatusCode.NOT_FOUND", 'tiny has the version 1, and not "7"']
    assert said["image"] == ["StatusCode.INVALID_ARGUMENT", "not a JPEG, PNG, WebP or BMP file"]
    assert 'there is no parameter "methd" (did you mean "method"?)' in said["parameter"][1]
    assert 'there is no parameter "sequence_' in said["sequence"][1]
    assert '(did you mean "owl"?)' in said["label"][1]
    assert said["too late"][0] == "StatusCode.DEADLINE_EXCEEDED"
    assert said["shared memory"][0] == "StatusCode.UNIMPLEMENTED"
    assert said["unload"][0] == "StatusCode.NOT_FOUND"
    assert said["load"][0] == "StatusCode.INVALID_ARGUMENT"


def test_the_statistics_count_what_was_asked_and_say_where_the_time_went(found):
    ((stats),) = found["statistics"]
    stages = {name: one for name, one in stats["inference_stats"].items() if name not in ("success", "fail")}

    assert (stats["name"], stats["version"]) == ("tiny", "1")
    assert {int(one["count"]) for one in stages.values()} == {int(stats["inference_stats"]["success"]["count"])}
    assert int(stats["inference_count"]) == int(stats["inference_stats"]["success"]["count"]) + 1  # one had two images
    assert 1 <= int(stats["execution_count"]) <= int(stats["inference_count"])
    spent = sum(int(one["ns"]) for one in stages.values())
    assert 0 < spent <= int(stats["inference_stats"]["success"]["ns"])


def test_a_model_is_loaded_again_unloaded_and_loaded(found):
    states = found["repository"]["states"]

    assert states[0] == {"name": "other", "version": "2", "state": "READY"}
    assert states[1] == {"name": "other", "version": "2", "state": "UNAVAILABLE", "reason": "unloaded"}
    assert states[2] == {"name": "other", "version": "3", "state": "READY"}
    assert found["repository"]["ready"] == ["tiny"]


def test_messages_coexist_with_tritonclients_and_serialize_alike(found):
    assert found["beside"] == ["m", "7", "x", 0.5]


def code(kind, opening):
    """The code block of the page that begins with these words."""
    blocks = re.findall(rf"^```{kind}\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
    return next(block for block in blocks if block.startswith(opening))


@pytest.fixture
def beside_a_cat(tmp_path):
    shutil.copy(PHOTOS["chelsea"], tmp_path / "cat.jpg")
    return tmp_path


@pytest.mark.skipif(not PYTHON.exists(), reason=needs.TRITONCLIENT)
def test_the_pages_python_works_when_pasted(served, beside_a_cat):
    text = code("python", "import numpy").replace("localhost:50051", served.address)
    run = subprocess.run(
        [PYTHON, "-W", "ignore", "-c", text], cwd=beside_a_cat, capture_output=True, text=True, timeout=60, check=False
    )

    assert run.stdout.startswith("Egyptian cat 8.97"), run.stderr
    assert (beside_a_cat / "why.jpg").stat().st_size > 10_000


@pytest.mark.parametrize(("number", "words"), [(0, '"versions": ['), (2, '"rawOutputContents"')])
def test_the_pages_commands_need_no_client_and_no_protos(served, beside_a_cat, number, words):
    command = code("sh", "buf curl").split("\n\n")[number].replace("localhost:50051", served.address)
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    run = subprocess.run(
        ["bash", "-c", command],
        cwd=beside_a_cat,
        env={"PATH": path, "HOME": str(beside_a_cat)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert words in run.stdout, run.stderr
