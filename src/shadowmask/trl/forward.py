"""One keyword that makes a causal model score packed rollouts inside its own forward.

Both tracks and the head run within one call of the (possibly wrapped) model, which is what DDP, FSDP
and autocast wrappers expect. Without the keyword the forward is the one it was.
"""

from __future__ import annotations

import functools
import types
from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from shadowmask.packing import PackedBatch
from shadowmask.record import ShadowMask
from shadowmask.scoring import Probe, score_packed


@dataclass(frozen=True)
class ScoringRequest:
    """Arguments of ``score_packed``, as one object that travels through wrappers."""

    packed: PackedBatch
    shadow: ShadowMask
    temperature: float
    teacher: bool | nn.Module
    probe: Probe | None = None


def add_scoring_forward(model: PreTrainedModel) -> None:
    """Teach ``model(input_ids, scoring_request=request)`` to return ``TokenStats``."""
    original = model.forward

    @functools.wraps(type(model).forward)  # generate() reads the signature
    def forward(
        self: PreTrainedModel,
        *args: Any,
        scoring_request: ScoringRequest | None = None,
        **kwargs: Any,
    ) -> Any:
        if scoring_request is None:
            return original(*args, **kwargs)
        request = scoring_request
        return score_packed(
            self, request.packed, request.shadow, request.temperature, request.teacher, request.probe
        )

    model.forward = types.MethodType(forward, model)
