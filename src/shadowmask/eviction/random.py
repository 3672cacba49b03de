"""Random eviction: every key outside sinks and recent window is equally likely to stay.

Source: the ablation of SMD (arXiv:2605.06850); also ``RandomPress`` in kvpress. Needs: nothing.
Difference from both: draws are per layer and KV head and come from a counter-based hash of
(sequence seed, layer, head, position, query), so they depend neither on the batch nor on the order
of calls, and fresh draws are made at every eviction.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView


class RandomEvictor(Evictor):
    name = "random"

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        heads = torch.arange(view.positions.shape[1], device=view.positions.device)
        state = mix(view.seeds[:, None, None] + view.layer)
        state = mix(state + heads[None, :, None])
        state = mix(state + view.query_positions[:, None, None])
        return uniform(mix(state + view.positions.long()))


def mix(x: Int[Tensor, ...]) -> Int[Tensor, ...]:
    """SplitMix64's finaliser on int64 (two's complement wraps as unsigned does)."""
    x = x + -7046029254386353131  # 0x9E3779B97F4A7C15
    x = (x ^ _shift_right(x, 30)) * -4658895280553007687  # 0xBF58476D1CE4E5B9
    x = (x ^ _shift_right(x, 27)) * -7723592293110705685  # 0x94D049BB133111EB
    return x ^ _shift_right(x, 31)


def uniform(x: Int[Tensor, ...]) -> Float[Tensor, ...]:
    """Map mixed integers to [0, 1) with 24 bits, exact in float32."""
    return _shift_right(x, 40).to(torch.float32) * 2.0**-24


def _shift_right(x: Int[Tensor, ...], bits: int) -> Int[Tensor, ...]:
    # int64's >> copies the sign bit; mask it off to get the logical shift
    return (x >> bits) & (2 ** (64 - bits) - 1)
