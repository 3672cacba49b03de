"""TOVA: keep what the last query attends to, one set of keys for all heads of a layer.

Source: TOVA (arXiv:2401.06104), ``schwartz-lab-NLP/TOVA``. A key's score is the attention weight that
the last query gives it, averaged over all heads of the layer. The budget is its only setting. Needs:
the last query; attention is recomputed for it.

Differences: sinks and a recent window always stay (the original protects nothing; ``num_sinks=0`` and
``recent_window=1`` come closest), and evictions happen every ``evict_every`` tokens instead of at every
token. The average over heads is ``share="heads"``, the default here; with ``share="none"`` every KV head
goes by the average over its own queries.
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView, window_attention


class TOVAEvictor(Evictor):
    name = "tova"
    observation_window = 1
    default_share = "heads"

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        # per KV head; select takes the mean over them, which is the mean over all heads
        return window_attention(view).sum(dim=2)
