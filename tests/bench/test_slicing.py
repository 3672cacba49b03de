"""The plain implementation that ours is measured against computes the same: only cost differs."""

from __future__ import annotations

import pytest
import torch
from tests.tolerances import EXACT, FLOAT64, GRADIENT_FLOAT64, WRONG_RECORD, relative_gap

import shadowmask as sm
from shadowmask.bench.slicing import (
    dense_distribution,
    evict_by_layer,
    evict_copy,
    kept_keys,
    make_cache,
    sliced_logprobs,
)
from shadowmask.bench.workload import Workload, make_model, make_prompts

WORKLOAD = Workload(shape="tiny", prompt_length=40, completion_length=5, group_size=2)


@pytest.fixture(scope="module")
def rollout() -> tuple[torch.nn.Module, sm.RolloutBatch]:
    model = make_model("tiny").double()
    for parameter in model.parameters():
        parameter.data *= 4  # attention far from uniform: a hidden key shows
    engine = sm.RolloutEngine(
        model, None, sm.get_evictor("snapkv", budget=12, num_sinks=2, recent_window=4, observation_window=4)
    )
    batch = engine.generate(make_prompts(WORKLOAD), 2, WORKLOAD.completion_length, stop_token_ids=[])
    return model, batch


def _sliced(model: torch.nn.Module, batch: sm.RolloutBatch, evicted_at: torch.Tensor) -> torch.Tensor:
    prompt = torch.tensor(batch.prompts_per_completion[1])
    completion = torch.tensor(batch.completion_ids[1])
    keep = kept_keys(evicted_at, len(prompt))
    return sliced_logprobs(model, prompt, completion, keep, batch.temperature)[0]


def test_the_plain_learner_is_the_replay(rollout: tuple[torch.nn.Module, sm.RolloutBatch]) -> None:
    model, batch = rollout
    evicted_at = batch.shadow[1].evicted_at
    assert int((evicted_at[:, :, :40] <= 40).sum()) == 28 * evicted_at.shape[0] * evicted_at.shape[1]
    expected = sm.shadow_logprobs(model, batch)[1]
    actual = _sliced(model, batch, evicted_at)
    assert float((actual - expected[: len(actual)]).detach().abs().max()) <= FLOAT64
    weight = next(model.parameters())
    (one,) = torch.autograd.grad(actual.sum(), weight)
    (other,) = torch.autograd.grad(expected.sum(), weight)
    assert relative_gap(one, other) <= GRADIENT_FLOAT64
    swapped = _sliced(model, batch, evicted_at.flip(1))  # KV heads swapped
    assert float((swapped - expected[: len(actual)]).detach().abs().max()) > WRONG_RECORD


def test_the_plain_teacher_is_the_dense_track(rollout: tuple[torch.nn.Module, sm.RolloutBatch]) -> None:
    model, batch = rollout
    prompt, completion = (
        torch.tensor(ids[1]) for ids in (batch.prompts_per_completion, batch.completion_ids)
    )
    actual = dense_distribution(model, prompt, completion).gather(1, completion[:, None])[:, 0]
    expected = sm.dense_logprobs(model, batch)[1][: len(actual)].detach()
    assert float((actual - expected).abs().max()) <= FLOAT64
    sliced = _sliced(model, batch, batch.shadow[1].evicted_at).detach()
    assert float((sliced - expected).abs().max()) > WRONG_RECORD


@pytest.mark.parametrize("evict", [evict_copy, evict_by_layer])
def test_what_stays_is_what_was_chosen(evict: object) -> None:
    model = make_model("tiny")
    cache = make_cache(model, tokens=6, sequences=2)
    before = [(key.clone(), value.clone()) for key, value in cache]
    keep = [torch.tensor([[[0, 5], [2, 3]]])] * len(cache)
    after = evict(cache, keep)  # type: ignore[operator]
    for (key, value), old in zip(after, before, strict=True):
        for new, dense in ((key, old[0]), (value, old[1])):
            assert float((new[:, 0] - dense[:, 0, [0, 5]]).abs().max()) == EXACT
            assert float((new[:, 1] - dense[:, 1, [2, 3]]).abs().max()) == EXACT
