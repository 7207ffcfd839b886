"""Errors of a model's own code, in words for its user: what was raised, and in which module."""

import re
import traceback
from pathlib import Path

import torch
from torch import nn

MAX_LENGTH = 200  # characters of the model's own message

_OURS = str(Path(__file__).parents[1])
_NETWORKS = str(Path(_OURS, "models", "efficientnet_lite.py"))  # the code of a network, too
_FOLDERS = re.compile(r"(?<![\w.])(?:[A-Za-z]:)?(?:[/\\][^\s/\\'\":]+)+[/\\]")


def place_of(error: Exception, model: nn.Module) -> str:
    """Return where a model's own code raised an error; empty for an error of our code.

    Args:
        error: the error, with its traceback.
        model: the model that ran.
    """
    call = nn.Module._call_impl.__code__  # noqa: SLF001 -- torch has no public name for it
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    last = frames[-1].f_code.co_filename if frames else ""
    names = {id(module): name for name, module in model.named_modules()}
    modules = (frame.f_locals.get("self") for frame in frames if frame.f_code is call)
    running = [names[id(module)] for module in modules if id(module) in names]
    if running and (not last.startswith(_OURS) or last == _NETWORKS):
        return words_of(model, running[-1])
    autograd = str(Path(torch.__file__).parent / "autograd")
    is_autograd = any(frame.f_code.co_filename.startswith(autograd) for frame in frames)
    return "the gradient of its score" if is_autograd else ""


def words_of(model: nn.Module, name: str) -> str:
    """Return the name of a module with its class; the name of the model itself is empty."""
    kind = type(model.get_submodule(name)).__name__
    return f"its module {name} ({kind})" if name else f"its own forward ({kind})"


def message_of(error: Exception) -> str:
    """Return the message of an error in one line, without the folders of files."""
    line = " ".join(_FOLDERS.sub("", str(error)).split())
    line = "".join(letter for letter in line if letter.isprintable())
    return (line if len(line) <= MAX_LENGTH else line[:MAX_LENGTH] + "…") or "an error without a message"
