"""From logits to the score whose gradient is taken: always a logit, never a softmax of it."""

from collections.abc import Sequence

import torch
from torch import Tensor

from camserve_server.types import ClassTarget, ContrastTarget, FixedTarget, RankTarget, Target


def resolve(logits: Tensor, targets: Sequence[Target]) -> list[FixedTarget]:
    """Turn ranks into the classes that the model puts there.

    Args:
        logits: [B, classes], one row for each target.
        targets: B of them.
    """
    deepest = max((t.rank for t in targets if isinstance(t, RankTarget)), default=-1)
    if deepest < 0:
        return [t for t in targets if not isinstance(t, RankTarget)]
    ranking = logits.topk(deepest + 1, dim=1).indices.tolist()
    return [ClassTarget(ranking[i][t.rank]) if isinstance(t, RankTarget) else t for i, t in enumerate(targets)]


def scores(logits: Tensor, targets: Sequence[FixedTarget]) -> Tensor:
    """Return the score [B] of each row of logits [B, classes].

    A class's score is its logit; a contrast's is the difference of two, so that every method answers "why this and not
    that" (Selvaraju et al. 2017, section 3.3 for Grad-CAM).
    """
    why = _pick(logits, [t.index if isinstance(t, ClassTarget) else t.why for t in targets])
    if not any(isinstance(t, ContrastTarget) for t in targets):
        return why
    against = [t.why_not if isinstance(t, ContrastTarget) else 0 for t in targets]
    contrasts = torch.tensor([isinstance(t, ContrastTarget) for t in targets], device=logits.device)
    # Selected, not multiplied by 0: an infinite logit of one row must not reach another's score.
    return torch.where(contrasts, why - _pick(logits, against), why)


def _pick(logits: Tensor, indices: Sequence[int]) -> Tensor:
    column = torch.tensor(indices, device=logits.device).unsqueeze(1)
    return logits.gather(1, column).squeeze(1)
