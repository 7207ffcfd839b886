"""A malicious folder cannot harm a caller who explains its photos or writes pictures to it."""

from __future__ import annotations

import os
import subprocess
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import camserve
from camserve import dataset
from camserve._codec.images import image_bytes
from camserve._codec.models import decode_model
from camserve._core.files import (
    MAX_PHOTO_BYTES,
    MAX_TEXT_BYTES,
    NOT_A_PHOTO,
    TooLarge,
    read_photo,
    read_within,
    write_file,
)
from camserve.dataset.job import THREADS, _prefetch
from camserve.v1 import models_pb2

PHOTO = b"\xff\xd8\xff\xe0\x01"


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.jpg").write_bytes(PHOTO)
    return tmp_path / "photos"


@pytest.fixture
def victim(tmp_path: Path) -> Path:
    (tmp_path / "victim").write_text("precious")
    return tmp_path / "victim"


def files(folder: Path) -> list[Path]:
    return sorted(each.relative_to(folder) for each in folder.rglob("*") if each.is_file() or each.is_symlink())


def prepare(folder: Path, names: list[Path], target: Path) -> None:
    """Make a link of each name, and of the temporary names that an older camserve used."""
    for name in names:
        # A part is read before it is written, and an invalid part ends the job.
        whole = [folder / name] if name.suffix != ".parquet" else []
        for each in (*whole, folder / name.parent / f".{name.name}"):
            each.parent.mkdir(parents=True, exist_ok=True)
            each.symlink_to(target)


ALL = ("--heatmaps", "--intensities", "--receipts")


@pytest.mark.parametrize("job", [(), ("--resume",)])
def test_nothing_is_written_through_a_link(run: Any, photos: Any, victim: Any, tmp_path: Any, job: Any) -> None:
    honest = run("explain", photos, "-o", tmp_path / "honest", *ALL, *job)
    names = [name for name in files(tmp_path / "honest") if name.name not in {"job.json", ".lock"}]
    prepare(tmp_path / "out", names, victim)

    done = run("explain", photos, "-o", tmp_path / "out", *ALL, *job)

    assert (honest.exit_code, done.exit_code) == (0, 0), done.output
    assert len(names) == (4 if job else 3)
    assert victim.read_text() == "precious"
    for name in names:
        assert not (tmp_path / "out" / name).is_symlink()
        assert (tmp_path / "out" / name).stat().st_size == (tmp_path / "honest" / name).stat().st_size


@pytest.mark.parametrize("name", [".lock", "job.json", "results", "overlays"])
@pytest.mark.parametrize("there", [True, False])
def test_job_in_a_prepared_folder_changes_nothing_elsewhere(
    run: Any, photos: Any, tmp_path: Any, name: str, there: bool
) -> None:
    elsewhere = tmp_path / "elsewhere"
    if there and name in {".lock", "job.json"}:
        elsewhere.write_text("precious")
    elif there:
        elsewhere.mkdir()
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / name).symlink_to(elsewhere)

    done = run("explain", photos, "-o", tmp_path / "out", "--resume")

    assert done.exit_code in {0, 1}
    assert "Traceback" not in done.output
    assert elsewhere.exists() == there
    assert not elsewhere.is_file() or elsewhere.read_text() == "precious"
    assert not elsewhere.is_dir() or not list(elsewhere.iterdir())


@pytest.mark.parametrize("name", [".lock", "job.json", "results/x.parquet"])
def test_pipe_in_a_jobs_folder_blocks_nothing(run: Any, photos: Any, tmp_path: Any, name: str) -> None:
    pipe = tmp_path / "out" / name
    pipe.parent.mkdir(parents=True)
    os.mkfifo(pipe)

    done = run("explain", photos, "-o", tmp_path / "out", "--resume")

    assert done.exit_code == (0 if "results" in name else 1), done.output


@pytest.mark.parametrize("name", ["why.jpg", "why.npy", "why.receipt.json"])
async def test_save_replaces_a_link(client: Any, victim: Any, tmp_path: Any, name: str) -> None:
    (explanation,) = (await client.explain(b"\x01")).explanations
    (tmp_path / name).symlink_to(victim)

    (explanation.receipt if name.endswith("json") else explanation).save(tmp_path / name)

    assert victim.read_text() == "precious"
    assert not (tmp_path / name).is_symlink()


async def test_plots_tables_and_tiles_replace_a_link(client: Any, victim: Any, tmp_path: Any) -> None:
    inspection = await client.inspect(b"\x01")
    features = await client.features(b"\x01")
    evaluation = await client.evaluate(b"\x01", metrics=["deletion"])
    saved = {"a.txt": inspection, "b.png": inspection, "c.png": features, "d.npy": features, "e.png": evaluation}
    for name, value in saved.items():
        (tmp_path / name).symlink_to(victim)
        value.save(tmp_path / name)

    assert victim.read_text() == "precious"
    assert not any((tmp_path / name).is_symlink() for name in saved)
    np.testing.assert_array_equal(np.load(tmp_path / "d.npy"), features.maps)


