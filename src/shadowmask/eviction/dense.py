"""The null evictor: nothing is ever evicted. The dense baseline under the same engine."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import Evictor, LayerView


class DenseEvictor(Evictor):
    name = "dense"

    def __init__(self) -> None:
        super().__init__(compression_ratio=0.0, num_sinks=0)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        return torch.zeros(view.positions.shape, device=view.positions.device)
