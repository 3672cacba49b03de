"""The corners: nothing to evict, one token, one completion, immediate EOS."""

from __future__ import annotations

import pytest
import torch

from shadowmask import NEVER, RolloutBatch, RolloutEngine, get_evictor, shadow_logprobs, smd_loss
from shadowmask.eviction import EVICTORS, list_evictors
from slow_reference import flat_gradient, make_slow_model, slow_smd_loss
from tiny_models import (
    BUDGET,
    MAX_NEW_TOKENS,
    VOCAB,
    make_evictor,
    make_learner,
    make_prompts,
    rollout,
    shared_model,
)
from tolerances import FLOAT64, GRADIENT_FLOAT64, relative_gap

EVICTING = [name for name in list_evictors() if name != "dense"]
EVERY_TOKEN = list(range(VOCAB))


def assert_learns(batch: RolloutBatch) -> None:
    """Parity, and a finite loss whose gradient is the slow reference's."""
    model, reference = make_learner(), make_slow_model("llama-gqa")
    with torch.no_grad():
        replayed = shadow_logprobs(model, batch)
    for mine, sampled in zip(replayed, batch.sparse_logprobs, strict=True):
        assert len(mine) == len(sampled) and float((mine - sampled).abs().max()) <= FLOAT64
    advantages = torch.linspace(0.5, 1.5, len(batch.completion_ids)).double()
    result = smd_loss(model, batch, advantages)
    result.loss.backward()
    assert all(value == value for value in result.metrics.values())
    slow_smd_loss(reference, batch, advantages, 0.1, "dapo").backward()
    assert relative_gap(flat_gradient(model), flat_gradient(reference)) <= GRADIENT_FLOAT64


