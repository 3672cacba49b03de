"""KeyDiff: keep the keys that point away from the others.

Source: KeyDiff (arXiv:2504.15364); no repository of the authors is known to us, ``KeyDiffPress`` in
kvpress is the code we compared with. A key's score is minus its cosine similarity to the anchor, the
mean of all keys of its head scaled to length 1. It has no settings. Needs: keys only.

Differences: sinks and a recent window always stay; the paper reads long prompts in blocks and evicts
after each, here a prompt is read whole. Keys are compared as they are cached, rotated (as in kvpress).
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView, widen


class KeyDiffEvictor(Evictor):
    name = "keydiff"

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        directions = key_directions(view.keys, view.positions)
        anchor = directions.sum(dim=2, keepdim=True)  # its length does not matter
        return -F.cosine_similarity(directions, anchor, dim=-1)


def key_directions(
    keys: Float[Tensor, "batch kv_heads slots head_dim"], positions: Int[Tensor, "batch kv_heads slots"]
) -> Float[Tensor, "batch kv_heads slots head_dim"]:
    """Keys scaled to length 1, in float32 or wider; empty slots are 0."""
    return F.normalize(widen(keys), dim=-1).masked_fill((positions < 0)[..., None], 0.0)
