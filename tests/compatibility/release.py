"""Results of the calls in `calls.py`, to compare the client of one release with that of another.

    python -m compatibility.release ADDRESS

It imports nothing of the server and only public names of the client, so that it runs with the client of any release.
"""

import base64
import dataclasses
import enum
import json
import sys
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import camserve
from compatibility import calls, comparing, storage

LEFT_OUT = comparing.IGNORED | comparing.PROSE


def plain(value):
    """Return a result as JSON: arrays as lists, pictures as base64, errors by class, code and fields."""
    for kinds, describe in _DESCRIBED:
        if isinstance(value, kinds):
            return describe(value)
    if dataclasses.is_dataclass(value):
        names = (each.name for each in dataclasses.fields(value) if not each.name.startswith("_"))
        return plain({name: getattr(value, name) for name in names})
    return value if isinstance(value, str | int | float | None) else type(value).__name__


_DESCRIBED = (
    (camserve.CamserveError, lambda error: [type(error).__name__, error.code.name, sorted(error.fields)]),
    (enum.Enum, lambda member: member.value),
    (Mapping, lambda mapping: {str(key): plain(item) for key, item in mapping.items() if key not in LEFT_OUT}),
    (np.ndarray, np.ndarray.tolist),
    ((list, tuple), lambda values: [plain(item) for item in values]),
    (bytes, lambda data: {"base64": base64.b64encode(data).decode()}),
)


def outcome(client, function, args, options):
    """Make a call; return its result or error as JSON."""
    try:
        result = getattr(client, function)(*args, **options)
        return plain(list(result) if function == "explain_many" else result)
    except camserve.CamserveError as error:
        return plain(error)


def outcomes(address):
    """Return the outcome of every recorded call, by name, and the folder that the client was imported from."""
    recorded = storage.read("calls")["methods"]["value"]
    known = {method["name"]: {each["name"] for each in method["parameters"]} for method in recorded}
    with camserve.Client(address, retries=0) as client:
        made = {name: outcome(client, *call) for name, call in calls.everything(known).items()}
    return {"client": str(Path(camserve.__file__).parents[1]), "calls": made}


def differences(then, now, path=""):
    """Return a line for each value of the older client that the newer one lost or changed by more than rounding."""
    if isinstance(then, dict) and isinstance(now, dict):
        if then.keys() == {"base64"} == now.keys():
            pictures = (base64.b64decode(each["base64"]) for each in (then, now))
            return [] if comparing.same_picture(*pictures) else [f"{path}: another picture"]
        gone = [f"{path}.{key}: gone" for key in then if key not in now]
        return gone + [line for key in then if key in now for line in differences(then[key], now[key], f"{path}.{key}")]
    if isinstance(then, list) and isinstance(now, list) and len(then) == len(now):
        pairs = enumerate(zip(then, now, strict=True))
        return [line for at, pair in pairs for line in differences(*pair, f"{path}[{at}]")]
    numbers = all(isinstance(each, int | float) for each in (then, now))
    same = comparing.close_number(then, now) if numbers else then == now
    return [] if same else [f"{path}: {now!r}, and it was {then!r}"]


if __name__ == "__main__":
    json.dump(outcomes(sys.argv[1]), sys.stdout)
