"""Decode one image after the other; print the outcome of each, and its lowest cost of three runs.

`decoded` counts the calls of OpenCV, and `inflated` the bytes that were inflated before it.
"""

import json
import sys
import zlib
from collections import Counter
from pathlib import Path

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from robustness import watched

DONE = Counter()


def counted():
    """Start to count the work of decoding."""
    imdecode, decompressobj = images.cv2.imdecode, zlib.decompressobj

    class Inflating:
        def __init__(self):
            self._stream = decompressobj()

        def decompress(self, *given):
            inflated = self._stream.decompress(*given)
            DONE["inflated"] += len(inflated)
            return inflated

        unconsumed_tail = property(lambda self: self._stream.unconsumed_tail)

    def noted(*given):
        DONE["decoded"] += 1
        return imdecode(*given)

    images.cv2.imdecode, zlib.decompressobj = noted, Inflating


def outcome(data):
    DONE.clear()
    with watched.measured(found := {}):
        try:
            found["words"] = str(images.decode(data, Limits()).shape)
        except InvalidArgument as refusal:
            found |= {"refused": refusal.field, "words": refusal.message}
    return found | {what: DONE[what] for what in ("decoded", "inflated")}


def main(folder):
    counted()
    outcomes = {}
    for path in sorted(folder.iterdir()):
        tries = [outcome(path.read_bytes()) for _ in range(3)]
        outcomes[path.name] = tries[0] | {"mb": min(one["mb"] for one in tries)}
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
