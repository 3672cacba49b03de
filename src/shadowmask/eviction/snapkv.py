"""SnapKV: keep what the last queries look at, smoothed over neighbouring positions.

Source: SnapKV (arXiv:2404.14469), ``FasterDecoding/SnapKV``. A key's score is the attention it gets
from the last ``observation_window`` queries, average-pooled over ``kernel_size`` neighbours; the
window itself always stays. Defaults are those of the paper's LongBench runs (window 32) and of the
published class (average pooling, kernel 5). Needs: the last queries; attention is recomputed for them.

Differences: the attention of the query heads that share a KV head is averaged (as in kvpress; the
original repeats keys per query head). At decode time the same rule is applied to the keys that are
left, neighbours being the nearest *surviving* positions.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.eviction.base import NUM_SINKS, Evictor, LayerView, window_attention


class SnapKVEvictor(Evictor):
    """See module. ``recent_window`` defaults to ``observation_window``, as published."""

    name = "snapkv"

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        observation_window: int = 32,
        kernel_size: int = 5,
        share: str | None = None,
    ) -> None:
        if observation_window < 1:
            raise ValueError(f"observation_window={observation_window} must be at least 1")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd and at least 1")
        self.observation_window = observation_window
        self.kernel_size = kernel_size
        super().__init__(
            budget,
            compression_ratio,
            num_sinks,
            observation_window if recent_window is None else recent_window,
            share,
        )

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        attention = window_attention(view).sum(dim=2)
        return pool_by_position(attention, view.positions, self.kernel_size)


def pool_by_position(
    scores: Float[Tensor, "batch kv_heads slots"],
    positions: Int[Tensor, "batch kv_heads slots"],
    kernel_size: int,
    pool: Literal["mean", "max"] = "mean",
) -> Float[Tensor, "batch kv_heads slots"]:
    """Replace every score by the mean or max over its neighbours in order of position, in any slots.

    As in the published code the mean divides by ``kernel_size`` also at the ends. Empty slots
    (position -1) sort in front and count as zero.
    """
    order = positions.argsort(dim=-1, stable=True)
    sorted_scores = scores.masked_fill(positions < 0, 0.0).gather(-1, order)
    pooling = F.max_pool1d if pool == "max" else F.avg_pool1d
    pooled = pooling(sorted_scores, kernel_size, stride=1, padding=kernel_size // 2)
    return torch.empty_like(scores).scatter_(-1, order, pooled)
