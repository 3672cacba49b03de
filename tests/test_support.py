"""Every row of the support table: exact in float64 beside records that are not, or refused by name."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from transformers import PreTrainedModel

from families import PAGE, REFUSED, SUPPORTED, page
from shadowmask import (
    NEVER,
    RolloutBatch,
    RolloutEngine,
    ShadowMask,
    UnsupportedModelError,
    dense_logprobs,
    prepare_model,
    shadow_logprobs,
)
from tiny_models import make_evictor, make_prompts, rollout
from tolerances import FLOAT32, FLOAT64, WRONG_RECORD

PROMPTS = make_prompts((22, 15))  # beyond the budget and the sliding window
SHORT = {"prompts": PROMPTS, "group_size": 2, "max_new_tokens": 8, "stop_token_ids": ()}


def gap(model: PreTrainedModel, batch: RolloutBatch, record: ShadowMask) -> float:
    with torch.no_grad():
        shadow = torch.cat(shadow_logprobs(model, replace(batch, shadow=record)))
    return float((shadow - torch.cat(batch.sparse_logprobs)).abs().max())


def shifted(record: ShadowMask) -> ShadowMask:
    """Every eviction one query late."""
    late = torch.where(record.evicted_at == NEVER, record.evicted_at, record.evicted_at + 1)
    return replace(record, evicted_at=late)


@pytest.mark.parametrize("evict_every", [None, 3])
@pytest.mark.parametrize("name", SUPPORTED)
def test_a_supported_family_is_replayed_exactly(name: str, evict_every: int | None) -> None:
    model = SUPPORTED[name].make()
    untouched = copy.deepcopy(model)
    prepare_model(model)
    batch = rollout(model, "snapkv", evict_every, **SHORT)
    assert batch.shadow.retained_fraction() < 1
    assert gap(model, batch, batch.shadow) <= FLOAT64
    assert gap(model, batch, shifted(batch.shadow)) > WRONG_RECORD
    dense = ShadowMask.dense(batch.prompts_per_completion, batch.completion_ids)
    assert gap(model, batch, dense) > WRONG_RECORD
    # and it is this model that both agree on
    tokens = batch.prompt_ids[0] + batch.completion_ids[0]
    with torch.no_grad():
        logits = untouched(torch.tensor([tokens])).logits[0, len(batch.prompt_ids[0]) - 1 : -1]
        full = dense_logprobs(model, batch)[0]
    own = logits.log_softmax(-1).gather(1, torch.tensor(batch.completion_ids[0])[:, None])[:, 0]
    # transformers takes Gemma 2's softmax in float32 whatever the model's dtype
    assert float((full - own).abs().max()) <= (FLOAT32 if name == "Gemma 2" else FLOAT64)


@pytest.mark.parametrize("name", REFUSED)
def test_a_refused_family_is_refused_by_name(name: str) -> None:
    family = REFUSED[name]
    model = family.make(torch.float32)
    with pytest.raises(UnsupportedModelError) as caught:
        prepare_model(model)
    assert str(caught.value).startswith(f"{family.class_name} is not supported: ")
    assert family.refused in str(caught.value)
    with pytest.raises(UnsupportedModelError):
        RolloutEngine(model, None, make_evictor("recent"))


def test_the_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tests/families.py"
