"""The registered function: refusals, the session's bookkeeping, and no silent way around it."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shadowmask import NEVER, RecordError, ShadowMask, dense_logprobs, shadow_logprobs
from shadowmask.attention.interface import NAME, install, run_decoder, shadowmask_attention
from shadowmask.attention.replay import ReplaySession
from shadowmask.packing import pack
from shadowmask.scoring import score_packed
from tiny_models import make_learner, make_model, make_prompts, rollout, shared_model, shared_rollout
from tolerances import FLOAT64


def session_for(prompt: list[int], completion: list[int]) -> tuple[ReplaySession, object]:
    packed = pack([prompt], [completion])
    return ReplaySession(packed, ShadowMask.dense([prompt], [completion])), packed


def test_install_is_idempotent_and_selects_our_function() -> None:
    model = make_model()
    for _ in range(2):
        install(model)
        assert model.config._attn_implementation == NAME


def test_active_dropout_is_refused_where_it_would_act() -> None:
    x = torch.zeros(1, 1, 2, 4)
    with pytest.raises(RecordError, match=r"attention dropout 0\.1 is active in Linear"):
        shadowmask_attention(torch.nn.Linear(1, 1), x, x, x, None, dropout=0.1)


def test_sink_logits_take_part_without_a_session_too() -> None:
    """Two equal keys and a sink of their logit: a third of the attention goes nowhere."""
    zeros, ones = torch.zeros(1, 1, 2, 4), torch.ones(1, 1, 2, 4)
    layer = torch.nn.Linear(1, 1)
    whole, _ = shadowmask_attention(layer, zeros, zeros, ones, None)
    sunk, _ = shadowmask_attention(layer, zeros, zeros, ones, None, s_aux=torch.zeros(1))
    assert torch.equal(whole, ones.transpose(1, 2))
    assert torch.allclose(sunk, torch.tensor(2 / 3))


def test_a_layer_that_does_not_ask_is_an_error() -> None:
    """Never a silent dense layer: the session counts who came."""
    model = make_learner()
    first, *rest = model.model.layers
    first.forward = lambda hidden_states, *_, **__: hidden_states
    session, packed = session_for([3, 4, 5], [6, 7])
    with pytest.raises(RecordError, match=r"LlamaModel: layers \[0\] did not use the attention session"):
        run_decoder(model.model, packed.input_ids, packed.position_ids, session, len(rest) + 1)


def test_a_record_of_another_model_is_refused() -> None:
    batch = shared_rollout("llama-gqa")
    with pytest.raises(
        RecordError, match="the record has 2 KV heads, layer 0 has 4: it was made by another model"
    ):
        shadow_logprobs(make_learner("llama-mha"), batch)
    with pytest.raises(
        RecordError, match=r"= \(2, 2\), the model has \(3, 2\): it was made by another model"
    ):
        shadow_logprobs(make_learner("gemma3"), batch)
    with pytest.raises(RecordError, match="made for other tokens"):
        completions = [c[::-1] for c in batch.completion_ids]
        shadow_logprobs(make_learner(), dataclasses.replace(batch, completion_ids=completions))


def test_a_record_with_too_few_entries_is_refused() -> None:
    batch = shared_rollout("llama-gqa")
    packed = pack(batch.prompts_per_completion, batch.completion_ids)
    with pytest.raises(RecordError, match="the record has 5 entries for 12 completions"):
        score_packed(make_learner(), packed, batch.shadow[:5])
    with pytest.raises(RecordError, match="5 entries, but 12 prompts"):
        shadow_logprobs(make_learner(), dataclasses.replace(batch, shadow=batch.shadow[:5]))


@pytest.mark.parametrize("evict_every", [None, 5])
def test_shared_records_broadcast_over_layers_and_heads(evict_every: int | None) -> None:
    """``recent`` decides alike everywhere: its record with axes of size 1 replays the same."""
    batch = shared_rollout("llama-gqa", torch.float64, "recent", evict_every)
    slim = ShadowMask(
        batch.shadow.evicted_at[:1, :1].contiguous(),
        batch.shadow.lengths,
        batch.shadow.prompt_lengths,
        batch.shadow.token_hashes,
    )
    with torch.no_grad():
        full = torch.cat(shadow_logprobs(shared_model(), batch))
        shared = torch.cat(shadow_logprobs(shared_model(), dataclasses.replace(batch, shadow=slim)))
    assert float((full - shared).abs().max()) <= FLOAT64
    assert float((full - torch.cat(dense_logprobs(shared_model(), batch))).abs().max()) > FLOAT64


def test_the_last_key_may_be_evicted_by_its_own_query() -> None:
    """``evicted_at[k] = k + 1`` everywhere: each query sees itself alone; no row is empty, nothing is NaN."""
    batch = rollout(shared_model(), "dense", None, make_prompts((5, 1)), max_new_tokens=6)
    entries = [
        torch.arange(1, entry.lengths[0] + 1, dtype=torch.int32).expand(1, 1, -1) for entry in batch.shadow
    ]
    alone = ShadowMask.from_entries(entries, batch.prompts_per_completion, batch.completion_ids)
    with torch.no_grad():
        values = torch.cat(shadow_logprobs(shared_model(), dataclasses.replace(batch, shadow=alone)))
    assert bool(values.isfinite().all())
    assert bool((alone.evicted_at != NEVER).all())