def test_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        write_file(tmp_path / "a", "no bytes")  # type: ignore[arg-type]  # which fails after the file was opened

    assert (tmp_path / "a").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_written_file_gets_the_usual_permissions(tmp_path: Path) -> None:
    write_file(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")

    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="not a regular file"):
            write_file(path, b"x")


def test_next_run_deletes_the_unfinished_files_of_a_killed_job(run: Any, photos: Any, tmp_path: Any) -> None:
    unfinished = tmp_path / "out" / f".{'0a' * 8}.tmp"
    unfinished.parent.mkdir()
    unfinished.write_bytes(b"half")

    assert run("explain", photos, "-o", tmp_path / "out", "--resume").exit_code == 0
    assert not unfinished.exists()


SECRET = b"-----BEGIN OPENSSH PRIVATE KEY-----"
KINDS = [b"\xff\xd8\xff\xe0", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBPVP8 ", b"BM" + bytes(12) + b"\x28\0\0\0"]


@pytest.fixture
def sent(server: Any) -> list[bytes]:
    """Record the photos that the server receives."""
    photos: list[bytes] = []

    def keep(stream: Any, _: Any) -> Any:
        for each in stream:
            photos.append(each.request.image)
            yield server.reply(each)

    server.streams = [keep] * 9
    return photos


def table(folder: Path, *cells: str | bytes) -> Path:
    pq.write_table(pa.table({"image": list(cells)}), folder / "table.parquet")
    return folder / "table.parquet"


@pytest.mark.parametrize("job", [(), ("--resume",)])
def test_only_photos_leave_the_machine(run: Any, photos: Any, tmp_path: Any, sent: Any, job: Any) -> None:
    (photos / "key.jpg").write_bytes(SECRET)
    (photos / "text.png").write_bytes(b"BM is how this text begins, and it is no photo")

    done = run("explain", photos, "-o", tmp_path / "out", *job)

    assert sent == [PHOTO]
    assert done.exit_code == (0 if job else 1)
    if job:
        errors = {row["error_message"] for row in pq.read_table(tmp_path / "out" / "results").to_pylist()}
        assert errors == {None, "image: not a JPEG, PNG, WebP, BMP, TIFF or NPY file, so it was not sent"}
    else:
        assert done.stderr.count("not a JPEG, PNG, WebP, BMP, TIFF or NPY file") == 2


@pytest.mark.parametrize("head", KINDS)
def test_formats_that_a_server_accepts_are_sent(tmp_path: Path, head: bytes) -> None:
    (tmp_path / "a").write_bytes(head + b"rest")

    assert image_bytes(tmp_path / "a") == head + b"rest"


async def test_named_file_that_is_not_a_photo_is_not_sent(client: Any, server: Any, tmp_path: Any) -> None:
    (tmp_path / "key").write_bytes(SECRET)

    for targets in ([], [camserve.similarity(tmp_path / "key")]):
        with pytest.raises(camserve.InvalidArgument, match="not a JPEG, PNG, WebP, BMP, TIFF or NPY file"):
            await client.explain(b"\x01" if targets else tmp_path / "key", targets=targets)
    assert server.calls == []


@pytest.mark.parametrize("where", ["{folder}", "{folder}/*.jpg", "{folder}/**/*.jpg"])
@pytest.mark.parametrize("job", [(), ("--resume",)])
def test_link_out_of_a_folder_is_followed_only_if_allowed(
    run: Any, photos: Any, tmp_path: Any, sent: Any, job: Any, where: str
) -> None:
    (tmp_path / "private.jpg").write_bytes(PHOTO + b"private")
    (photos / "link.jpg").symlink_to(tmp_path / "private.jpg")
    (photos / "within.jpg").symlink_to("cat.jpg")
    path = where.format(folder=photos)

    refused = run("explain", path, "-o", tmp_path / "out", *job)
    before = list(sent)
    allowed = run("explain", path, "-o", tmp_path / "out", "--allow-outside", *job)

    assert before == [PHOTO, PHOTO]
    assert refused.exit_code == 1
    assert "link.jpg is a link out of" in refused.output
    assert "use --allow-outside to follow it" in " ".join(refused.output.split())
    assert allowed.exit_code == 0, allowed.output
    assert PHOTO + b"private" in sent


def test_named_link_is_followed(run: Any, photos: Any, tmp_path: Any, sent: Any) -> None:
    (tmp_path / "link.jpg").symlink_to(photos / "cat.jpg")

    for job in ((), ("--resume",)):
        assert run("explain", tmp_path / "link.jpg", "-o", tmp_path / "out", *job).exit_code == 0
    assert sent == [PHOTO, PHOTO]


@pytest.mark.parametrize(
    "named", ["{out}/private.jpg", "../private.jpg", "file://{out}/private.jpg", "{in}/../private.jpg"]
)
def test_table_may_name_only_files_in_its_folder(run: Any, photos: Any, tmp_path: Any, sent: Any, named: str) -> None:
    (tmp_path / "private.jpg").write_bytes(PHOTO + b"private")
    path = table(photos, "cat.jpg", named.format(**{"out": tmp_path, "in": photos}))

    refused = run("explain", path, "-o", tmp_path / "out", "--resume")
    before = list(sent)
    allowed = run("explain", path, "-o", tmp_path / "out", "--resume", "--allow-outside")

    assert before == []
    assert refused.exit_code == 2
    assert "which is outside of its folder: use --allow-outside to read it" in " ".join(refused.output.split())
    assert allowed.exit_code == 0, allowed.output
    assert sent == [PHOTO, PHOTO + b"private"]


@pytest.mark.parametrize("cell", [PHOTO + b"of another table", SECRET, "{private}"])
def test_table_may_not_name_a_row_of_a_table(run: Any, photos: Any, tmp_path: Any, sent: Any, cell: Any) -> None:
    private = tmp_path / "private.jpg"
    private.write_bytes(PHOTO + b"private")
    cell = cell.format(private=private) if isinstance(cell, str) else cell
    pq.write_table(pa.table({"image": [cell]}), photos / "other.parquet")

    for flags in ((), ("--allow-outside",)):
        done = run("explain", table(photos, "cat.jpg", "other.parquet#0"), "-o", tmp_path / "out", "--resume", *flags)
        assert done.exit_code == 2
        assert "which is a row of a Parquet file" in " ".join(done.output.split())
    assert sent == []


def test_cell_is_sent_only_if_it_is_a_photo(run: Any, photos: Any, tmp_path: Any, sent: Any) -> None:
    done = run("explain", table(photos, PHOTO, SECRET, b""), "-o", tmp_path / "out", "--resume")

    assert done.exit_code == 0, done.output
    assert sent == [PHOTO]
    errors = [row["error_message"] for row in pq.read_table(tmp_path / "out" / "results").to_pylist()]
    assert sum(NOT_A_PHOTO in (error or "") for error in errors) == 1


def test_text_in_a_table_is_never_a_photo(photos: Path) -> None:
    path = table(photos, str(photos / "cat.jpg"))

    with pytest.raises(camserve.InvalidArgument, match="its cell has no bytes"):
        dataset.Photos([str(path)]).read(f"{path}#0")


def test_text_is_not_sent_by_a_job_as_the_file_it_names(photos: Path) -> None:
    class Texts:
        def read(self, key: str, _limit: int = 0) -> str:
            return key

    with ThreadPoolExecutor(1) as pool, pytest.raises(TypeError):
        next(_prefetch(pool, Texts(), [str(photos / "cat.jpg")], deque()))  # type: ignore[arg-type]


def test_folder_named_like_a_scheme_is_no_way_out_of_a_table_s_folder(
    run: Any, photos: Any, tmp_path: Any, sent: Any
) -> None:
    (tmp_path / "private.jpg").write_bytes(PHOTO + b"private")
    path = table(photos, "cat.jpg", f"{photos}/x://{tmp_path}/private.jpg")

    run("explain", path, "-o", tmp_path / "out")
    run("explain", path, "-o", tmp_path / "resumed", "--resume")

    assert set(sent) == {PHOTO}


def test_table_may_not_name_a_link_out_of_its_folder(run: Any, photos: Any, tmp_path: Any, sent: Any) -> None:
    (tmp_path / "private.jpg").write_bytes(PHOTO + b"private")
    (photos / "link.jpg").symlink_to(tmp_path / "private.jpg")
    (photos / "folder").symlink_to(tmp_path)
    path = table(photos, "link.jpg", "folder/private.jpg", str(photos / "cat.jpg"))

    done = run("explain", path, "-o", tmp_path / "out", "--resume")

    assert sent == [PHOTO]
    assert done.exit_code == 1
    assert "2 photos are left for the next run" in done.output


@pytest.mark.parametrize("job", [(), ("--resume",)])
def test_pipes_devices_loops_and_odd_names_do_not_block_a_run(
    run: Any, photos: Any, tmp_path: Any, sent: Any, job: Any
) -> None:
    os.mkfifo(photos / "pipe.jpg")
    (photos / "zero.jpg").symlink_to("/dev/zero")
    (photos / "loop.jpg").symlink_to("loop.jpg")
    (photos / "a").symlink_to(".")
    (photos / "b").symlink_to("..")
    (photos / "gone.jpg").symlink_to("nothing")
    odd = ["new\nline.jpg", "\x1b[2J.jpg", "\u202egpj.jpg", os.fsdecode(b"\xff.jpg"), "-o.jpg", "[bold].jpg"]
    for name in odd:
        (photos / name).write_bytes(PHOTO)

    for path in (photos, f"{photos}/**/*.jpg"):
        out = tmp_path / ("glob" if "*" in str(path) else "folder")
        done = run("explain", path, "-o", out, *job)
        assert done.exit_code == 0, done.output
        assert len(sent) == 1 + len(odd)
        assert not any(each in done.output for each in ("\x1b", "\u202e", "\udcff"))
        sent.clear()


def test_table_may_not_name_a_pipe(photos: Path) -> None:
    os.mkfifo(photos / "pipe.jpg")
    chosen = dataset.Photos([str(table(photos, "pipe.jpg"))])

    with pytest.raises(camserve.InvalidArgument, match="not a regular file"):
        chosen.read(next(iter(chosen)))


@pytest.mark.parametrize("head", [b"", PHOTO])
def test_huge_file_is_not_read(run: Any, photos: Any, tmp_path: Any, sent: Any, head: bytes) -> None:
    (photos / "cat.jpg").write_bytes(head)
    os.truncate(photos / "cat.jpg", 100 << 30)

    for job in ((), ("--resume",)):
        done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", *job)
        assert "Traceback" not in done.output
    assert sent == []


@pytest.mark.parametrize("job", [(), ("--resume",)])
def test_photo_has_a_limit(run: Any, photos: Any, tmp_path: Any, sent: Any, job: Any) -> None:
    os.truncate(photos / "cat.jpg", MAX_PHOTO_BYTES + 1)

    done = run("explain", photos / "cat.jpg", "-o", tmp_path / "out", *job)

    assert sent == []
    assert "1 failed" in done.output if job else "a photo may have 134,217,728" in " ".join(done.output.split())


class Endless:
    """An object without an end in an object store. It counts the bytes that it is asked for."""

    def __init__(self) -> None:
        self.asked = 0

    def read(self, size: int = -1, /) -> bytes:
        assert size >= 0, "all bytes are asked for"
        self.asked += size
        return (PHOTO * size)[:size]


def test_no_more_than_the_limit_is_read_of_a_file_of_unknown_size() -> None:
    source = Endless()

    with pytest.raises(TooLarge):
        read_photo(source, 0, 1000)
    with pytest.raises(OSError, match="more than 1,000 bytes"):
        read_within(source, 1000, "it")
    assert source.asked < 2100


def test_large_photos_of_a_job_are_read_only_in_their_turn() -> None:
    read: list[str] = []

    class Large:
        def read(self, key: str, limit: int = MAX_PHOTO_BYTES) -> bytes:
            if limit < MAX_PHOTO_BYTES:
                raise TooLarge("more than 16 MiB")
            read.append(key)
            return PHOTO

    keys = [str(number) for number in range(3 * THREADS)]
    with ThreadPoolExecutor(THREADS) as pool:
        for number, _ in enumerate(_prefetch(pool, Large(), keys, deque()), 1):  # type: ignore[arg-type]
            assert read == keys[:number]
    assert read == keys


@pytest.mark.parametrize("content", [b"[1]", b"1", b"null", b"[" * 100_000, b"\xff", b"large"])
def test_job_file_that_is_no_job_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "job.json").write_bytes(content)
    if content == b"large":
        os.truncate(tmp_path / "job.json", MAX_TEXT_BYTES + 1)
    spec = dataset.JobSpec({}, dataset.Outputs("jpeg", heatmaps=False, receipts=False))

    with pytest.raises(camserve.FailedPrecondition, match=r"is not a job|cannot read .* it has more than"):
        dataset.open_job(dataset.Store(str(tmp_path)), spec, decode_model(models_pb2.Model(name="m")))
    assert (tmp_path / "job.json").read_bytes()[:5] == content[:5]


@pytest.mark.slow
def test_folders_may_be_nested_as_deep_as_paths_allow(run: Any, photos: Any, tmp_path: Any, sent: Any) -> None:
    deep = f"{photos}/{'d/' * 1100}"
    subprocess.run(["mkdir", "-p", deep], check=True)  # Python's makedirs would recurse too deep
    Path(f"{deep}deep.jpg").write_bytes(PHOTO)
    try:
        for job in ((), ("--resume",)):
            done = run("explain", photos, "-o", tmp_path / "out", *job)
            assert done.exit_code == 0, done.output
    finally:
        subprocess.run(["rm", "-r", photos / "d"], check=True)
    assert sent == [PHOTO] * 4
