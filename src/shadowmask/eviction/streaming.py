"""StreamingLLM: the sinks, and a recent window that takes all the rest of the budget. Nothing is scored.

Source: StreamingLLM (arXiv:2309.17453), ``mit-han-lab/streaming-llm``: 4 sinks (``start_size``) and the
most recent tokens (``recent_size`` 512 in the published class, 2000 in its demo; here the budget minus
the sinks). Needs: positions only. The choice is the same for all layers and heads.

Differences: positions stay absolute (the original counts them inside the cache, which a mask cannot
replay), and between two evictions up to ``evict_every`` more keys are held (the original drops one
per token). Against ``recent``: the same keys stay under the same budget. ``recent`` protects 32 tokens
as every evictor does and ranks the others by age, so it takes no budget below sinks + 32; here the
window *is* the budget, down to one token.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView


class StreamingEvictor(Evictor):
    """See module. Under a smaller ``recent_window`` the same keys stay: ties go to the later position."""

    name = "streaming"

    def recent_window_for(self, budget: int) -> int:
        if self._recent_window is not None:
            return self._recent_window
        return max(budget - self.num_sinks, 1)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        return torch.zeros(view.positions.shape, device=view.positions.device)
