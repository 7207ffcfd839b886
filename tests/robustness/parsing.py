"""Parse the messages of a folder one by one; print the bytes that each takes and the estimate, as JSON.

The suffix of a file is the type of its message. The entry `control` is a message that is kept twice.
"""

import json
import sys
from pathlib import Path

from camserve.v1 import evaluate_pb2, explain_pb2
from camserve_server.api.codec.footprint import footprint, shape_of
from camserve_server.api.oip.v2 import inference_pb2
from robustness import process_audit

KINDS = (explain_pb2.ExplainRequest, inference_pb2.ModelInferRequest, evaluate_pb2.EvaluateRequest)
MOST_FIELDS, CONTROL = 2**18, "numbers.ModelInferRequest"


def measure(path, times=1):
    """Parse a message; return the bytes that it took at most, and the estimate."""
    (kind,) = [kind for kind in KINDS if kind.DESCRIPTOR.name == path.suffix[1:]]
    data, cost = path.read_bytes(), {}
    with process_audit.measure_memory(cost):
        messages = [kind.FromString(data) for _ in range(times)]
    assert all(message.ByteSize() for message in messages)
    return int(cost["mb"] * 2**20), footprint(data, shape_of(kind.DESCRIPTOR), MOST_FIELDS)


def main(folder):
    paths = sorted(folder.iterdir())
    for path in {path.suffix: path for path in paths}.values():
        measure(path)  # loads what a first message of a type needs
    results = {path.name: measure(path) for path in paths}
    results["control"] = measure(folder / CONTROL, 2)
    sys.stdout.write(json.dumps(results) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
