"""A custom network with labels, in a file of 20 lines, is served by one entry of the configuration."""

import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

import camserve
import camserve_server
from camserve_server import models
from camserve_server.core.errors import ConfigError

EXAMPLES = Path(__file__).parents[2] / "examples"
PAGE = (EXAMPLES.parent / "docs/models.md").read_text(encoding="utf-8")
FILE = (EXAMPLES / "my_network.py").read_text(encoding="utf-8")


def test_models_page_prints_the_example_of_at_most_20_lines():
    printed = re.search(r"```python\n(\"\"\"A custom network.*?)```", PAGE, re.DOTALL).group(1)

    assert printed == FILE
    assert len(FILE.splitlines()) <= 20


@pytest.fixture
def served(monkeypatch):
    entry = re.search(r"--model (colours=my_network:build)\b", FILE).group(1)
    monkeypatch.syspath_prepend(str(EXAMPLES))
    with camserve_server.running(entry) as address, camserve.Client(address) as client:
        yield client


@pytest.mark.parametrize(("colour", "channel"), [("red", 0), ("green", 1), ("blue", 2)])
def test_label_and_map_of_a_custom_network_are_right(served, colour, channel):
    photo = np.full((64, 64, 3), 60, np.uint8)
    photo[30:54, 6:30, channel] = 250
    result = served.explain(photo, heatmap=True)
    explanation = result.explanations[0]
    top, left = np.unravel_index(explanation.heatmap.argmax(), explanation.heatmap.shape)

    assert result.predictions[0].label == colour == explanation.target.label
    assert served.model("colours").labels == ("red", "green", "blue")
    assert 30 <= top < 54
    assert 6 <= left < 30


def test_torchscript_is_a_module_of_a_network_and_no_file_of_weights(tmp_path, monkeypatch):
    with warnings.catch_warnings(action="ignore", category=FutureWarning):  # TorchScript is deprecated
        torch.jit.trace(torch.nn.Conv2d(3, 2, 3), torch.zeros(1, 3, 8, 8)).save(tmp_path / "net.pt")
    (tmp_path / "scripted_net.py").write_text(
        "import torch, warnings\n"
        "warnings.simplefilter('ignore')\n"
        f"def build():\n    return torch.nn.Sequential(torch.jit.load({str(tmp_path / 'net.pt')!r}))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))

    assert models.load(models.parse("scripted_net:build?size=32")).info.default_layer == "0"
    with pytest.raises(ConfigError, match="it is a TorchScript archive, which is a program"):
        models.load(models.parse(f"torchvision:squeezenet1_1?weights={tmp_path / 'net.pt'}"))
