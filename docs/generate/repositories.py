"""Write docs/repositories.md: explain networks of other people's repositories, and compare the maps with autograd's.

    python docs/generate/repositories.py FOLDER               # all networks of repositories.toml
    python docs/generate/repositories.py FOLDER timm resnet   # only those whose names contain a word; others stay

The folder has a checkout of each repository, as "owner/name", and the packages that `repositories.toml` names in the
folder "packages" (pip install --no-deps --target). None of their code is part of camserve. The results of the last run
are kept there too.

Each network is examined in a process of its own: many repositories have a package called "models". After writing the
page, the script fails if a map is wrong, or if an error is an internal one.
"""

import argparse
import copy
import importlib
import inspect
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree  # flattens every output structure that torch knows

import camserve
from camserve_server import Explainer
from camserve_server.core.errors import ConfigError

HERE = Path(__file__).parent
LIST, PAGE = HERE / "repositories.toml", HERE.parent / "repositories.md"
FACTOR, FLOOR = 4, 1e-6
"""A map may be `FACTOR` times as far from float64 as plain float32 is, plus `FLOOR`, as shares of its largest value."""
ACCELERATED = 8e-6
"""How far the accelerated copy of a model may move a map, as a share of its maximum: see docs/acceleration.md."""
MINUTES = 10
OPTIONAL = "it works without an option, too"

TEXT = """\
# Networks of other repositories

This page is for you if your network comes from someone else's repository, or is written like one. {count} networks of
{repositories} repositories were explained as they stand, with random weights: {plain} need no option, {option} need one
or more, and {refused} are refused with a reason.

- *Options* are the arguments of [`Explainer`](explainer.md) besides the network. Those in brackets are not necessary:
  they say what the network is for.
- *Layer* is the default layer, at which Grad-CAM is computed.
- *Grad-CAM* and *saliency* are the largest differences of these maps from those of the plain network in float64, as
  shares of the map's largest value. The latter are computed by `torch.autograd.grad` and the formulas of the papers.
  "–" means that there is no such map.

Each difference is at most four times as large as the plain network's own in float32, plus one millionth.{rounding}
Where it is large, that of the plain network is large, too: rounding decides there which value a max pooling takes, or
on which side of zero a ReLU is.

Written by `docs/generate/repositories.py`, whose list names the constructor of each network (torch {torch}).
"""


@dataclass(frozen=True, slots=True)
class Entry:
    """A network of a repository.

    Attributes:
        repository: owner and name.
        version: the commit, or the package and its version.
        paths: folders of the checkout that are on the path of imports.
        name: its name in the table.
        make: a module, and an expression in its namespace, such as "models.lenet:LeNet()".
        options: arguments of `Explainer`.
        score: how its own output becomes the score: "logit" or "log" of a probability, the index of one of several
            tensors, or "".
    """

    repository: str
    version: str
    name: str
    make: str
    paths: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    score: str = ""

    @property
    def key(self) -> str:
        """The name in results."""
        return f"{self.repository} {self.name}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """A row of the table.

    Attributes:
        task: the task that was found.
        layer: the default layer.
        cam: the deviation of Grad-CAM; None without a layer.
        saliency: the deviation of the saliency map; None without a gradient.
        excess: the largest deviation as a share of what plain float32 allows.
        refused: the reason of a refusal.
        fault: what is wrong, if anything is.
        hint: the reason of a refusal without options, if there are options.
    """

    task: str = ""
    layer: str = ""
    cam: float | None = None
    saliency: float | None = None
    excess: float = 0.0
    refused: str = ""
    fault: str = ""
    hint: str = ""


def entries() -> Iterator[Entry]:
    """Yield the networks of the list."""
    for each in tomllib.loads(LIST.read_text(encoding="utf-8"))["repository"]:
        common = {"repository": each["name"], "version": each["version"], "paths": tuple(each.get("paths", ()))}
        for name, given in each["networks"].items():
            own = {"make": given} if isinstance(given, str) else given
            options = {**each.get("options", {}), **own.get("options", {})}
            yield Entry(**common, name=name, make=own["make"], options=options, score=own.get("score", ""))


def build(entry: Entry, folder: Path) -> nn.Module:
    """Make a network with random weights, none of them zero, and the statistics of a training."""
    checkout = folder / entry.repository
    sys.path[:0] = [*(str(checkout / path) for path in entry.paths or (".",)), str(folder / "packages")]
    module, _, expression = entry.make.partition(":")
    torch.manual_seed(0)
    network: nn.Module = eval(expression, vars(importlib.import_module(module)))  # noqa: S307 -- of our own list
    with torch.no_grad():
        for parameter in network.parameters():
            if parameter.is_floating_point() and not parameter.any():
                parameter.normal_(0, 0.02)
    return network.eval()


def photo_for(model: camserve.Model) -> Tensor:
    """Return a photo as a network's input [C,H,W]."""
    from skimage import data, transform  # noqa: PLC0415 -- takes seconds

    size, channels = (model.input_height, model.input_width), model.input_channels
    photo = transform.resize(data.astronaut(), size, anti_aliasing=True).astype(np.float32)
    tensor = torch.from_numpy(photo).permute(2, 0, 1) * 4 - 2
    return tensor[torch.arange(channels) % 3]  # more channels than colours: the colours again


