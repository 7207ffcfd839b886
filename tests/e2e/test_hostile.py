"""Invalid input to a running server: every call is answered, and no resources are leaked."""

import io
import random
import threading
from pathlib import Path

import pytest
from PIL import Image

import camserve
from support import PHOTOS, give_back_memory, serving, wait_until

MIB = 2**20


def resident():
    """Return the resident memory of this process in bytes."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


class Peak:
    """Measures the peak of resident memory inside the block."""

    def __enter__(self):
        give_back_memory()
        self.start, self.high, self._stop = resident(), 0, threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self):
        while not self._stop.wait(0.002):
            self.high = max(self.high, resident())

    def __exit__(self, *_):
        self._stop.set()
        self._thread.join()

    @property
    def grown(self):
        return self.high - self.start


def invalid_photos(count):
    """Yield photos truncated at random or with flipped bits, an empty one, text, and a bomb."""
    chance = random.Random(11)
    small = Image.open(PHOTOS["chelsea"]).resize((225, 150))
    valid = []
    for form in ("JPEG", "PNG", "WEBP", "BMP"):
        packed = io.BytesIO()
        small.save(packed, form)
        valid.append(packed.getvalue())
    bomb = io.BytesIO()
    Image.new("1", (20_000, 20_000)).save(bomb, "PNG")
    yield from (b"", b"hello, I am a cat", bomb.getvalue())
    for number in range(count - 3):
        data = bytearray(valid[number % 4])
        if number % 8 < 4:
            del data[chance.randrange(1, len(data)) :]
        else:
            for _ in range(chance.randint(1, 20)):
                data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
        yield bytes(data)


@pytest.fixture(scope="module")
def client():
    small = "small=torchvision:mobilenet_v3_small?weights=none&size=64"
    with serving(models=(small,), threads=1) as served, camserve.Client(served.address, retries=0) as client:
        for path in PHOTOS.values():
            client.explain(path)
        yield client


def answer(client, data):
    """Return the status of a request."""
    try:
        client.explain(data)
    except camserve.InvalidArgument:
        return "INVALID_ARGUMENT"
    return "OK"


def test_300_invalid_images_are_answered_in_little_memory(client):
    images = list(invalid_photos(300))
    with Peak() as memory:
        outcomes = [answer(client, data) for data in images]

    assert len(outcomes) == 300
    assert outcomes[:3] == ["INVALID_ARGUMENT"] * 3
    assert memory.grown <= 100 * MIB
    assert client.explain(PHOTOS["chelsea"]).explanations[0].verdict in set(camserve.Verdict)


def test_memory_of_a_bomb_is_detected():
    """Control of the check above: as much memory as a bomb would take."""
    with Peak() as memory:
        data = bytearray(200 * MIB)
        data[::4096] = b"x" * len(data[::4096])
        wait_until(lambda: memory.grown > 100 * MIB)

    assert memory.grown > 100 * MIB
