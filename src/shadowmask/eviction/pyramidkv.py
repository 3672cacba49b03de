"""PyramidKV: many keys in the first layers, few in the last ones, chosen as SnapKV does.

Source: PyramidKV (arXiv:2406.02069), ``Zefan-Cai/KVCache-Factory``. Budgets fall from layer to layer by the
same step. With ``b`` the budget without what always stays, the last layer keeps ``b / beta`` and the first
``2 b - b / beta``, or as many as the sequence has; then the last keeps more, so that the mean over layers
stays the budget. Defaults are those of the published class (beta 20, window 64, average pooling, kernel 5).
Needs: the last queries, and that every layer is written with its own number of slots.

Differences: what always stays are the window *and* the sinks. Steps are rounded in pairs of layers, so that
the budgets add up to ``budget * layers`` exactly. Scores as in ``snapkv``.
"""

from __future__ import annotations

from shadowmask.eviction.base import NUM_SINKS
from shadowmask.eviction.snapkv import SnapKVEvictor


class PyramidKVEvictor(SnapKVEvictor):
    """See module. ``budget`` is the mean over layers."""

    name = "pyramidkv"

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        observation_window: int = 64,
        kernel_size: int = 5,
        beta: int = 20,
        share: str | None = None,
    ) -> None:
        if beta < 1:
            raise ValueError(f"beta={beta} must be at least 1: the last layer keeps budget / beta")
        self.beta = beta
        super().__init__(
            budget, compression_ratio, num_sinks, recent_window, observation_window, kernel_size, share
        )

    def layer_budgets(self, budget: int, tokens: int, num_layers: int) -> tuple[int, ...]:
        protected = self.num_sinks + self.recent_window_for(budget)
        free = budget - protected
        # a first layer that keeps everything has nothing to gain from more
        rise = min(free - free // self.beta, max(tokens - budget, 0))
        half = [
            int(rise * (num_layers - 1 - 2 * layer) / (num_layers - 1) + 0.5)
            for layer in range(num_layers // 2)
        ]
        middle = [0] * (num_layers % 2)
        return tuple(budget + n for n in [*half, *middle, *(-n for n in reversed(half))])
