"""State of one job while it runs: its image, its fixed targets, and the results for the unchanged image."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from camserve_server.core.arrays import Input, Map
from camserve_server.engine import apply_view, normalise
from camserve_server.engine.values import Row, RowResult
from camserve_server.imaging.values import View
from camserve_server.jobs.row_runner import RowRunner
from camserve_server.jobs.texts import embed_texts
from camserve_server.jobs.values import Job
from camserve_server.methods import METHODS
from camserve_server.methods.values import MethodCall
from camserve_server.models.values import Kind, Pass, Randomised
from camserve_server.targets import kind_of
from camserve_server.targets.values import FixedTarget, SimilarityTarget, Target


@dataclass(frozen=True, slots=True)
class ExplanationRun:
    """The explanation of one image, or of a view of it, while it runs.

    The "unchanged" image is this run's image with its views, without copies or edits by a method.

    Attributes:
        job: the methods, layers and targets to explain.
        image: the model's input.
        row_runner: runs rows.
        views: views of the image, applied one after the other.
        answers: for each target, the result of its row with the unchanged image; empty until `run_unchanged`.
        randomised: the modules of the model that get random weights; None for no module.
        class_map: the predicted class of each cell, as in `RowResult`, if the job asks for it and it has run.
        texts: embeddings of the texts that are the model's classes, as in `Row`, once they are computed.
        unchanged_logits: outputs of the model without interventions, if the job asks for them and they are computed.
    """

    job: Job
    image: Input
    row_runner: RowRunner
    views: tuple[View, ...] = ()
    answers: tuple[RowResult, ...] = ()
    randomised: Randomised | None = None
    class_map: NDArray[np.uint16] | None = None
    texts: NDArray[np.float32] | None = None
    unchanged_logits: Map | None = None

    @property
    def targets(self) -> tuple[FixedTarget, ...]:
        """The targets, resolved by the model's outputs for the unchanged image."""
        return tuple(answer.target for answer in self.answers)

    @property
    def input(self) -> Tensor:
        """The model's input, normalised and with the views, [3,H,W]."""
        image = normalise(torch.from_numpy(self.image)[None], self.job.model.preprocess)[0]
        for view in self.views:
            image = apply_view(image, view)
        return image

    def row(self, target: FixedTarget, calls: tuple[MethodCall, ...] = (), copy: int | None = None) -> Row:
        """Return a row of this image."""
        return Row(self.image, target, calls, copy, self.views, targets=len(self.job.targets), texts=self.texts)

    def pass_(self, kind: Kind, layers: Sequence[str] = ()) -> Pass:
        """Return a pass over this run's model."""
        size, changes = self.job.model.preprocess.size, (self.randomised, self.job.interventions)
        return Pass(self.job.model.key, kind, size, tuple(layers), *changes)

    def of(self, call: MethodCall, layers: Sequence[str] = (), view: View | None = None) -> "ExplanationRun":
        """Return a new run of one method with the same targets.

        Args:
            call: the method.
            layers: other layers; empty for the same.
            view: a view to apply after those of this run; None for none.
        """
        job = replace(self.job.alone(call), layers=tuple(layers) or self.job.layers, targets=self.targets, fusion=None)
        return replace(self, job=job, views=(*self.views, view) if view else self.views, answers=())

    async def run_unchanged(self) -> "ExplanationRun":
        """Run the rows of the unchanged image; return this run with their results, which fix its targets."""
        if self.texts is None and self.job.texts:
            return await (await self._with_texts()).run_unchanged()
        targets = [cast("FixedTarget", await self._with_embedding(target)) for target in self.job.targets]
        first, *others = self.job.shared
        answers = await self._answers(targets, first, features=self.job.features)
        for calls in others:
            more_answers = await self._answers([answer.target for answer in answers], calls)
            answers = [_merge_maps(*pair) for pair in zip(answers, more_answers, strict=True)]
        class_map = await self._class_map(answers[0].target)
        unchanged_logits = await self._unchanged_logits(answers[0].target)
        return replace(self, answers=tuple(answers), class_map=class_map, unchanged_logits=unchanged_logits)

    async def _with_texts(self) -> "ExplanationRun":
        """Return this run with the embeddings of its texts."""
        embeddings = await embed_texts(self.job.model, self.job.texts, self.row_runner.run)
        job = replace(self.job, targets=tuple(map(embeddings.fill, self.job.targets)))
        return replace(self, job=job, texts=embeddings.classes)

    async def _answers(
        self, targets: Sequence[FixedTarget], calls: tuple[MethodCall, ...], *, features: bool = False
    ) -> list[RowResult]:
        """Run methods that need only the unchanged image, for every target."""
        results: dict[int, RowResult] = {}
        rows = [self.row(target, calls) for target in targets]
        if features:  # they belong to the image and do not depend on the target: one row returns them for all
            rows[0] = replace(rows[0], features=True)
        await self.row_runner.run(self._unchanged_pass(), rows, results.__setitem__)
        return [results[index] for index in range(len(rows))]

    async def _class_map(self, target: FixedTarget) -> NDArray[np.uint16] | None:
        """Run one more row for the predicted class of each cell, if the job asks for it."""
        if not self.job.class_map:
            return None
        results: dict[int, RowResult] = {}
        row = replace(self.row(target), class_map=True)
        await self.row_runner.run(self.pass_("score"), [row], results.__setitem__)
        return results[0].class_map

    async def _unchanged_logits(self, target: FixedTarget) -> Map | None:
        """Run one more row for the outputs of the model without interventions, if the job asks for them."""
        if not self.job.unchanged_model:
            return None
        results: dict[int, RowResult] = {}
        pass_ = replace(self.pass_("score"), interventions=())
        await self.row_runner.run(pass_, [self.row(target)], results.__setitem__)
        return results[0].logits

    async def _with_embedding(self, target: Target) -> Target:
        """Replace the image of a similarity target by its embedding; return any other target as it is."""
        other = kind_of(target).compared(target)
        if other is None or other.image is None:
            return target
        results: dict[int, RowResult] = {}
        pass_ = replace(self.pass_("score"), size=(other.image.shape[0], other.image.shape[1]))
        await self.row_runner.run(pass_, [Row(other.image, SimilarityTarget())], results.__setitem__)
        return results[0].target

    def _unchanged_pass(self) -> Pass:
        clean = self.job.clean
        if self.job.features or any(METHODS[call.name].layered for call in clean):
            return self.pass_("cam", self.job.layers)
        return self.pass_("saliency" if clean else "score")


def _merge_maps(first: RowResult, second: RowResult) -> RowResult:
    """Append the maps of a second row of the same image and target to those of the first, layer by layer."""
    return replace(first, maps=tuple((*a, *b) for a, b in zip(first.maps, second.maps, strict=True)))
