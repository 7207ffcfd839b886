"""Decode the images of a folder one by one; print each outcome as JSON.

`mb` is the lowest memory of up to three runs: the first one that takes little ends them.

`decoded` is the number of calls of OpenCV, and `inflated` the number of bytes that were inflated before it.
"""

import json
import sys
import zlib
from collections import Counter
from pathlib import Path

from camserve_server.core.errors import InvalidArgument
from camserve_server.core.limits import Limits
from camserve_server.imaging import images
from camserve_server.imaging.opencv import cv2
from robustness import process_audit

WORK = Counter()
LITTLE, MOST_RUNS = 10, 3  # megabytes; runs of one image


def count_work():
    """Start to count the work of decoding."""
    imdecode, decompressobj = cv2.imdecode, zlib.decompressobj

    class Inflating:
        def __init__(self):
            self._stream = decompressobj()

        def decompress(self, *given):
            inflated = self._stream.decompress(*given)
            WORK["inflated"] += len(inflated)
            return inflated

        unconsumed_tail = property(lambda self: self._stream.unconsumed_tail)

    def counting_imdecode(*given):
        WORK["decoded"] += 1
        return imdecode(*given)

    cv2.imdecode, zlib.decompressobj = counting_imdecode, Inflating


def outcome(data):
    """Decode an image; return its shape or its refusal, and the work and the memory that it took."""
    WORK.clear()
    with process_audit.measure_memory(result := {}):
        try:
            result["message"] = str(images.decode(data, Limits()).shape)
        except InvalidArgument as refusal:
            result |= {"refused": refusal.field, "message": refusal.message}
    return result | {name: WORK[name] for name in ("decoded", "inflated")}


def main(folder):
    count_work()
    outcomes = {}
    for path in sorted(folder.iterdir()):
        first = outcome(path.read_bytes())
        runs = [first["mb"]]
        while runs[-1] > LITTLE and len(runs) < MOST_RUNS:
            runs.append(outcome(path.read_bytes())["mb"])
        outcomes[path.name] = first | {"mb": min(runs)}
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
