"""Keep the sinks and the most recent keys, at their original positions.

Source: StreamingLLM (arXiv:2309.17453), without its re-indexing of positions, which a mask cannot
replay. The choice is the same for all layers and heads. Needs: positions only.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView


class RecentEvictor(Evictor):
    name = "recent"

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        return view.positions.to(torch.float64)  # exact for any position, unlike bfloat16
