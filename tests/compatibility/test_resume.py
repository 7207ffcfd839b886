"""This tree completes a job that `camserve-server explain --resume` of the recorded release started."""

import sys
from collections import Counter

import pytest
from click.testing import CliRunner

import camserve_server
import fork_server
from camserve.cli import main
from compatibility import servers, storage

pytestmark = pytest.mark.slow
FLAGS = ("explain", "photos", "-o", "out", "--resume")


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """The folder of the recorded job, moved here."""
    servers.unpack(storage.FOLDER / "job.zip", tmp_path)
    servers.move(tmp_path, servers.RECORDED, str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("job_net", None)


def check_completed(folder, before):
    """Check that every photo has a result, that earlier results are unchanged, and that only the rest was computed."""
    finished = {servers.red_of(row["image"]) for row in before}
    computed = {int(line) for line in (folder / "computed.txt").read_text().split()}
    after = servers.rows(folder)

    assert 0 < len(finished) < len(servers.REDS)
    assert Counter(servers.red_of(row["image"]) for row in after) == dict.fromkeys(servers.REDS, 1)
    assert [row for row in after if servers.red_of(row["image"]) in finished] == before
    assert computed >= set(servers.REDS) - finished
    assert not computed & finished
    assert all((folder / "out" / row["overlay"]).is_file() for row in after)


def test_recorded_job_is_completed_without_repeating_photos(folder):
    before = servers.rows(folder)
    with camserve_server.running(servers.JOB_MODEL, **servers.PLAIN) as address:
        (folder / "computed.txt").unlink()  # loading the model has run it
        result = CliRunner().invoke(main, [*FLAGS, "--server", address])

    assert result.exit_code == 0, result.output
    check_completed(folder, before)


def test_servers_own_command_completes_a_recorded_job(folder):
    before = servers.rows(folder)
    result = fork_server.run(fork_server.SERVER, *FLAGS, "--model", servers.JOB_MODEL, "--device", "cpu")

    assert result.returncode == 0, result.stderr
    check_completed(folder, before)
