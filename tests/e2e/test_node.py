"""The client in Node, which has nothing but the .proto files."""

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


def test_a_photo_that_cannot_be_read_harms_no_other(node, tmp_path):
    found = node(PHOTOS["coffee"], "nothing.jpg", PHOTOS["rocket"], "--method", "saliency")

    assert found.returncode == 1
    assert found.stderr.startswith("nothing.jpg: ENOENT: no such file")
    assert found.stderr.count("\n") == 1
    said = {line.split(": ")[0]: line.rpartition(": ")[2] for line in found.stdout.splitlines()}
    assert said == {str(PHOTOS[name]): str(tmp_path / "out" / f"{name}.saliency.jpg") for name in ("coffee", "rocket")}


def test_photos_of_one_name_get_pictures_of_their_own(node, tmp_path):
    photos = ["a/1.jpg", "b/1.jpg", "c/1-2.jpg", "d/1.JPG"]
    for path, name in zip(photos, ["coffee", "rocket", "chelsea", "coffee"], strict=True):
        (tmp_path / path).parent.mkdir()
        (tmp_path / path).write_bytes(PHOTOS[name].read_bytes())
    found = node(*photos, "--method", "saliency")

    assert (found.returncode, found.stderr) == (0, "")
    said = {line.split(": ")[0]: Path(line.rpartition(": ")[2]).name for line in found.stdout.splitlines()}
    assert said == {
        "a/1.jpg": "1.saliency.jpg",
        "b/1.jpg": "1-2.saliency.jpg",
        "c/1-2.jpg": "1-2-2.saliency.jpg",
        "d/1.JPG": "1-3.saliency.jpg",
    }
    for path, name in said.items():
        with Image.open(tmp_path / path) as photo, Image.open(tmp_path / "out" / name) as picture:
            assert photo.size == picture.size


@pytest.mark.parametrize("count", [1, 2])
def test_a_model_without_predictions_is_explained_too(node, tmp_path, count):
    photos = [PHOTOS["coffee"], PHOTOS["rocket"]][:count]
    with camserve_server.running("pooled=coloured:Pooled?size=64&task=embed") as address:
        found = node(*photos, "--like", PHOTOS["chelsea"], "--server", address)

    assert (found.returncode, found.stderr) == (0, "")
    lines = found.stdout.splitlines()
    assert len(lines) == len(list((tmp_path / "out").iterdir())) == count
    assert all(": similarity by " in line for line in lines)


def test_without_tls_no_proxy_is_used(node, monkeypatch):
    for variable in ("grpc_proxy", "https_proxy", "http_proxy"):
        monkeypatch.setenv(variable, "http://127.0.0.1:1")  # where nothing listens
    found = node(PHOTOS["rocket"], "--method", "edges")

    assert (found.returncode, found.stderr) == (0, "")


@pytest.mark.parametrize("count", [1, 2])
def test_a_hostile_server_cannot_choose_a_file_or_drive_the_terminal(node, tmp_path, count):
    victim = tmp_path / "victim"
    victim.write_text("precious")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "rocket._victim_2J_.jpg").symlink_to(victim)
    answer = hostile.explained("/../../victim\x1b[2J\n")
    photos = [PHOTOS["rocket"], PHOTOS["coffee"]][:count]
    with hostile.serving() as server:
        server.replies["Explain"] = answer.SerializeToString()
        server.stream(lambda each: [ExplainStreamResponse(request_id=each.request_id, response=answer)])
        found = node(*photos, "--server", server.address)

    assert (found.returncode, found.stderr) == (0, "")
    assert found.stdout.count("\n") == count
    assert "\x1b" not in found.stdout
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


def test_requests_that_fail_end_the_stream_by_their_own_reason(served, tmp_path):
    (tmp_path / "use.mjs").write_text(WITH_A_REASON % (CLIENT / "explain.js").as_uri())
    command = [NODE, tmp_path / "use.mjs", served]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (found.returncode, found.stderr, found.stdout) == (0, "", "the disk is gone\n")


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
const port = await new Promise((done) => server.bindAsync("127.0.0.1:0", insecure, (_, found) => done(found)));

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


def test_photos_are_read_as_room_allows_and_not_after_cancellation(tmp_path):
    library = CLIENT / "node_modules/@grpc/grpc-js/build/src/index.js"
    (tmp_path / "use.mjs").write_text(LEFT_EARLY % (library.as_uri(), (CLIENT / "explain.js").as_uri()))
    command = [NODE, tmp_path / "use.mjs", PHOTOS["rocket"]]
    found = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    told, said = sorted(found.stdout.splitlines(), key=lambda line: line == "left")  # either end may be the first
    told = json.loads(told)

    assert (found.returncode, found.stderr, said) == (0, "", "left")
    assert (told["got"], told["closed"]) == (20, True)
    assert told["ahead"] <= 16 + 16 + 8  # what either end keeps ready, and what lies on the way


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([PHOTOS["chelsea"], "--method", "grdcam"], 'did you mean "gradcam"?'),
        ([PHOTOS["chelsea"], "--model", "resnet50"], "resnet50"),
        ([PHOTOS["chelsea"], "--token", "secret"], "a token requires TLS"),
        (["nothing.jpg"], "no such file"),
        ([], "no photo given"),
    ],
)
def test_what_went_wrong_is_told_in_a_line(node, arguments, words):
    found = node(*arguments)

    assert found.returncode == 1
    assert found.stderr.startswith("error: ")
    assert words in found.stderr
    assert found.stderr.count("\n") == 1