@pytest.mark.parametrize("evict_every", [None, 3])
@pytest.mark.parametrize("evictor", list_evictors())
def test_a_budget_that_is_never_reached_is_dense_to_the_token(evictor: str, evict_every: int | None) -> None:
    """Same tokens, same log-probabilities to the last bit but rounding, nothing recorded."""
    ample = evictor if evictor == "dense" else make_evictor(evictor, budget=200)
    batch = rollout(shared_model(), ample, evict_every)
    dense = rollout(shared_model(), "dense")
    assert batch.completion_ids == dense.completion_ids
    assert bool((batch.shadow.evicted_at == NEVER).all()) and batch.shadow.retained_fraction() == 1
    gap = torch.cat(batch.sparse_logprobs) - torch.cat(dense.sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT64


@pytest.mark.parametrize("evictor", EVICTING)
def test_a_budget_that_bites_changes_the_tokens(evictor: str) -> None:
    """The control of the test above."""
    batch = rollout(shared_model(), evictor, 3)
    assert batch.completion_ids != rollout(shared_model(), "dense").completion_ids


def test_ratio_zero_is_dense() -> None:
    ratio = get_evictor("snapkv", compression_ratio=0.0, observation_window=4)
    batch = rollout(shared_model(), ratio, 3)
    assert batch.completion_ids == rollout(shared_model(), "dense").completion_ids
    assert batch.shadow.retained_fraction() == 1


@pytest.mark.parametrize("evictor", EVICTING)
@pytest.mark.parametrize("length", [BUDGET - 1, BUDGET, BUDGET + 1])
def test_prompts_around_the_budget(length: int, evictor: str) -> None:
    batch = rollout(shared_model(), evictor, 4, make_prompts((length,)), group_size=2, max_new_tokens=12)
    gone_after_prefill = (batch.shadow[0].evicted_at == length).sum(dim=-1)
    longest = length + 12
    budgets = make_evictor(evictor).layer_budgets(BUDGET, longest, 2) or (BUDGET, BUDGET)
    for gone, budget in zip(gone_after_prefill, budgets, strict=True):
        if EVICTORS[evictor].ragged_heads:
            assert int(gone.sum()) == len(gone) * max(length - budget, 0)
        else:
            assert bool((gone == max(length - budget, 0)).all())
    assert_learns(batch)


@pytest.mark.parametrize("evictor", EVICTING)
def test_a_prompt_shorter_than_every_window(evictor: str) -> None:
    """Sinks 2, recent window 4, observation window 4: a prompt of two, and one of one."""
    batch = rollout(shared_model(), evictor, 4, make_prompts((2, 1)), group_size=2, max_new_tokens=20)
    assert batch.shadow.retained_fraction() < 1
    assert_learns(batch)


@pytest.mark.parametrize("evictor", EVICTING)
def test_a_prompt_of_one_token(evictor: str) -> None:
    batch = rollout(shared_model(), evictor, 2, make_prompts((1,)), group_size=3, max_new_tokens=24)
    assert {len(p) for p in batch.prompt_ids} == {1}
    assert batch.shadow.retained_fraction() < 1
    assert_learns(batch)


@pytest.mark.parametrize("evict_every", [None, 3])
def test_a_group_of_one(evict_every: int | None) -> None:
    batch = rollout(shared_model(), "snapkv", evict_every, group_size=1)
    assert len(batch.completion_ids) == len(batch.prompt_ids)
    assert_learns(batch)


@pytest.mark.parametrize("evict_every", [None, 1])
@pytest.mark.parametrize("evictor", list_evictors())
def test_eos_first(evictor: str, evict_every: int | None) -> None:
    """Every completion is one token: nothing was ever decoded, the learner packs prompts only."""
    batch = rollout(shared_model(), evictor, evict_every, stop_token_ids=EVERY_TOKEN)
    assert {len(c) for c in batch.completion_ids} == {1}
    assert batch.shadow.retained_fraction() == 1  # no query after the prompt's own
    assert_learns(batch)


def test_eos_first_in_some_members_only() -> None:
    """Completions of one token beside long ones, in every place of a group."""
    prompts = make_prompts((20, 6))
    batch = rollout(shared_model(), "snapkv", 3, prompts, group_size=6, stop_token_ids=range(0, VOCAB, 4))
    lengths = [len(c) for c in batch.completion_ids]
    assert 1 in lengths[:6] and max(lengths[:6]) > 1
    assert_learns(batch)


def test_one_new_token() -> None:
    batch = rollout(shared_model(), "snapkv", 1, max_new_tokens=1)
    assert {len(c) for c in batch.completion_ids} == {1}
    assert_learns(batch)


def test_evicting_after_every_token_with_the_smallest_budget() -> None:
    """Budget 1: after each token one key is left, and the next query sees that and itself."""
    evictor = get_evictor("recent", budget=1, num_sinks=0, recent_window=1)
    batch = rollout(shared_model(), evictor, 1, make_prompts((9, 1)), max_new_tokens=10)
    visible = batch.shadow[0].visible()
    assert set(visible[:, :, 9:-1].sum(-1).unique().tolist()) == {2}
    assert_learns(batch)


def test_greedy_is_the_argmax_and_scored_at_temperature_one() -> None:
    batch = rollout(shared_model(), "dense", None, make_prompts((9,)), temperature=0.0, group_size=2)
    assert batch.completion_ids[0] == batch.completion_ids[1] and batch.temperature == 1.0
    tokens = batch.prompt_ids[0] + batch.completion_ids[0]
    with torch.no_grad():
        logits = shared_model()(torch.tensor([tokens])).logits[0, 8:-1]
    assert logits.argmax(-1).tolist() == batch.completion_ids[0]


BAD_CALLS = [
    ({"prompts": []}, "prompts is empty"),
    ({"prompts": [[3], []]}, "prompt 1 is empty"),
    ({"prompts": ["text"]}, "prompt 0 is a string, but the engine has no tokenizer"),
    ({"prompts": [[VOCAB]]}, "outside the model's vocabulary of 64"),
    ({"prompts": [[-1]]}, "outside the model's vocabulary of 64"),
    ({"prompts": [[3]], "group_size": 0}, "group_size=0"),
    ({"prompts": [[3]], "group_size": [1, 2]}, "one per prompt"),
    ({"prompts": [[3]], "max_new_tokens": 0}, "max_new_tokens=0"),
    ({"prompts": [[3]], "temperature": -1.0}, "temperature=-1.0"),
    ({"prompts": [[3]], "top_k": 5}, "top_k: not supported"),
    ({"prompts": [[3]], "repetition_penalty": 1.2, "top_p": 0.9}, "repetition_penalty, top_p: not supported"),
]


@pytest.mark.parametrize(("call", "message"), BAD_CALLS, ids=lambda value: str(value)[:40])
def test_bad_calls_are_one_clear_line(call: dict[str, object], message: str) -> None:
    engine = RolloutEngine(shared_model(), None, make_evictor("recent"))
    with pytest.raises(ValueError, match=message) as caught:
        engine.generate(**call)
    assert "\n" not in str(caught.value)


def test_a_schedule_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="evict_every=0"):
        RolloutEngine(shared_model(), None, make_evictor("recent"), evict_every=0)


def test_models_own_eos_ends_a_completion() -> None:
    """Without stop ids the model's generation config is asked."""
    model = shared_model()
    batch = rollout(model, "dense", None, make_prompts((9,)), group_size=60, stop_token_ids=None)
    ended = [c for c in batch.completion_ids if len(c) < MAX_NEW_TOKENS]
    assert ended and all(c[-1] == 1 and 1 not in c[:-1] for c in ended)
