"""Loads one file of weights after the other into a small model; says of each what came of it, and what it cost."""

import json
import sys
from pathlib import Path

import torch

from camserve_server import models
from robustness import watched

MODEL = "torchvision:squeezenet1_1?weights={}&size=64&classes=7"


def through_camserve(path, sha256):
    text = MODEL.format(path) + (f"&sha256={sha256}" if sha256 else "")
    return models.load(models.parse(text)).info.digest


def through_torch(path, _):
    """What this server would do if it relied on torch."""
    return str(type(torch.load(path, weights_only=path.suffix != ".pickle")))


def outcome(ears, load, path, sha256=""):
    found = {"error": "", "words": ""}
    with ears.listen(), watched.measured(found):
        try:
            found["words"] = load(path, sha256)
        except Exception as error:  # noqa: BLE001 -- whichever it is, is what is reported
            found |= {"error": type(error).__name__, "words": str(error)}
    opened = [what for event, what in ears.heard if event == "open"]
    return found | {"opened": opened, "else": [heard for heard in ears.heard if heard[0] != "open"]}


def main(folder):
    torch.set_num_threads(1)
    b"a".decode("cp437")  # of the names in archives; to be imported before anybody listens
    ears, sound = watched.Ears(), folder / "sound.pth"
    pins = json.loads((folder / "pins.json").read_text())
    outcomes = {name: outcome(ears, through_camserve, sound) for name in ("warming up", "sound")}
    for path in sorted((folder / "hostile").iterdir()):
        outcomes[path.name] = outcome(ears, through_camserve, path, pins.get(path.name, ""))
    for path in sorted((folder / "control").iterdir()):
        outcomes[path.name] = outcome(ears, through_torch, path)
    sys.stdout.write(json.dumps(outcomes) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
