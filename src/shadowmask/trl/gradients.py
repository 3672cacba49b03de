"""How much the groups of a step disagree about the gradient.

The whole gradient of every group would cost a backward pass each. One exact slice of it is free: let s be a
vector of gains on the decoder's output h, all 1. Then

    G_g = dL_g / ds = sum over the scored tokens t of group g of  (dL / dh_t) * h_t        (elementwise)

needs only what the backward pass computes anyway, for any model. L_g is the group's share of the loss of
the step, distillation included, so the gradient of the step is the sum of the G_g, and n G_g estimates it
from one group alone. Logged are, over the n groups (prompts) of a step on a process,

    gradient/group_variance   sum_g |n G_g - G|^2 / (n - 1)      with G = sum_g G_g
    gradient/group_noise      the same / |G|^2: how often noise outweighs signal, free of the loss's scale

It is ``hidden`` numbers of the gradient, not all of it: compare runs of one model, not models. A step with
fewer than two groups logs nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from shadowmask.scoring import Probe


class GradientSpread:
    """Collects the groups' gradients over the micro-batches of a step."""

    def __init__(self) -> None:
        self._groups: dict[Hashable, Tensor] = {}

    def probe(self, groups: Sequence[Hashable], lengths: Sequence[int]) -> Probe:
        """For ``score_packed``: the group and the tokens of each completion, in order."""

        def collect(hidden: Tensor, gradient: Tensor) -> None:
            parts = (hidden.float() * gradient.float()).split(list(lengths))
            for group, part in zip(groups, parts, strict=True):
                total = part.sum(0)
                known = self._groups.get(group)
                self._groups[group] = total if known is None else known + total

        return collect

    def take(self) -> dict[str, float]:
        """Metrics of the step that ends here; the next one starts from nothing."""
        groups, self._groups = list(self._groups.values()), {}
        return spread_metrics(torch.stack(groups)) if len(groups) > 1 else {}


def spread_metrics(gradients: Tensor) -> dict[str, float]:
    """Variance over groups of their estimates of the sum, from ``gradients`` of shape [groups, hidden]."""
    n = len(gradients)
    total = gradients.double().sum(0)
    variance = float((n * gradients.double() - total).square().sum() / (n - 1))
    signal = float(total.square().sum())
    noise = {"gradient/group_noise": variance / signal} if signal > 0 else {}
    return {"gradient/group_variance": variance, **noise}