def examine(entry: Entry, folder: Path) -> Outcome:
    """Explain a network, and compare the maps with those of the plain network."""
    network, hint = build(entry, folder), ""
    if entry.options:
        try:
            Explainer(copied(network)).close()
            hint = OPTIONAL
        except ConfigError as error:
            hint = str(error)
    try:
        with Explainer(copied(network), **read_options(entry)) as explainer:
            return compare(entry, network, explainer, hint)
    except ConfigError as error:
        return Outcome(refused=str(error), hint=hint)


def read_options(entry: Entry) -> dict[str, Any]:
    """Return the options; one that is a lambda is evaluated."""
    return {
        name: eval(value) if isinstance(value, str) and value.startswith("lambda") else _tuple(value)  # noqa: S307 -- ours
        for name, value in entry.options.items()
    }


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def copied(network: nn.Module) -> nn.Module:
    """Return a copy of a network, or itself if it cannot be copied."""
    try:
        with torch.no_grad():  # TorchScript copies its parameters by operations on a graph
            return copy.deepcopy(network)
    except Exception:  # noqa: BLE001 -- a network may raise anything
        return network


def compare(entry: Entry, network: nn.Module, explainer: Explainer, hint: str) -> Outcome:
    """Explain a photo by Grad-CAM and saliency, and compare both with autograd's."""
    model, found, faults, errors = explainer.model(), dict[str, Any](), list[str](), list[str]()
    photo = photo_for(model)
    targets = {"targets": [camserve.similarity(photo.flip(2))]} if model.task == "embed" else {}
    for method in ("gradcam", "saliency") if model.default_layer else ("saliency",):
        try:
            # A detector's photo may have no object.
            found[method] = explainer.explain(photo, methods=method, overlay=None, heatmap=True, **targets).explanations
        except camserve.CamserveError as error:
            (faults if isinstance(error, camserve.Internal) else errors).append(f"{method}: {error}")
    outcome = Outcome(task=model.task, layer=model.default_layer, hint=hint, fault="; ".join(faults))
    first = {method: each[0] for method, each in found.items() if each}
    if not first:
        return replace(outcome, refused="; ".join(errors) or "no object in the photo")
    plain, exact = (truth(entry, each, photo, model, first) for each in (copied(network), copied(network).double()))
    deviations = {method: gap(each.heatmap, exact[method]) for method, each in first.items()}
    allowed = {method: FACTOR * gap(plain[method], exact[method]) + FLOOR for method in first}
    excess = max(deviations[method] / allowed[method] for method in first)
    return replace(outcome, cam=deviations.get("gradcam"), saliency=deviations.get("saliency"), excess=excess)


