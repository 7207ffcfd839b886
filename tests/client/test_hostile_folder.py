"""What whoever prepared a folder can do to the one who explains photos in it, or writes to it: nothing."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

import camserve
from camserve import _local, cli

if TYPE_CHECKING:
    from collections.abc import Callable

PHOTO = b"\xff\xd8\xff\xe0\x01"


@pytest.fixture
def run(server: Any, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    monkeypatch.setenv("CAMSERVE_SERVER", server.address)
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(cli.main, [str(each) for each in args])


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
    """Make each name, and what an older camserve wrote first in its place, a link."""
    for name in names:
        # A part is read before it is written, and one that is none ends the job.
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
def test_a_job_in_a_prepared_folder_leaves_what_is_elsewhere(
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
def test_a_pipe_in_a_jobs_folder_holds_nobody_up(run: Any, photos: Any, tmp_path: Any, name: str) -> None:
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


async def test_plots_tables_and_tiles_replace_a_link_too(client: Any, victim: Any, tmp_path: Any) -> None:
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


def test_a_file_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    _local.write(tmp_path / "a", b"old")
    with pytest.raises(TypeError):
        _local.write(tmp_path / "a", "no bytes")  # type: ignore[arg-type]  # which fails half way

    assert (tmp_path / "a").read_bytes() == b"old"
    assert [each.name for each in tmp_path.iterdir()] == ["a"]


def test_a_file_gets_the_permissions_that_others_get(tmp_path: Path) -> None:
    _local.write(tmp_path / "a", b"")
    (tmp_path / "b").write_bytes(b"")

    assert (tmp_path / "a").stat().st_mode == (tmp_path / "b").stat().st_mode


def test_a_device_or_a_pipe_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path / "pipe", Path(os.devnull)):
        with pytest.raises(OSError, match="no file"):
            _local.write(path, b"x")
