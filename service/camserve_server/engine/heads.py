"""Run passes over the heads of one attention: what each pays attention to, without gradients."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from camserve_server.core.errors import FailedPrecondition
from camserve_server.engine.attention import AttentionCapture, token_grids
from camserve_server.engine.batch import find_unique_inputs, forward, in_row_order, make_inputs, score_passes
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import KeepAspect
from camserve_server.models import LoadedModel
from camserve_server.models.hooks import first_tensor
from camserve_server.models.values import Layout, ModelInfo, Pass


def run(model: LoadedModel, pass_: Pass, rows: Sequence[Row]) -> list[RowResult]:
    """Run one batch: one forward pass. The features of a row are its heads [heads,h,w].

    The attention is that of the pass's layer, or the last one. Of a model with a class token, it is read in the row of
    that token, which is the first. Otherwise it is the mean over the patches as queries; or over all queries, if these
    are other tokens than the keys.
    """
    has_class_token = _has_class_token(model.module)
    unique = find_unique_inputs(rows)
    results: dict[int, RowResult] = {}
    with torch.no_grad(), _record_heads(model, "".join(pass_.layers)) as recorder:
        outputs = forward(model, make_inputs(model.info, unique.rows))
        recorded, layout = recorder.last(len(unique.rows))
        heads = _maps(recorded.matrix, layout, has_class_token=has_class_token)
        for backward, _ in score_passes(outputs, unique, rows):
            pass_results, (maps,) = backward.fetch([heads[backward.at]])
            for position, index in enumerate(backward.rows):
                result = pass_results.row_result(position, (), (), (maps[position],))
                results[index] = replace(result, layer=recorded.layer)
    return in_row_order(results)


def _has_class_token(module: nn.Module) -> bool:
    """Return whether the first token of a model is its class token, if it has tokens before the patches.

    It is not if these are registers alone. The names of parameters tell: registers are "reg_token" in timm and
    "register_tokens" in transformers; class tokens are "cls_token", "class_token" or "class_embedding".
    """
    names = [name.rpartition(".")[2] for name, _ in module.named_parameters()]
    return any(name.startswith(("cls", "class")) for name in names) or not any(name.startswith("reg") for name in names)


def _maps(matrix: Tensor, layout: Layout, *, has_class_token: bool) -> Tensor:
    """Return the attention [B,heads,h,w] to the patches from a matrix [B,heads,queries,keys]."""
    patches = slice(layout.prefix, layout.prefix + layout.height * layout.width)
    if matrix.shape[-2] != matrix.shape[-1]:
        shares = matrix.mean(2)
    elif layout.prefix and has_class_token:
        shares = matrix[:, :, 0]
    else:
        shares = matrix[:, :, patches].mean(2)
    return shares[..., patches].reshape(*shares.shape[:2], layout.height, layout.width).float()


@dataclass(frozen=True, slots=True)
class _Recorded:
    """An attention [B,heads,queries,keys], and the name of the innermost module that computed it."""

    layer: str
    matrix: Tensor


class _HeadRecorder(AttentionCapture):
    """Records the attention of one layer, or the last one to an image's patches. Nothing else is kept.

    Args:
        info: the model.
        layer: name of the layer; empty for any.

    Attributes:
        running: names of the modules that run, the outermost first.
        tokens: the numbers of tokens that layers with a grid returned.
    """

    def __init__(self, info: ModelInfo, layer: str) -> None:
        super().__init__()
        self.running: list[str] = []
        self.tokens: set[int] = set()
        self._info = info
        self._layer = layer
        self._recorded: list[_Recorded] = []

    def enter(self, name: str) -> None:
        """Record that a module starts. A layer that is called again replaces what its last call recorded."""
        self.running.append(name)
        if name == self._layer:
            self._recorded.clear()

    def leave(self, output: Any) -> None:
        """Record that a module ends."""
        layer, tensor = self._info.layers.get(self.running.pop()), first_tensor(output)
        if layer and layer.layout and layer.layout.axes == "tokens" and tensor is not None:
            self.tokens.add(tensor.shape[1])

    def _on_attention(self, matrix: Tensor) -> Tensor:
        self._last = matrix
        heads = matrix.unsqueeze(1) if matrix.dim() == 3 else matrix  # noqa: PLR2004 -- one head
        recorded = _Recorded(self.running[-1], heads.detach())
        if self._layer in self.running[1:]:  # the first is the model, whose name is empty
            self._recorded.append(recorded)
        elif not self._layer and self._layout(heads):
            self._recorded = [recorded]
        return matrix

    def _layout(self, heads: Tensor) -> Layout | None:
        """Return the layout of the image's grid among the keys of an attention."""
        keys = heads.shape[-1]
        # Of inputs that keep a photo's proportions, the grid is known to a row and a column: the tokens of objects may
        # fit one too. Layers with a grid have run before, and tell the number of its tokens.
        if isinstance(self._info.preprocess.resize, KeepAspect) and keys not in self.tokens:
            return None
        return token_grids(self._info, keys).get(keys)

    def last(self, images: int) -> tuple[_Recorded, Layout]:
        """Return the attention, and the layout of the image's grid among its keys.

        Raises:
            FailedPrecondition: the layer has no attention, several, or one that is not to the patches of an image.
        """
        place = f'layer "{self._layer}" of {self._info.name}' if self._layer else self._info.name
        if not self._recorded:
            kind = "attention" if self._layer else "attention to the patches of an image"
            raise FailedPrecondition(f"{place} has no {kind} that torch computes", field="layer")
        if len(self._recorded) > 1:
            names = ", ".join(dict.fromkeys(f'"{each.layer}"' for each in self._recorded[:4]))
            message = f"{place} has {len(self._recorded)} attentions: name a layer with one, such as {names}"
            raise FailedPrecondition(message, field="layer")
        (recorded,) = self._recorded
        layout, shape = self._layout(recorded.matrix), recorded.matrix.shape
        if layout is None or shape[0] != images:
            message = f"the attention of {place} is to {shape[-1]} items that are not the patches of an image"
            raise FailedPrecondition(message, field="layer")
        return recorded, layout


@contextmanager
def _record_heads(model: LoadedModel, layer: str) -> Iterator[_HeadRecorder]:
    """Record the attention of a layer inside the block, or the last one without a layer."""
    recorder = _HeadRecorder(model.info, layer)

    def leave(_module: nn.Module, _args: Any, output: Any) -> None:
        recorder.leave(output)

    with ExitStack() as stack:
        for name, module in model.module.named_modules():
            stack.enter_context(module.register_forward_pre_hook(lambda _module, _args, n=name: recorder.enter(n)))
            stack.enter_context(module.register_forward_hook(leave))
        yield stack.enter_context(recorder)