def truth(
    entry: Entry,
    network: nn.Module,
    photo: Tensor,
    model: camserve.Model,
    first: Mapping[str, camserve.Explanation],
) -> dict[str, np.ndarray]:
    """Compute Grad-CAM [h,w] and saliency [H,W] by hooks and autograd, in the precision of the network."""
    dtype = next((each.dtype for each in network.parameters() if each.is_floating_point()), torch.float32)
    image = photo.to(dtype)[None].requires_grad_()
    caught: list[Tensor] = []

    def keep(_module: nn.Module, _args: object, output: object) -> object:
        leaves, structure = pytree.tree_flatten(output)
        index = next(i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.is_floating_point())
        caught.append(leaves[index])
        leaves[index] = leaves[index].clone()  # a later module may change it in place
        return pytree.tree_unflatten(leaves, structure)

    layer = network.get_submodule(model.default_layer)
    with layer.register_forward_hook(keep) if model.default_layer else nullcontext():
        output = own_output(entry, network(image))
    index = next(iter(first.values())).target.class_index
    if model.task == "embed":
        reference = own_output(entry, network(image.detach().flip(3)))
        score = torch.cosine_similarity(output.flatten(), reference.detach().flatten(), dim=0)
    else:
        score = score_of(entry, output, index, model)
    wanted = {"gradcam": caught[-1:], "saliency": [image]}
    gradients = {method: torch.autograd.grad(score, wanted[method], retain_graph=True)[0] for method in first}
    maps = {}
    if "gradcam" in first:
        cells = first["gradcam"].heatmap.shape
        activations, gradient = (to_grid(each.detach(), cells) for each in (caught[-1], gradients["gradcam"]))
        maps["gradcam"] = (activations * gradient.mean((0, 1))).sum(2).double().numpy()
    if "saliency" in first:
        maps["saliency"] = gradients["saliency"][0].abs().amax(0).double().numpy()
    return maps


def own_output(entry: Entry, output: Any) -> Tensor:
    """Return the tensor of a network's output that is explained."""
    key = entry.options.get("output")
    if isinstance(key, str) and key.startswith("lambda"):
        return eval(key)(output)  # noqa: S307 -- of our own list
    if key is not None:
        return output[key] if isinstance(key, int) or isinstance(output, dict) else getattr(output, key)
    if isinstance(output, Tensor):
        return output
    for name in ("logits", "out"):
        named = output.get(name) if isinstance(output, Mapping) else getattr(output, name, None)
        if isinstance(named, Tensor):
            return named
    leaves = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor) and leaf.is_floating_point()]
    return leaves[int(entry.score) if entry.score.isdigit() else 0]


def score_of(entry: Entry, output: Tensor, index: int, model: camserve.Model) -> Tensor:
    """Return the score of a class: a logit, or its mean where the class is predicted."""
    if entry.options.get("task") == "binary":
        output = torch.cat([-output, output], 1) / 2
    if model.task == "segment":
        return output[0, index][output[0].argmax(0) == index].mean()
    value = output.reshape(len(output), -1)[0, index]
    return {"logit": value.logit, "log": value.log}.get(entry.score, lambda: value)()


def to_grid(tensor: Tensor, cells: tuple[int, ...]) -> Tensor:
    """Return a layer's output as [h,w,C]."""
    rows, columns = cells
    if tensor.dim() == 3:  # noqa: PLR2004 -- tokens [B,N,C]
        return tensor[0, tensor.shape[1] - rows * columns :].reshape(rows, columns, -1)
    return tensor[0].permute(1, 2, 0) if tuple(tensor.shape[2:]) == (rows, columns) else tensor[0]


