"""The files in records/, which describe the release after which `record.py` was last run."""

import json
import lzma
from pathlib import Path

FOLDER = Path(__file__).parent / "records"


def read(name):
    """Return a record, which may be compressed."""
    packed = FOLDER / f"{name}.json.xz"
    if packed.exists():
        return json.loads(lzma.decompress(packed.read_bytes()))
    return json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))


def write(name, values):
    """Write a record for people to compare: sorted, with one entry per line."""
    text = json.dumps(values, indent=1, ensure_ascii=False, sort_keys=True)
    (FOLDER / f"{name}.json").write_text(text + "\n", encoding="utf-8")


def pack(name, values):
    """Write a compressed record, in the order of its entries."""
    text = json.dumps(values, ensure_ascii=False)
    (FOLDER / f"{name}.json.xz").write_bytes(lzma.compress(text.encode(), preset=9))
