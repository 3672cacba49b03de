"""Ada-KV: the heads of a layer compete for its budget, so that some keep more keys than others.

Source: Ada-KV (arXiv:2407.11550), ``FFY0/AdaKV``; ``AdaKVPress`` in kvpress. The ``budget * kv_heads`` best
scores of a layer stay, whichever head they belong to, and at least ``floor`` of the budget in every head.
Scores are SnapKV's, as in the paper's Ada-SnapKV: window 32 and max pooling over 7 neighbours; floor 0.2 is
the safeguard of kvpress (the paper mixes the adaptive budgets with even ones instead, by the same number).
Needs: the last queries; heads with different numbers of keys, whose slots are one pool per layer.

Differences: sinks always stay too, in every head. Query heads that share a KV head compete as one, by the
mean of their attention. While decoding the heads compete again at every eviction, for the keys that are left.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.eviction.base import NUM_SINKS, LayerView, ranks, window_attention
from shadowmask.eviction.snapkv import SnapKVEvictor, pool_by_position


class AdaKVEvictor(SnapKVEvictor):
    """See module. ``budget`` is the mean over the heads of a layer."""

    name = "adakv"
    shares = ("none",)
    ragged_heads = True

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        observation_window: int = 32,
        kernel_size: int = 7,
        floor: float = 0.2,
        share: str | None = None,
    ) -> None:
        if not 0.0 <= floor <= 1.0:
            raise ValueError(
                f"floor={floor} is outside [0, 1]: it is the share of the budget that a head is sure of"
            )
        self.floor = floor
        super().__init__(
            budget, compression_ratio, num_sinks, recent_window, observation_window, kernel_size, share
        )

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        attention = window_attention(view).sum(dim=2)
        return pool_by_position(attention, view.positions, self.kernel_size, "max")

    def select(
        self,
        scores: Float[Tensor, "batch kv_heads slots"],
        positions: Int[Tensor, "batch kv_heads slots"],
        query_positions: Int[Tensor, " batch"],
        budget: Int[Tensor, " batch"],
        recent_window: Int[Tensor, " batch"],
    ) -> Bool[Tensor, "batch kv_heads slots"]:
        """Which occupied slots stay: ``budget * kv_heads`` of a layer, if there are more."""
        scores = self.protect(scores, positions, query_positions, recent_window)
        occupied = positions >= 0
        sure = (budget.double() * self.floor).long()[:, None, None]
        scores = scores.masked_fill(occupied & (ranks(scores, positions) < sure), torch.inf)
        # ties between heads go to the later position, then to the first head
        rank = ranks(scores.flatten(1), positions.flatten(1)).unflatten(1, (scores.shape[1], -1))
        return occupied & (rank < (budget * scores.shape[1])[:, None, None])