def gap(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference as a share of the largest value."""
    largest = float(np.abs(expected).max())
    difference = float(np.abs(np.asarray(found, np.float64) - expected).max())
    return difference / largest if largest else float(difference > 0)


def in_process(entry: Entry, folder: Path) -> Outcome:
    """Examine a network in a process of its own."""
    command = [sys.executable, __file__, str(folder), "--one", entry.key]
    try:
        done = subprocess.run(  # noqa: S603
            command,
            capture_output=True,
            text=True,
            timeout=60 * MINUTES,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Outcome(fault=f"no end in {MINUTES} minutes")
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        return Outcome(fault=(done.stderr.strip().splitlines() or ["no output"])[-1][:300])
    return Outcome(**json.loads(lines[-1]))


def row(entry: Entry, outcome: Outcome) -> str:
    """Return a row of the table in Markdown."""
    options = ", ".join(f"`{name}={value}`" for name, value in entry.options.items()) or "–"
    options = f"({options})" if outcome.hint == OPTIONAL else options
    if outcome.refused:
        reason = re.sub(r"\s+", " ", re.sub(r" \[request \w+\]", "", outcome.refused)).replace("|", "\\|")
        return f"| {entry.name} | {options} | refused: {reason} |||"
    numbers = ["–" if each is None else f"{each:.0e}" for each in (outcome.cam, outcome.saliency)]
    layer = f"`{outcome.layer}`" if outcome.layer else "–"
    return f"| {entry.name} | {options} | {outcome.task} | {layer} | {' | '.join(numbers)} |"


def write(outcomes: Mapping[str, Outcome]) -> None:
    """Write the page."""
    known = [(entry, outcomes[entry.key]) for entry in entries() if entry.key in outcomes]
    good = [(entry, outcome) for entry, outcome in known if not outcome.refused]
    plain = sum(not entry.options or outcome.hint == OPTIONAL for entry, outcome in good)
    repositories = list(dict.fromkeys((entry.repository, entry.version) for entry, _ in known))
    counts = {
        "count": len(known),
        "repositories": len(repositories),
        "plain": plain,
        "option": len(good) - plain,
        "refused": len(known) - len(good),
    }
    version = re.sub(r"\+\w+", "", torch.__version__)
    beyond = [f"{entry.name} ({outcome.cam or 0:.0e})" for entry, outcome in good if outcome.excess > 1]
    rounding = f"\nThe [accelerated copy](acceleration.md) of {', '.join(beyond)} rounds more." if beyond else ""
    text = TEXT.format(rounding=rounding, torch=version, **counts)
    for repository, version in repositories:
        text += f"\n## {repository}\n\n{version}\n\n| network | options | task | layer | Grad-CAM | saliency |\n"
        text += "|---|---|---|---|---|---|\n"
        text += "".join(f"{row(entry, outcome)}\n" for entry, outcome in known if entry.repository == repository)
    PAGE.write_text(text, encoding="utf-8")


def is_bad(outcome: Outcome) -> bool:
    """Return whether a map is wrong, or an error an internal one."""
    return bool(outcome.fault) or (outcome.excess > 1 and not (outcome.cam or 1) < ACCELERATED)


def main() -> int:
    """Examine networks; return the number of those with a fault."""
    parser = argparse.ArgumentParser(description=inspect.cleandoc(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("words", nargs="*")
    parser.add_argument("--jobs", type=int, default=1, help="networks at a time (default: 1)")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        (entry,) = (each for each in entries() if each.key == args.one)
        outcome = examine(entry, args.folder.resolve())
        print("\n" + json.dumps(asdict(outcome)))
        return 0
    results = args.folder / "results.json"
    stored = json.loads(results.read_text(encoding="utf-8")) if args.words and results.is_file() else {}
    outcomes = {key: Outcome(**each) for key, each in stored.items()}
    wanted = [entry for entry in entries() if not args.words or any(word in entry.key for word in args.words)]
    with ThreadPoolExecutor(args.jobs) as pool:
        for entry, outcome in zip(wanted, pool.map(lambda entry: in_process(entry, args.folder), wanted), strict=True):
            outcomes[entry.key] = outcome
            print("BAD" if is_bad(outcome) else "ok ", entry.key, outcome, flush=True)
            results.write_text(json.dumps({key: asdict(each) for key, each in outcomes.items()}), encoding="utf-8")
    write(outcomes)
    return sum(map(is_bad, outcomes.values()))


if __name__ == "__main__":
    sys.exit(min(main(), 1))
