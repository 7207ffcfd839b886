"""The Node client, which is generated from the .proto files."""

import io
import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

import camserve
import camserve_server
import needs
from camserve.v1.explain_pb2 import ExplainStreamResponse
from client import hostile
from support import PHOTOS

CLIENT = Path(__file__).parents[2] / "clients" / "node"
NODE = shutil.which("node")

pytestmark = [
    pytest.mark.skipif(NODE is None, reason=needs.NODE),
    pytest.mark.skipif(not (CLIENT / "node_modules").is_dir(), reason=needs.NODE_PACKAGES),
]


@pytest.fixture
def node(address, tmp_path):
    """Function that runs the client in an empty folder."""

    def run(*arguments):
        command = [NODE, CLIENT / "explain.js", "--server", address, "--out", tmp_path / "out", *arguments]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)

    return run


def test_overlay_equals_that_of_the_python_client(node, address, tmp_path):
    result = node(PHOTOS["chelsea"], "--target", "tiger cat")
    with camserve.Client(address) as client:
        expected = client.explain(PHOTOS["chelsea"], targets="tiger cat").explanations[0]

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith(f"{PHOTOS['chelsea']}: 0.38 Egyptian cat; tiger cat by {expected.layer}: ")
    picture = Image.open(io.BytesIO((tmp_path / "out" / "chelsea.gradcam.jpg").read_bytes()))
    assert picture.tobytes() == Image.open(io.BytesIO(expected.overlay)).tobytes()


def test_invalid_photo_of_a_stream_does_not_affect_others(node, tmp_path):
    (tmp_path / "broken.jpg").write_bytes(b"no photo")
    photos = [PHOTOS["coffee"], "broken.jpg", PHOTOS["rocket"]]
    result = node(*photos, "--method", "edges")

    assert result.returncode == 1
    assert result.stderr.startswith("broken.jpg: ")
    assert result.stderr.count("\n") == 1
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["coffee.edges.jpg", "rocket.edges.jpg"]


@pytest.mark.slow
def test_unreadable_photo_does_not_affect_others(node, tmp_path):
    result = node(PHOTOS["coffee"], "nothing.jpg", PHOTOS["rocket"], "--method", "edges")

    assert result.returncode == 1
    assert result.stderr.startswith("nothing.jpg: ENOENT: no such file")
    assert result.stderr.count("\n") == 1
    pictures = {line.split(": ")[0]: line.rpartition(": ")[2] for line in result.stdout.splitlines()}
    assert pictures == {str(PHOTOS[name]): str(tmp_path / "out" / f"{name}.edges.jpg") for name in ("coffee", "rocket")}


@pytest.mark.slow
def test_photos_with_the_same_name_get_different_pictures(node, tmp_path):
    photos = ["a/1.jpg", "b/1.jpg", "c/1-2.jpg", "d/1.JPG"]
    for path, name in zip(photos, ["coffee", "rocket", "chelsea", "coffee"], strict=True):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(PHOTOS[name].read_bytes())
    result = node(*photos, "--method", "edges")

    assert (result.returncode, result.stderr) == (0, "")
    pictures = {line.split(": ")[0]: Path(line.rpartition(": ")[2]).name for line in result.stdout.splitlines()}
    assert pictures == {
        "a/1.jpg": "1.edges.jpg",
        "b/1.jpg": "1-2.edges.jpg",
        "c/1-2.jpg": "1-2-2.edges.jpg",
        "d/1.JPG": "1-3.edges.jpg",
    }
    for path, name in pictures.items():
        with Image.open(tmp_path / path) as photo, Image.open(tmp_path / "out" / name) as picture:
            assert photo.size == picture.size


