"""Activation checkpointing recomputes the replay exactly, and evictions inside the prompt replay too."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shadowmask import NEVER, RecordError, RolloutBatch, ShadowMask, shadow_logprobs, smd_loss
from slow_reference import flat_gradient, make_slow_model, slow_smd_loss
from tiny_models import make_learner, make_prompts, rollout
from tolerances import FLOAT64, GRADIENT_DIFFERS, GRADIENT_FLOAT64, relative_gap

PROMPTS = make_prompts((23, 9, 1))


def gradient(family: str, batch: RolloutBatch, checkpointing: bool) -> torch.Tensor:
    model = make_learner(family).train()
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    calls = []
    for layer in model.model.layers:
        layer.self_attn.register_forward_hook(lambda *_: calls.append(1))
    smd_loss(model, batch, torch.linspace(-1, 1, len(batch.completion_ids)).double()).loss.backward()
    # two tracks, and the shadow one a second time in the backward pass
    assert len(calls) == len(model.model.layers) * (3 if checkpointing else 2)
    return flat_gradient(model)


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "gemma3", "qwen3-moe"])
def test_gradients_under_checkpointing_are_identical(family: str, evict_every: int | None) -> None:
    batch = rollout(make_learner(family), "snapkv", evict_every, PROMPTS, group_size=2, max_new_tokens=20)
    plain, recomputed = (gradient(family, batch, on) for on in (False, True))
    assert relative_gap(recomputed, plain) <= GRADIENT_FLOAT64


def chunked_prefill(batch: RolloutBatch, chunk: int = 8) -> RolloutBatch:
    """The batch under a record as a chunked prefill leaves it: evictions between chunks of the prompt.

    Per layer, head and prompt some keys are dropped at multiples of ``chunk``; all members of a group
    agree about them. What the rollout evicted later stays as it was.
    """
    entries = []
    for n, entry in enumerate(batch.shadow):
        prompt = batch.prompts_per_completion[n]
        generator = torch.Generator().manual_seed(len(prompt))
        evicted_at = entry.evicted_at.clone()
        for moment in range(chunk, len(prompt), chunk):
            past = evicted_at[..., :moment]
            drop = torch.rand(past.shape, generator=generator) < 0.3
            past[drop & (past > moment)] = moment
        entries.append(evicted_at)
    shadow = ShadowMask.from_entries(entries, batch.prompts_per_completion, batch.completion_ids)
    return dataclasses.replace(batch, shadow=shadow)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_evictions_inside_the_prompt_replay(family: str, checkpointing: bool) -> None:
    batch = chunked_prefill(
        rollout(make_learner(family), "snapkv", 5, PROMPTS, group_size=2, max_new_tokens=20)
    )
    assert not batch.shadow.starts_after_prefill()
    advantages = torch.linspace(-1, 1, len(batch.completion_ids)).double()
    model, reference = make_learner(family).train(), make_slow_model(family)
    if checkpointing:
        model.activation_checkpointing_enable({"use_reentrant": False})
    result = smd_loss(model, batch, advantages, distill_coef=0.5)
    result.loss.backward()
    expected = slow_smd_loss(reference, batch, advantages, 0.5, "dapo")
    expected.backward()
    assert float(result.loss.detach()) == pytest.approx(float(expected.detach()), abs=FLOAT64)
    assert relative_gap(flat_gradient(model), flat_gradient(reference)) <= GRADIENT_FLOAT64

    # control: the same without what happened inside the prompt is something else
    outside = ShadowMask.from_entries(
        [
            torch.where(entry.evicted_at < len(prompt), NEVER, entry.evicted_at).to(torch.int32)
            for entry, prompt in zip(batch.shadow, batch.prompts_per_completion, strict=True)
        ],
        batch.prompts_per_completion,
        batch.completion_ids,
    )
    other = make_learner(family)
    smd_loss(other, dataclasses.replace(batch, shadow=outside), advantages, distill_coef=0.5).loss.backward()
    assert relative_gap(flat_gradient(other), flat_gradient(reference)) > GRADIENT_DIFFERS


def test_members_may_keep_different_prompt_keys() -> None:
    """An evictor may cut each sample's prompt keys differently; the learner gathers what any member sees."""
    batch = rollout(make_learner(), "dense", None, PROMPTS, group_size=3, max_new_tokens=12)
    generator = torch.Generator().manual_seed(2)
    entries = []
    for entry, prompt in zip(batch.shadow, batch.prompts_per_completion, strict=True):
        evicted_at = entry.evicted_at.expand(2, 2, -1).clone()
        drop = torch.rand(2, 2, len(prompt), generator=generator) < 0.6
        evicted_at[..., : len(prompt)][drop] = len(prompt)
        entries.append(evicted_at)
    shadow = ShadowMask.from_entries(entries, batch.prompts_per_completion, batch.completion_ids)
    batch = dataclasses.replace(batch, shadow=shadow)
    advantages = torch.linspace(-1, 1, len(batch.completion_ids)).double()
    model, reference = make_learner(), make_slow_model("llama-gqa")
    smd_loss(model, batch, advantages, distill_coef=0.5).loss.backward()
    slow_smd_loss(reference, batch, advantages, 0.5, "dapo").backward()
    assert relative_gap(flat_gradient(model), flat_gradient(reference)) <= GRADIENT_FLOAT64


def test_members_that_disagree_about_their_prompt_are_refused() -> None:
    model = make_learner()
    batch = rollout(model, "snapkv", None, PROMPTS, group_size=2, max_new_tokens=4)
    entries = [entry.evicted_at.clone() for entry in batch.shadow]
    entries[1][..., 0] = 5
    shadow = ShadowMask.from_entries(entries, batch.prompts_per_completion, batch.completion_ids)
    with pytest.raises(RecordError, match="different evictions inside it"):
        shadow_logprobs(model, dataclasses.replace(batch, shadow=shadow))
