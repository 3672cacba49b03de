"""H2O: keep the heavy hitters (keys that received most attention so far) and the recent keys.

Source: H2O (arXiv:2306.14048), ``FMInference/H2O``. A key's score is the attention it received,
summed over all queries since it entered; half of the budget is recent, half heavy (the published
0.1 + 0.1 of the prompt, here as halves of any budget). Needs: the attention of every query. In the
prefill its column sums are taken in blocks of queries, never as a full matrix.

Difference: summed over the query heads that share a KV head (the original repeats keys per head).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView


class H2OEvictor(Evictor):
    name = "h2o"
    accumulates_attention = True

    def recent_window_for(self, budget: int) -> int:
        if self._recent_window is not None:
            return self._recent_window
        return max((budget - self.num_sinks) // 2, 1)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        assert view.attention_received is not None
        return view.attention_received
