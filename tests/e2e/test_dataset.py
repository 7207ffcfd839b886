"""Dataset jobs: an interrupted job can be resumed, and every photo is in the results exactly once."""

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
from collections import Counter, deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from PIL import Image

import camserve
import fork_server
from camserve import dataset
from camserve._transport.photo_errors import is_photo_error, is_request_error
from camserve.cli import main
from camserve.dataset import job, results
from support import serving

NETS = """
import os
from collections import OrderedDict

import torch
from torch import nn


def tiny():
    torch.manual_seed(0)
    return nn.Sequential(OrderedDict(
        features=nn.Conv2d(3, 4, 3, 2, 1), pool=nn.AdaptiveAvgPool2d(1), flat=nn.Flatten(), head=nn.Linear(4, 5),
    ))


class Fatal(nn.Module):
    def forward(self, x):
        if x[:, 0].mean((1, 2)).max() > 0.9:
            os._exit(7)
        return x


def fatal():
    return nn.Sequential(OrderedDict(first=Fatal(), net=tiny()))
"""

CAMSERVE = "from camserve.cli import main; main()"
"""The program `camserve`."""
KILLED = """
import os, signal
from camserve.dataset import job

write = job.write_results
job.MAX_PART_PHOTOS = 20
job.write_results = lambda *arguments: (write(*arguments), os.kill(os.getpid(), signal.SIGKILL))
"""
"""Planted: the job is killed after it has written its first results, while its threads write pictures of others."""


@pytest.fixture(scope="module")
def address(tmp_path_factory):
    folder = tmp_path_factory.mktemp("nets")
    (folder / "dataset_nets.py").write_text(NETS)
    sys.path.insert(0, str(folder))
    try:
        with serving(models=("tiny=dataset_nets:tiny?size=32",), device="cpu", threads=1) as served:
            yield served.address
    finally:
        sys.path.remove(str(folder))


HEAD = b"\xff\xd8\xff"
"""First bytes of a JPEG."""


