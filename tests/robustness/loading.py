"""Load the weight files of a folder into a small model one by one; print each outcome and its memory as JSON."""

import json
import sys
from pathlib import Path

import torch

from camserve_server import models
from robustness import process_audit

MODEL = "torchvision:squeezenet1_1?weights={}&size=64&classes=7"


def load_with_camserve(path, sha256):
    text = MODEL.format(path) + (f"&sha256={sha256}" if sha256 else "")
    return models.load(models.parse(text)).info.digest


def load_with_torch(path, _):
    """Load a file as a server would that relied on torch."""
    return str(type(torch.load(path, weights_only=path.suffix != ".pickle")))


def outcome(audit, load, path, sha256=""):
    result = {"error": "", "message": ""}
    with audit.recording(), process_audit.measure_memory(result):
        try:
            result["message"] = load(path, sha256)
        except Exception as error:  # noqa: BLE001 -- any error is reported
            result |= {"error": type(error).__name__, "message": str(error)}
    opened = [path for event, path in audit.events if event == "open"]
    return result | {"opened": opened, "others": [entry for entry in audit.events if entry[0] != "open"]}


def main(folder):
    torch.set_num_threads(1)
    b"a".decode("cp437")  # imports the codec of names in archives before the audit records
    audit, sound = process_audit.AuditLog(), folder / "sound.pth"
    pins = json.loads((folder / "pins.json").read_text())
    outcomes = {name: outcome(audit, load_with_camserve, sound) for name in ("warm-up", "sound")}
    for path in sorted((folder / "hostile").iterdir()):
        outcomes[path.name] = outcome(audit, load_with_camserve, path, pins.get(path.name, ""))
    for path in sorted((folder / "control").iterdir()):
        outcomes[path.name] = outcome(audit, load_with_torch, path)
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
