"""Control messages between a supervisor and its servers: JSON objects, one on each line of a socket pair.

The supervisor sends:

- `start`: the settings, the number of the process, and the number of all processes. It is the first message.
- `open`: listen on the port. Every process is warm.
- `stop`: finish accepted calls and end; a second one: end at once.
- `ping`: the event loop answers with `pong`.
- `change`: load or unload a model; answered by a `reply`.
- `metrics`: answered by a `reply` with all metrics.

A server sends:

- `warm`: the models are loaded and warm.
- `serving`: the port is open.
- `failed`: the server ends because of its configuration.
- `change`: load or unload a model in every process; answered by a `reply`.
"""

import json
from typing import Any, TypeAlias

Message: TypeAlias = dict[str, Any]

MAX_LINE = 2**26  # bytes of a message; the metrics of a server with 100 models have about 2 MiB


def encode(kind: str, **values: object) -> bytes:
    """Return a message as a line."""
    return json.dumps({"kind": kind, **values}).encode() + b"\n"


def decode(line: bytes) -> Message:
    """Return the message of a line."""
    message: Message = json.loads(line)
    return message
