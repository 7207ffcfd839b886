"""The client in Node, which has nothing but the .proto files."""

import io
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import camserve
import camserve_server
from support import PHOTOS

CLIENT = Path(__file__).parents[2] / "clients" / "node"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason="there is no node here"),
    pytest.mark.skipif(not (CLIENT / "node_modules").is_dir(), reason="its packages are missing: make node"),
]


@pytest.fixture(scope="module")
def served():
    with camserve_server.running("efficientnet_lite0") as address:
        yield address


@pytest.fixture
def node(served, tmp_path):
    """Run the client in an empty folder."""

    def run(*arguments):
        command = [NODE, CLIENT / "explain.js", "--server", served, "--out", tmp_path / "out", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    return run


def test_it_gets_the_overlay_that_our_own_client_gets(node, served, tmp_path):
    found = node(PHOTOS["chelsea"], "--target", "tiger cat")
    with camserve.Client(served) as client:
        ours = client.explain(PHOTOS["chelsea"], targets="tiger cat").explanations[0]

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.startswith(f"{PHOTOS['chelsea']}: 0.38 Egyptian cat; tiger cat by {ours.layer}: ")
    theirs = Image.open(io.BytesIO((tmp_path / "out" / "chelsea.gradcam.jpg").read_bytes()))
    assert theirs.tobytes() == Image.open(io.BytesIO(ours.overlay)).tobytes()


def test_several_photos_go_over_one_stream_and_one_that_is_none_harms_no_other(node, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    photos = [PHOTOS["coffee"], "broken.jpg", PHOTOS["rocket"]]
    found = node(*photos, "--method", "saliency")

    assert found.returncode == 1
    assert found.stderr.startswith("broken.jpg: ")
    assert found.stderr.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["coffee.saliency.jpg", "rocket.saliency.jpg"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([PHOTOS["chelsea"], "--method", "grdcam"], 'did you mean "gradcam"?'),
        ([PHOTOS["chelsea"], "--model", "resnet50"], "resnet50"),
        ([PHOTOS["chelsea"], "--token", "secret"], "a token goes over TLS only"),
        (["nothing.jpg"], "no such file"),
        ([], "name a photo"),
    ],
)
def test_what_went_wrong_is_told_in_a_line(node, arguments, words):
    found = node(*arguments)

    assert found.returncode == 1
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert found.stderr.count("\n") == 1