def photo_file(number=0):
    """Return the file of a small photo, in a different colour for each number."""
    file = io.BytesIO()
    Image.new("RGB", (16, 12), (number % 256, number // 256, 99)).save(file, "PNG")
    return file.getvalue()


@pytest.fixture
def photos(tmp_path):
    """Folder with five photos in two folders, an invalid photo, an empty one and a text file."""
    folder = tmp_path / "photos"
    (folder / "more").mkdir(parents=True)
    for number in range(5):
        (folder / ("more" if number > 2 else ".") / f"{number}.png").write_bytes(photo_file(number))
    (folder / "bad.jpg").write_bytes(b"rubbish")
    (folder / "empty.png").touch()
    (folder / "notes.txt").write_text("no photo")
    return folder


@pytest.fixture
def run(address, tmp_path):
    """Function that runs the job and returns the command's result."""

    def run_job(*paths, out="out", options=("--model", "tiny")):
        arguments = ["explain", *map(str, paths), "-o", str(tmp_path / out), "--resume", "--server", address, *options]
        return CliRunner().invoke(main, arguments)

    return run_job


def rows(folder):
    return pq.read_table(folder / "results").to_pylist()


def test_each_photo_gets_a_row_and_an_invalid_one_its_error(run, photos, tmp_path):
    result = run(photos)

    assert (result.exit_code, result.output.count("7 photos are done")) == (0, 1), result.output
    by_name = {Path(row["image"]).name: row for row in rows(tmp_path / "out")}
    assert set(by_name) == {"0.png", "1.png", "2.png", "3.png", "4.png", "bad.jpg", "empty.png"}
    assert by_name["bad.jpg"]["error"] == by_name["empty.png"]["error"] == "INVALID_ARGUMENT"
    assert "not a JPEG" in by_name["bad.jpg"]["error_message"]
    assert all(by_name[f"{n}.png"]["image"] == str(photos / ("more" if n > 2 else "") / f"{n}.png") for n in range(5))


def test_row_has_the_values_of_the_clients_result(run, photos, tmp_path, address):
    run(photos / "1.png", options=("--model", "tiny", "--method", "hirescam", "--method", "gradcam", "--heatmaps"))

    first, second = sorted(rows(tmp_path / "out"), key=lambda row: row["explanation"])
    with camserve.Client(address) as client:
        result = client.explain(photos / "1.png", model="tiny", methods=["hirescam", "gradcam"])
        digest = client.model("tiny").digest
    for row, explanation in zip((first, second), result.explanations, strict=True):
        assert (row["method"], row["layer"], row["verdict"]) == (
            explanation.method,
            explanation.layer,
            explanation.verdict,
        )
        assert (row["score"], row["class_index"]) == (explanation.score, explanation.target.class_index)
        assert (tmp_path / "out" / row["overlay"]).read_bytes() == explanation.overlay
        heatmap = np.load((tmp_path / "out" / row["overlay"]).with_suffix(".npy"))
        np.testing.assert_array_equal(heatmap, explanation.heatmap)
    probabilities = [prediction["probability"] for prediction in first["predictions"]]
    assert probabilities == [prediction.probability for prediction in result.predictions]
    assert (first["model"], first["digest"], first["width"], first["height"]) == ("tiny", digest, 16, 12)


def test_regions_of_a_job_are_those_of_the_clients_result(run, photos, tmp_path, address):
    options = camserve.RegionOptions(quantile=0.5, max_regions=3)
    result = run(photos, options=("--model", "tiny", "--regions", "--region-quantile", "0.5", "--max-regions", "3"))

    assert result.exit_code == 0, result.output
    by_name = {Path(row["image"]).name: row for row in rows(tmp_path / "out")}
    assert by_name["bad.jpg"]["regions"] is None
    with camserve.Client(address) as client:
        (explanation,) = client.explain(photos / "1.png", model="tiny", regions=options).explanations
    assert explanation.regions
    assert by_name["1.png"]["regions"] == [
        {name: value for name, value in region.plain().items() if name not in ("contour", "mask")}
        | {"peak": dict(zip("xy", region.peak, strict=True))}
        for region in explanation.regions
    ]


def test_part_without_any_result_has_the_column_of_the_regions(run, photos, tmp_path):
    plain, asked = (tmp_path / name / "results" for name in ("plain", "asked"))
    run(photos / "bad.jpg", out="plain")
    run(photos / "bad.jpg", out="asked", options=("--model", "tiny", "--regions"))

    assert pq.read_schema(next(plain.iterdir())) == dataset.schema()
    assert pq.read_schema(next(asked.iterdir())) == dataset.schema(regions=True)


def test_second_run_explains_only_new_photos(run, photos, tmp_path):
    run(photos)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*.jpg")}
    (photos / "more" / "new.png").write_bytes(photo_file(77))
    result = run(photos)

    assert "8 photos are done (7 by earlier runs)" in result.output
    assert max(Counter(row["image"] for row in rows(tmp_path / "out")).values()) == 1
    assert len(rows(tmp_path / "out")) == 8
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_summary_has_the_failures_of_all_runs(run, photos, tmp_path):
    (photos / "empty.png").rename(tmp_path / "later.png")
    first = run(photos)
    (tmp_path / "later.png").rename(photos / "empty.png")
    second = run(photos)
    third = run(photos)

    assert "6 photos are done: 5 explained, 1 failed. The results" in first.output
    assert "7 photos are done (6 by earlier runs): 5 explained, 2 failed (1 in earlier runs)." in second.output
    assert "7/7" in third.output
    assert "7 photos are done (7 by earlier runs): 5 explained, 2 failed (2 in earlier runs)." in third.output
    assert [each.exit_code for each in (first, second, third)] == [0, 0, 0]  # as documented: the photos are done


def test_retry_failed_explains_photos_with_an_error_again(run, photos, tmp_path):
    run(photos)
    before = {row["image"]: row for row in rows(tmp_path / "out")}
    (photos / "bad.jpg").write_bytes(photo_file(50))
    unchanged = run(photos)
    other = run(photos, options=("--model", "tiny", "--method", "hirescam", "--retry-failed"))
    result = run(photos, options=("--model", "tiny", "--retry-failed"))

    assert "5 explained, 2 failed" in unchanged.output
    assert other.exit_code == 1
    assert "has a job with other methods" in other.output
    assert "7 photos are done (5 by earlier runs): 6 explained, 1 failed. The results" in result.output
    after = {row["image"]: row for row in rows(tmp_path / "out")}
    assert len(rows(tmp_path / "out")) == len(after) == 7
    assert after[str(photos / "bad.jpg")]["error"] is None
    explained = [image for image, row in before.items() if not row["error"]]
    assert [after[image] for image in explained] == [before[image] for image in explained]


def test_retry_failed_keeps_the_rows_of_photos_that_are_not_named(run, photos, tmp_path):
    run(photos)
    run(photos / "bad.jpg", options=("--model", "tiny", "--retry-failed"))

    assert len(rows(tmp_path / "out")) == 7
    assert run(photos).output.count("2 failed (2 in earlier runs)") == 1


def test_interrupted_retry_leaves_its_photos_to_the_next_run(run, photos, tmp_path, monkeypatch):
    run(photos / "bad.jpg")
    run(photos)
    with monkeypatch.context() as patch:
        patch.setattr(dataset, "run", lambda *_args: 1 / 0)
        run(photos, options=("--model", "tiny", "--retry-failed"))
    assert len(rows(tmp_path / "out")) == 5

    assert "7 photos are done (5 by earlier runs): 5 explained, 2 failed." in run(photos).output
    assert len(rows(tmp_path / "out")) == 7


def test_retry_failed_without_resume_is_refused(photos, tmp_path):
    refused = CliRunner().invoke(main, ["explain", str(photos), "-o", str(tmp_path / "out"), "--retry-failed"])

    assert refused.exit_code == 2
    assert "--retry-failed needs --resume" in refused.output


def test_photo_named_by_several_paths_is_explained_once(run, photos, tmp_path):
    result = run(photos, photos / "more", photos / "more" / "3.png", photos / "**" / "*.png")

    assert result.exit_code == 0, result.output
    assert len(rows(tmp_path / "out")) == 7


def test_pictures_of_the_job_are_not_explained(run, photos):
    run(photos, out="photos")
    run(photos, out="photos")
    run(photos, out="photos/out")

    assert len(rows(photos)) == len(rows(photos / "out")) == 7


@pytest.mark.parametrize(
    ("option", "message"),
    [(("--method", "gradcm"), "unknown method"), (("--layer", "x"), "unknown layer"), (("--target", "77"), "77")],
)
def test_error_of_the_request_ends_the_job_without_results(option, message, run, photos, tmp_path):
    invalid = run(photos, options=("--model", "tiny", *option))
    valid = run(photos)

    assert invalid.exit_code != 0
    assert message in invalid.output
    assert not list((tmp_path / "out" / "results").glob("*.parquet")) or valid.exit_code == 0
    assert (valid.exit_code, valid.output.count("7 photos are done: 5 explained")) == (0, 1), valid.output


def test_errors_of_photos_requests_and_servers_are_distinguished():
    photo_errors = [
        camserve.FailedPrecondition("no dog here", fields={"targets": ""}),
        camserve.InvalidArgument("too large", fields={"image": ""}),
        camserve.InvalidArgument("outside", fields={"targets[0].detection.box": ""}),
        camserve.InvalidArgument("pictures too large", fields={"rendering.max_side": ""}),
        camserve.ResourceExhausted("the message is larger than max_message_mib: 99 bytes"),
    ]
    server_errors = [
        kind("x")
        for kind in (camserve.Unavailable, camserve.Internal, camserve.DeadlineExceeded, camserve.ResourceExhausted)
    ]
    request_errors = [
        camserve.FailedPrecondition("a layer that cannot be explained"),
        camserve.InvalidArgument("no such class", fields={"targets[0].class_index": ""}),
        camserve.InvalidArgument("opacity", fields={"image": "", "rendering.alpha": ""}),
        *(kind("x") for kind in (camserve.NotFound, camserve.Unauthenticated, camserve.PermissionDenied)),
    ]

    assert all(map(is_photo_error, photo_errors))
    assert not any(map(is_photo_error, [*server_errors, *request_errors]))
    assert all(map(is_request_error, request_errors))
    assert not any(map(is_request_error, [*server_errors, *photo_errors]))


SPEC = dataset.JobSpec({"heatmap": False}, dataset.Outputs("jpeg", heatmaps=False, receipts=False))


class Photos(list):
    """Keys of photos of one byte each."""

    def read(self, key, _limit=None):
        return key[:1].encode()


class Client:
    """Client that returns a given error for each photo's byte.

    Attributes:
        calls: the byte of each photo, and the number of photos in flight with it.
    """

    def __init__(self, **errors):
        self.errors, self.calls = errors, []

    def model(self, _name):
        return type("Model", (), {"digest": ""})

    def explain_many(self, images, *, in_flight, **_options):
        for image in images:
            self.calls.append((image.decode(), in_flight))
            yield self.errors.get(image.decode(), camserve.InvalidArgument("none", fields={"image": "none"}))


def test_photo_that_fails_the_server_is_retried_alone_then_left_for_the_next_run(tmp_path):
    store, photos = dataset.Store(str(tmp_path)), Photos(["a1", "x1", "b1", "y1", "c1"])
    failing = Client(x=camserve.Unavailable("gone"), y=camserve.Internal("a fault"))
    first = dataset.run(failing, photos, store, SPEC)
    again = Client(y=camserve.Internal("a fault"))
    second = dataset.run(again, photos, store, SPEC)

    assert (first.failed, first.left, first.why) == (3, 2, "a fault")
    assert failing.calls[5:] == [("x", 1), ("y", 1)]
    assert (second.before, second.failed, second.left) == (3, 1, 1)
    assert Counter(row["image"] for row in rows(tmp_path)) == dict.fromkeys(["a1", "b1", "c1", "x1"], 1)


def test_job_ends_if_every_photo_fails_and_continues_if_every_other_fails(tmp_path):
    many = Photos(f"{'xa'[n % 2]}{n}" for n in range(8 * job.RETRY_AFTER))
    clients = {kind: Client(x=kind("no"), a=kind("no")) for kind in (camserve.Unavailable, camserve.Internal)}

    with pytest.raises(camserve.Unavailable):
        dataset.run(clients[camserve.Unavailable], many, dataset.Store(str(tmp_path / "gone")), SPEC)
    assert len(clients[camserve.Unavailable].calls) < 3 * job.RETRY_AFTER
    assert not (tmp_path / "gone" / "results").exists()
    faulty = dataset.run(clients[camserve.Internal], many, dataset.Store(str(tmp_path / "faulty")), SPEC)
    assert (faulty.total, faulty.left) == (0, len(many))
    other = dataset.run(Client(x=camserve.Unavailable("no")), many, dataset.Store(str(tmp_path / "other")), SPEC)
    assert (other.total, other.left) == (len(many) // 2, len(many) // 2)


@pytest.mark.slow  # robustness/test_workers.py has the fast tests of lethal requests
@pytest.mark.usefixtures("forked")
def test_photo_that_kills_its_worker_is_left_and_others_are_done(address, tmp_path):
    """The server's worker is a process: when the photo ends it, its whole batch is lost and retried."""
    del address  # puts the folder of the models on the path
    (tmp_path / "photos").mkdir()
    for number in range(6):
        colour = (255, 255, 255) if number == 2 else (number, 0, 0)
        Image.new("RGB", (16, 12), colour).save(tmp_path / "photos" / f"{number}.png")
    store, photos = dataset.Store(str(tmp_path / "out")), dataset.Photos([str(tmp_path / "photos")])
    settings = {"models": ("dataset_nets:fatal?size=32",), "device": "cpu", "threads": 1, "isolation": "process"}
    with serving(**settings) as server, camserve.Client(server.address, retries=1) as client:
        tally = dataset.run(client, photos, store, SPEC)

    assert (tally.explained, tally.failed, tally.left) == (5, 0, 1), tally
    assert {Path(row["image"]).name for row in rows(tmp_path / "out")} == {f"{n}.png" for n in (0, 1, 3, 4, 5)}


def test_remaining_photos_are_reported_with_exit_code_1(run, photos, monkeypatch):
    monkeypatch.setattr(job, "is_photo_error", lambda _error: False)
    monkeypatch.setattr(job, "is_request_error", lambda _error: False)
    result = run(photos)

    assert result.exit_code == 1
    assert "5 photos are done" in result.output
    assert "2 photos are left for the next run. The last error: " in result.output


def test_photos_of_many_small_tables_keep_their_keys(tmp_path):
    """The next tables are listed while other threads read photos."""
    for table in range(60):
        cells = [HEAD + f"{table}#{row}".encode() for row in range(3)]
        pq.write_table(pa.table({"image": cells}), tmp_path / f"{table}.parquet")
    photos, under_way = dataset.Photos([f"{tmp_path}/{table}.parquet" for table in range(60)]), deque()
    with ThreadPoolExecutor(job.THREADS) as pool:
        read = [image.removeprefix(HEAD).decode() for image in job._prefetch(pool, photos, photos, under_way)]

    assert [f"{tmp_path}/{data.replace('#', '.parquet#')}" for data in read] == [key for key, _ in under_way]
    assert len(read) == 180


def test_table_in_an_object_store_refers_to_photos_there(tmp_path):
    """Paths may be relative, above the table, absolute in its store, or URIs."""
    fsspec = pytest.importorskip("fsspec")
    (tmp_path / "4").write_bytes(b"\xff\xd8\xff4")
    names = ["1.png", "../2.png", "/elsewhere/3.png", f"file://{tmp_path}/4"]
    for number, path in enumerate(("set/deep/1.png", "set/2.png", "elsewhere/3.png"), 1):
        with fsspec.open(f"memory://{path}", "wb") as file:
            file.write(b"\xff\xd8\xff%d" % number)
    with fsspec.open("memory://set/deep/table.parquet", "wb") as file:
        pq.write_table(pa.table({"image": names}), file)
    photos = dataset.Photos(["memory://set/deep/table.parquet"], allow_outside=True)

    assert [photos.read(key)[-1:] for key in photos] == [b"1", b"2", b"3", b"4"]
    with pytest.raises(camserve.InvalidArgument, match=r"names \.\./2\.png, which is outside of its folder"):
        list(dataset.Photos(["memory://set/deep/table.parquet"]))


@pytest.mark.parametrize(
    ("table", "path", "key"),
    [
        ("s3://b/set/t.parquet", "x/1.png", "s3://b/set/x/1.png"),
        ("s3://b/set/t.parquet", "../1.png", "s3://b/1.png"),
        ("s3://b/set/t.parquet", "/1.png", "s3://b/1.png"),
        ("s3://b/set/t.parquet", "s3://c/1.png", "s3://c/1.png"),
        ("memory:///set/t.parquet", "/1.png", "memory:///1.png"),
        ("/set/t.parquet", "../1.png", "/1.png"),
        ("/set/t.parquet", "/other/1.png", "/other/1.png"),
    ],
)
def test_path_in_a_table_is_resolved_in_its_store(table, path, key):
    assert dataset.photos._resolve(table, path) == key


def test_each_bucket_has_its_own_file_system(monkeypatch):
    monkeypatch.setattr(dataset.photos, "filesystem", lambda uri: (uri[:7], uri[5:]))
    photos = dataset.Photos(["s3://a/x", "s3://b/y"])

    assert [photos._file_system(f"s3://{bucket}/z.png") for bucket in "abc"] == ["s3://a/", "s3://b/", "s3://c/"]


def test_failure_of_a_store_is_not_an_error_of_the_photo(monkeypatch, tmp_path):
    photos, outcomes = dataset.Photos([str(tmp_path)]), {}
    for error in (OSError("timeout"), FileNotFoundError("none")):
        store = Mock(**{"open_input_stream.side_effect": error})
        monkeypatch.setattr(photos, "_file_system", Mock(return_value=store))
        with pytest.raises(camserve.CamserveError) as raised:
            photos.read("s3://b/1.png")
        outcomes[type(error)] = is_photo_error(raised.value)

    assert outcomes == {OSError: False, FileNotFoundError: True}


def test_photo_with_a_long_unicode_name_is_explained(run, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / f"{'🐈' * 62}.png").write_bytes(photo_file())
    result = run(tmp_path / "photos", options=("--model", "tiny", "--heatmaps", "--receipts"))

    assert result.exit_code == 0, result.output
    assert [row["error"] for row in rows(tmp_path / "out")] == [None]


@pytest.mark.parametrize("options", [(), ("--resume",)])
def test_output_to_a_uri_is_refused(options, photos, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    refused = CliRunner().invoke(main, ["explain", str(photos), "-o", "s3://bucket/why", *options])

    assert refused.exit_code == 2
    assert "s3://bucket/why is a URI: the folder must be local" in " ".join(refused.output.split())
    assert not (tmp_path / "s3:").exists()


def test_job_is_resumed_only_with_the_same_options(run, photos, tmp_path):
    run(photos)
    refused = run(photos, options=("--model", "tiny", "--method", "layercam", "--alpha", "0.3"))
    with_regions = run(photos, options=("--model", "tiny", "--regions"))
    (tmp_path / "out" / "job.json").write_text("[")
    broken = run(photos)

    assert refused.exit_code != 0
    assert "has a job with other methods, rendering" in refused.output
    assert "has a job with other rendering" in with_regions.output
    assert "is not a job" in broken.output


def test_second_concurrent_run_in_one_folder_is_refused(run, photos, tmp_path):
    with dataset.locked(tmp_path / "out"):
        refused = run(photos)

    assert refused.exit_code != 0
    assert "another run uses" in refused.output


def test_error_names_a_corrupt_part(run, photos, tmp_path):
    run(photos)
    part = min((tmp_path / "out" / "results").glob("*.parquet"))
    part.write_bytes(b"PAR1")
    refused = run(photos)

    assert refused.exit_code != 0
    assert f"{part} cannot be read: delete it" in " ".join(refused.output.split())


@pytest.mark.parametrize("kind", ["bytes", "hugging face", "paths"])
def test_photos_are_read_from_a_parquet_file(kind, run, photos, tmp_path):
    """Photos may be bytes, structs with bytes as Hugging Face's datasets write them, or paths."""
    files = [photo_file(n) for n in range(9)]
    if kind == "paths":
        cells = pa.array([f"more/{n}.png" for n in (3, 4)])
    else:
        cells = pa.array(files if kind == "bytes" else [{"bytes": data, "path": None} for data in files])
    columns = {"caption": pa.array(["x"] * len(cells)), "image": cells}
    pq.write_table(pa.table(columns), photos / "set.parquet", row_group_size=7)
    result = run(photos / "set.parquet")

    assert result.exit_code == 0, result.output
    by_key = {row["image"]: row for row in rows(tmp_path / "out")}
    if kind == "paths":
        assert set(by_key) == {str(photos / "more" / "3.png"), str(photos / "more" / "4.png")}
    else:
        assert set(by_key) == {f"{photos}/set.parquet#{n}" for n in range(9)}
    assert not any(row["error"] for row in by_key.values())


def test_error_for_a_missing_column_lists_candidates(run, tmp_path):
    pq.write_table(pa.table({"a": [b""], "b": [b""], "n": [1]}), tmp_path / "set.parquet")

    assert (
        "name the column with the photos by --column; candidates are a, b"
        in run(tmp_path / "set.parquet").output.lower()
    )
    assert "no column c of bytes or paths" in run(tmp_path / "set.parquet", options=("--column", "c")).output
    assert run(tmp_path / "set.parquet", options=("--column", "b")).exit_code == 0


def test_photos_are_read_from_an_object_store(run, photos, tmp_path):
    """A URI of Arrow's own file systems and one of fsspec's."""
    for path in photos.rglob("*.png"):
        fsspec = pytest.importorskip("fsspec")
        with fsspec.open(f"memory://bucket/{path.relative_to(photos)}", "wb") as file:
            file.write(path.read_bytes())
    for out, uri in (("a", photos.as_uri()), ("b", "memory://bucket")):
        result = run(uri, out=out)
        assert result.exit_code == 0, result.output
        keys = {row["image"] for row in rows(tmp_path / out) if not row["error"]}
        names = {"0.png", "1.png", "2.png", "more/3.png", "more/4.png"}
        assert {key.partition("photos/" if out == "a" else "bucket/")[2] for key in keys} == names
    assert "is a URI, which needs --resume" in CliRunner().invoke(main, ["explain", "s3://b/p", "-o", "x"]).output


@pytest.mark.skipif(sys.platform != "linux", reason="a file's name is text there")
def test_photo_with_a_name_that_is_not_utf_8_is_explained_once(run, photos, tmp_path):
    Path(os.fsdecode(os.fsencode(photos) + b"/\xff.png")).write_bytes(photo_file())
    run(photos)
    result = run(photos)

    assert "8 photos are done (8 by earlier runs)" in result.output
    (row,) = (row for row in rows(tmp_path / "out") if r"\udcff.png" in row["image"])
    assert row["error"] is None


def test_error_without_arrow_names_the_extra(run, photos, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.fs", None)

    assert 'pip install "camserve[data]"' in run(photos).output


def test_killed_and_resumed_job_has_each_of_50_photos_once(address, photos, tmp_path):
    for path in photos.rglob("*.*"):
        path.unlink()
    for number in range(50):
        (photos / f"{number}.png").write_bytes(photo_file(number))
    out = tmp_path / "out"
    arguments = ["explain", photos, "-o", out, "--resume", "--model", "tiny", "--server", address]

    killed = fork_server.run(KILLED + CAMSERVE, *arguments)
    half = len(rows(out))
    ended = fork_server.run(CAMSERVE, *arguments)

    assert (killed.returncode, ended.returncode) == (-signal.SIGKILL, 0)
    assert 0 < half < 50
    assert f"50 photos are done ({half} by earlier runs)" in ended.stdout
    assert Counter(row["image"] for row in rows(out)) == dict.fromkeys((f"{photos}/{n}.png" for n in range(50)), 1)
    assert {row["overlay"] for row in rows(out)} == {str(path.relative_to(out)) for path in out.rglob("*.jpg")}
    assert not [path for path in out.rglob(".*") if path.name != ".lock"]  # no temporary files remain


class Cut(BaseException):
    """Planted interruption of a job, which no handler of Exception catches."""


@pytest.mark.parametrize(
    "at", [pytest.param(at, marks=() if at in (0, 1, 4, 9) else pytest.mark.slow) for at in range(12)]
)
def test_next_run_completes_a_job_interrupted_at_any_write(at, address, photos, tmp_path, monkeypatch):
    """The job is interrupted before each of its first twelve renames of a temporary file."""
    store, count, turn = dataset.Store(str(tmp_path / "out")), 0, threading.Lock()
    monkeypatch.setattr(job, "MAX_PART_PHOTOS", 2)
    replace = os.replace

    def cut(path, to):
        nonlocal count
        with turn:
            count += 1
            if count > at:
                raise Cut
        replace(path, to)

    outputs = dataset.Outputs("jpeg", heatmaps=False, receipts=False)
    spec = dataset.JobSpec({"model": "tiny", "heatmap": False}, outputs)

    def run_job(client):
        dataset.open_job(store, spec, client.model("tiny"))
        return dataset.run(client, dataset.Photos([str(photos)]), store, spec)

    with camserve.Client(address) as client:
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", cut)
            with contextlib.suppress(Cut):
                run_job(client)
        tally = run_job(client)

    assert tally.total == 7
    assert Counter(row["image"] for row in rows(tmp_path / "out")).most_common(1)[0][1] == 1
    assert len(rows(tmp_path / "out")) == 7
    assert json.loads((tmp_path / "out" / "job.json").read_text())["model"] == "tiny"


def test_job_reads_only_a_few_photos_ahead(tmp_path):
    """The job reads only a few photos ahead of the answers that it has written."""
    read = answered = most = 0

    class Photos:
        def read(self, _key, _limit=None):
            nonlocal read
            read += 1
            return b"x"

    class Client:
        def model(self, _name):
            return type("Model", (), {"digest": ""})

        def explain_many(self, images, **_options):
            nonlocal answered
            for _ in images:
                answered += 1
                yield camserve.InvalidArgument("no", fields={"image": "no"})

    spec = dataset.JobSpec({}, dataset.Outputs("jpeg", heatmaps=False, receipts=False))
    keys = (str(n) for n in range(3000))
    done = 0
    for _ in dataset.explain(Client(), Photos(), keys, dataset.Store(str(tmp_path)), spec):
        done += 1
        most = max(most, read - done)

    assert done == answered == 3000
    assert most <= 3 * job.THREADS


def test_a_finished_photo_takes_16_bytes_of_memory(monkeypatch):
    seen = results.KeySet()
    monkeypatch.setattr("camserve.dataset.results.MERGE_SIZE", 1000)

    assert all(seen.add(str(n)) for n in range(10_500))
    assert not any(seen.add(str(n)) for n in range(10_500))
    assert seen._merged.nbytes == 10_000 * 16


PAGE = (Path(__file__).parents[2] / "docs" / "datasets.md").read_text(encoding="utf-8")


def test_python_of_the_page_runs_as_printed(address, photos, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (code,) = (block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "dataset.run(" in block)

    exec(code.replace("localhost:50051", address), {})  # noqa: S102 -- the page's own code

    assert capsys.readouterr().out == "5 2 0\n"
    assert len(rows(tmp_path / "out-python")) == len(list(photos.rglob("*.[pj]*g")))


def test_page_lists_every_column():
    table = PAGE.partition("| column | content |\n")[2].partition("\n\n")[0]
    documented = [name.strip("` ") for line in table.splitlines() for name in line.split("|")[1].split(",")]

    assert [name for name in documented if name != "---"] == dataset.schema(regions=True).names
