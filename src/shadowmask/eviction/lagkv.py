"""LagKV: keep what stands out against the keys and values that came next.

Source: LagKV (arXiv:2504.04704), ``AI-Lab-China-Merchants-Bank/LagKV``. Behind the sinks, the sequence
is cut into partitions of ``lag_size`` tokens. Each channel of a partition is scaled by the minimum and
maximum that it has in the *next* partition; a token's score is the standard deviation over its scaled
channels, as a softmax over its partition, for keys plus values. Every partition gives up the same
share. The last full partition and the tokens behind it have nothing to be compared with and go last.
Needs: keys and values only. ``lag_size`` 128 is the default of ``LagKVPress`` in kvpress (the published
class: 1024, with 16 sinks).

To take the same share of every partition under one budget, scores are compared by their rank within
the partition (as in kvpress). Below sinks + 2 * ``lag_size`` keys there is no ranking: the recent stay.

Differences: partitions are counted over the keys that are left, so after an eviction they span more
than ``lag_size`` positions, and earlier survivors are ranked again (the published class compresses a
partition once and keeps the result). Their number follows from the budget, where the original keeps
a fixed share of each. A channel that is constant in the next partition counts as 0 instead of
dividing by it. Memory: one layer's keys, then its values, are copied in order of position.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.eviction.base import NUM_SINKS, Evictor, LayerView, widen


class LagKVEvictor(Evictor):
    name = "lagkv"

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        lag_size: int = 128,
        share: str | None = None,
    ) -> None:
        if lag_size < 2:
            raise ValueError(f"lag_size={lag_size} must be at least 2: one token has no minimum and maximum")
        self.lag_size = lag_size
        super().__init__(budget, compression_ratio, num_sinks, recent_window, share)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        partitioned = view.positions >= self.num_sinks
        last = torch.iinfo(view.positions.dtype).max  # sinks and empty slots go behind
        order = view.positions.masked_fill(~partitioned, last).argsort(dim=-1, stable=True)
        spread = lag_spread(view.keys, order, self.lag_size) + lag_spread(view.values, order, self.lag_size)
        rank = spread.argsort(dim=-1, stable=True).argsort(dim=-1)  # equal ones: the later is higher
        full = partitioned.sum(dim=-1, keepdim=True) // self.lag_size
        has_next = torch.arange(spread.shape[2], device=full.device) + 1 < full
        scores = torch.where(has_next[..., None], rank / self.lag_size, 1.0)
        scores = scores.flatten(2)[..., : order.shape[-1]]
        return torch.empty_like(scores).scatter_(-1, order, scores)


def lag_spread(
    states: Float[Tensor, "batch kv_heads slots dim"],
    order: Int[Tensor, "batch kv_heads slots"],
    lag_size: int,
) -> Float[Tensor, "batch kv_heads partitions lag"]:
    """How unevenly a token's channels lie within the range they have in the next partition.

    ``order`` lists slots by position. The last partition is compared with the first and partitions
    that are not full contain padding: both are for the caller to ignore.
    """
    ordered = widen(states.gather(2, order[..., None].expand(*order.shape, states.shape[-1])))
    padded = F.pad(ordered, (0, 0, 0, -order.shape[-1] % lag_size))
    lagged = padded.unflatten(2, (-1, lag_size))  # (batch, kv_heads, partitions, lag, dim)
    following = lagged.roll(-1, dims=2)
    low, high = following.amin(dim=3, keepdim=True), following.amax(dim=3, keepdim=True)
    scaled = torch.where(high > low, (lagged - low) / (high - low), 0.0)
    return scaled.std(dim=-1).softmax(dim=-1)
