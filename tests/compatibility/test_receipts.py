"""Receipts of all recorded releases can be read and replayed."""

import json

import pytest
from click.testing import CliRunner

import camserve
from camserve.cli import main
from compatibility import comparing, storage

pytestmark = pytest.mark.slow
PHOTO = storage.FOLDER / "photo.png"
RECEIPTS = {path.name.removesuffix(".receipt.json"): path for path in sorted(storage.FOLDER.glob("*.receipt.json"))}


@pytest.mark.parametrize("name", RECEIPTS)
def test_recorded_receipt_is_read_and_written_as_it_was(name):
    written = json.loads(camserve.Receipt.load(RECEIPTS[name]).to_json())

    assert comparing.lost(json.loads(RECEIPTS[name].read_text(encoding="utf-8")), written) == []


@pytest.mark.parametrize("name", RECEIPTS)
def test_recorded_receipt_is_replayed_to_the_same_map(name, address):
    with camserve.Client(address) as client:
        replay = client.replay(camserve.Receipt.load(RECEIPTS[name]), PHOTO)

    assert replay.same, replay.differences
    assert replay.gap <= comparing.CLOSE


def test_command_replays_a_recorded_receipt(address):
    result = CliRunner().invoke(main, ["replay", str(RECEIPTS["gradcam-0.1.0"]), str(PHOTO), "--server", address])

    assert result.exit_code == 0, result.output