@pytest.mark.parametrize("count", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_model_without_predictions_is_explained(node, tmp_path, count):
    photos = [PHOTOS["coffee"], PHOTOS["rocket"]][:count]
    with camserve_server.running("pooled=coloured:Pooled?size=64&task=embed") as address:
        result = node(*photos, "--like", PHOTOS["chelsea"], "--server", address)

    assert (result.returncode, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert len(lines) == len(list((tmp_path / "out").iterdir())) == count
    assert all(": similarity by " in line for line in lines)


@pytest.mark.slow
def test_no_proxy_is_used_without_tls(node, monkeypatch):
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")  # where nothing listens
    result = node(PHOTOS["rocket"], "--method", "edges")

    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.parametrize("count", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_hostile_server_cannot_choose_files_or_control_the_terminal(node, tmp_path, count):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rocket._victim_2J_.jpg").symlink_to(victim)
    answer = hostile.explained("/../../victim\x1b[2J\n")
    photos = [PHOTOS["rocket"], PHOTOS["coffee"]][:count]
    with hostile.serving() as server:
        server.replies["Explain"] = answer.SerializeToString()
        server.stream(lambda each: [ExplainStreamResponse(request_id=each.request_id, response=answer)])
        result = node(*photos, "--server", server.address)

    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.count("\n") == count
    assert "\x1b" not in result.stdout
    assert victim.read_text() == "precious"
    names = {path.name for path in tmp_path.rglob("*")} - {"out", "victim"}
    assert names == {f"{name}._victim_2J_.jpg" for name in ("rocket", "coffee")[:count]}


WITH_A_REASON = """
import { connect, explainMany } from "%s";
async function* requests() { throw new Error("the disk is gone"); }
const client = connect(process.argv[2]);
try {
  for await (const one of explainMany(client, requests())) console.log(one);
} catch (error) {
  console.log(error.message);
} finally {
  client.close();
}
"""


@pytest.mark.slow
def test_error_of_the_request_iterator_ends_the_stream(address, tmp_path):
    (tmp_path / "use.mjs").write_text(WITH_A_REASON % (CLIENT / "explain.js").as_uri())
    command = [NODE, tmp_path / "use.mjs", address]
    result = subprocess.run(command, capture_output=True, text=True, check=False)

    assert (result.returncode, result.stderr, result.stdout) == (0, "", "the disk is gone\n")


LEFT_EARLY = """
import { readFile } from "node:fs/promises";
import grpc from "%s";
import { connect, explainMany, request } from "%s";

const { service } = connect("nobody:1").constructor;
const server = new grpc.Server();
server.addService(service, {
  explainStream(call) { // answers twenty, and reads no further
    let read = 0;
    call.on("data", ({ request_id }) => {
      call.write({ request_id, response: {} });
      if (++read === 20) call.pause();
    });
    call.on("cancelled", () => console.log("left"));
  },
});
const insecure = grpc.ServerCredentials.createInsecure();
const port = await new Promise((done) => server.bindAsync("127.0.0.1:0", insecure, (_, result) => done(result)));

const image = await readFile(process.argv[2]);
let [made, closed] = [0, false];
async function* requests() {
  try {
    while (true) yield request(image, { methods: ["edges"] }), made++;
  } finally {
    closed = true;
  }
}
const client = connect(`127.0.0.1:${port}`);
const wait = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));
let got = 0;
for await (const one of explainMany(client, requests())) {
  if (++got < 20) continue;
  for (let before = -1; made !== before; await wait(300)) before = made; // time enough to read more, if it would
  break;
}
for (let waited = 0; !closed && waited < 10000; waited += 10) await wait(10);
console.log(JSON.stringify({ got, ahead: made - got, closed }));
client.close();
server.forceShutdown();
"""


@pytest.mark.slow
def test_photos_are_read_with_backpressure_and_not_after_cancellation(tmp_path):
    library = CLIENT / "node_modules/@grpc/grpc-js/build/src/index.js"
    (tmp_path / "use.mjs").write_text(LEFT_EARLY % (library.as_uri(), (CLIENT / "explain.js").as_uri()))
    command = [NODE, tmp_path / "use.mjs", PHOTOS["rocket"]]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    output, event = sorted(result.stdout.splitlines(), key=lambda line: line == "left")  # in either order
    counts = json.loads(output)

    assert (result.returncode, result.stderr, event) == (0, "", "left")
    assert (counts["got"], counts["closed"]) == (20, True)
    assert counts["ahead"] <= 16 + 16 + 8  # the buffers of both ends, and messages on the way


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([PHOTOS["chelsea"], "--method", "grdcam"], 'did you mean "gradcam"?'),
        pytest.param([PHOTOS["chelsea"], "--model", "resnet50"], "resnet50", marks=pytest.mark.slow),
        ([PHOTOS["chelsea"], "--token", "secret"], "a token requires TLS"),
        pytest.param(["nothing.jpg"], "no such file", marks=pytest.mark.slow),
        pytest.param([], "no photo given", marks=pytest.mark.slow),
    ],
)
def test_error_is_reported_in_one_line(node, arguments, message):
    result = node(*arguments)

    assert result.returncode == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
