"""Invalid input to a running server: every call is answered, and no resources are leaked."""

import functools
import io
import random

import pytest
from PIL import Image

import camserve
import fork_server
from robustness.memory_loads import Meter
from server_process import server_process
from support import PHOTOS, wait_until

MIB = 2**20
MAX_GROWTH = 100 * MIB
TAKES_A_BOMB = """
import signal
import sys
from pathlib import Path

sys.path.insert(0, sys.argv[2])
from support import wait_until

folder = Path(sys.argv[1])
(folder / "started").touch()
wait_until((folder / "go").exists)
data = bytearray(200 * 2**20)
data[::4096] = b"x" * len(data[::4096])
(folder / "done").touch()
signal.pause()
"""


@functools.cache
def bomb():
    """Return a small file of 400 million pixels."""
    packed = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(packed, "PNG")
    return packed.getvalue()


def invalid_photos(count):
    """Yield photos truncated at random or with flipped bits, an empty one, text, and a bomb."""
    chance = random.Random(11)
    small = Image.open(PHOTOS["chelsea"]).resize((225, 150))
    valid = []
    for form in ("JPEG", "PNG", "WEBP", "BMP"):
        packed = io.BytesIO()
        small.save(packed, form)
        valid.append(packed.getvalue())
    yield from (b"", b"hello, I am a cat", bomb())
    for number in range(count - 3):
        data = bytearray(valid[number % 4])
        if number % 8 < 4:
            del data[chance.randrange(1, len(data)) :]
        else:
            for _ in range(chance.randint(1, 20)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield bytes(data)


@pytest.fixture(scope="module")
def server():
    """A server in a process of its own that has answered a request for each photo, and some invalid ones."""
    small = "small=timm:test_resnet?weights=none&size=64"
    with server_process((small,), "--threads", "1", forked=True) as server:
        with camserve.Client(server.address, retries=0) as client:
            for photo in (*PHOTOS.values(), *invalid_photos(10)):
                answer(client, photo)
        yield server


def answer(client, data):
    """Return the status of a request."""
    try:
        client.explain(data)
    except camserve.InvalidArgument:
        return "INVALID_ARGUMENT"
    return "OK"


@pytest.mark.parametrize("count", [30, pytest.param(150, marks=pytest.mark.slow)])
def test_invalid_images_are_answered_in_little_memory(server, count):
    meter = Meter(server.pid)
    with camserve.Client(server.address, retries=0, timeout=600) as client:
        meter.start()
        outcomes = [answer(client, data) for data in invalid_photos(count)]

        assert len(outcomes) == count
        assert outcomes[:3] == ["INVALID_ARGUMENT"] * 3
        assert meter.grown() <= MAX_GROWTH
        assert client.explain(PHOTOS["chelsea"]).explanations[0].verdict in set(camserve.Verdict)


def test_memory_of_a_bomb_is_detected(tmp_path):
    """Control of the check above: as much memory as a bomb would take."""
    with fork_server.start(TAKES_A_BOMB, tmp_path, fork_server.TESTS) as process:
        wait_until((tmp_path / "started").exists)
        meter = Meter(process.pid)
        meter.start()
        (tmp_path / "go").touch()
        wait_until((tmp_path / "done").exists)
        grown = meter.grown()
        process.kill()

    assert grown > MAX_GROWTH
