"""K-norm: keep the keys with the smallest L2 norm.

Source: arXiv:2406.11430, ``alessiodevoto/l2compress``. Keys of small norm are observed to receive much
attention, so the score is minus the norm; it has no settings. Needs: keys only. Rotary embeddings leave
norms as they are, so cached keys serve as well as unrotated ones.

Differences: sinks and a recent window always stay (the original protects nothing), and every layer
evicts (the original can be told to skip layers and has to wait for 2048 tokens).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView, widen


class KNormEvictor(Evictor):
    name = "knorm"

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        return -widen(view.keys).norm(dim=-1)
