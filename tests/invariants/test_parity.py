"""The claim: the learner's log-probabilities are the sampler's, for every evictor, schedule and family.

``assert_parity`` is the one assertion. The negative controls below run the same assertion with records
that are wrong in the ways a bug would make them wrong, and it must fail on every one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from shadowmask import NEVER, RolloutBatch, ShadowMask, dense_logprobs, shadow_logprobs
from shadowmask.eviction import EVICTORS, list_evictors
from shadowmask.record import RecordError
from tiny_models import (
    BUDGET,
    DTYPES,
    FAMILIES,
    GROUP,
    MAX_NEW_TOKENS,
    RECENT_WINDOW,
    STOPS,
    make_evictor,
    make_model,
    make_prompts,
    rollout,
    shared_model,
    shared_rollout,
)
from tolerances import PARITY, WRONG_RECORD

SCHEDULES = {"prompt-only": None, "decode-time": 5}
# the others decide per layer and head, so that a record with heads or layers exchanged is another record
SAME_FOR_ALL_HEADS = {"dense", "recent", "streaming", "tova"}
PER_HEAD_EVICTORS = [name for name in list_evictors() if name not in SAME_FOR_ALL_HEADS]


def parity_gap(model: torch.nn.Module, batch: RolloutBatch) -> float:
    """Largest difference of any completion token, in nats."""
    with torch.no_grad():
        replayed = shadow_logprobs(model, batch)
    assert [len(x) for x in replayed] == [len(c) for c in batch.completion_ids]
    return float((torch.cat(replayed) - torch.cat(batch.sparse_logprobs)).abs().max())


def assert_parity(model: torch.nn.Module, batch: RolloutBatch) -> None:
    dtype = next(model.parameters()).dtype
    gap = parity_gap(model, batch)
    assert gap <= PARITY[dtype], f"sampling gap {gap:.2e} nats in {dtype}"


def assert_rollout_is_hard(batch: RolloutBatch, evict_every: int | None) -> None:
    """The rollout really evicted, several times if it should, and is ragged with EOS inside."""
    lengths = {len(c) for c in batch.completion_ids}
    assert len(lengths) > 1 and max(lengths) == MAX_NEW_TOKENS
    assert any(c[-1] in STOPS and len(c) < MAX_NEW_TOKENS for c in batch.completion_ids)
    assert batch.shadow.retained_fraction() < 1
    moments = [set(entry.evicted_at.unique().tolist()) - {NEVER} for entry in batch.shadow]
    if evict_every is None:
        over_budget = [len(p) > BUDGET for p in batch.prompts_per_completion]
        assert any(over_budget) and not all(over_budget)
        for prompt, found, long in zip(batch.prompts_per_completion, moments, over_budget, strict=True):
            assert found <= {len(prompt)} and (not long or len(found) <= 1)
    else:
        assert max(len(found) for found in moments) >= 4


def cases() -> Iterator[Any]:
    """Everything in float64. In float32 decode-time eviction (which begins with the prompt's) for all, and
    prompt-only for one evictor; where nothing is evicted the schedule makes no difference. Most float32
    cases are slow: rounding is of the arithmetic that evictors share; what they select, float64 shows."""
    for family in FAMILIES:
        for evictor in list_evictors():
            for schedule in SCHEDULES:
                if evictor != "dense" or schedule == "prompt-only":
                    yield family, evictor, schedule, "float64"
                if evictor != "dense" and (schedule == "decode-time" or evictor == "snapkv"):
                    rare = family != "llama-gqa" and evictor != "snapkv"
                    marks = pytest.mark.slow if rare else ()
                    yield pytest.param(family, evictor, schedule, "float32", marks=marks)


@pytest.mark.parametrize(("family", "evictor", "schedule", "dtype"), [*cases()])
def test_learner_replays_the_sampler(family: str, evictor: str, schedule: str, dtype: str) -> None:
    model = shared_model(family, DTYPES[dtype])
    batch = shared_rollout(family, DTYPES[dtype], evictor, SCHEDULES[schedule])
    assert batch.sparse_logprobs[0].dtype == DTYPES[dtype]
    if evictor == "dense":
        assert batch.shadow.retained_fraction() == 1
    else:
        assert_rollout_is_hard(batch, SCHEDULES[schedule])
    assert_parity(model, batch)


@pytest.mark.parametrize("evictor", list_evictors())
def test_parity_with_bfloat16_weights(evictor: str) -> None:
    model = make_model("llama-gqa", torch.float32)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight *= 0.5  # rounding grows with the logits; these are as wide as trained ones
    model = model.to(torch.bfloat16)
    batch = rollout(model, evictor, evict_every=5)
    assert batch.sparse_logprobs[0].dtype == torch.float32
    assert_parity(model, batch)
    if evictor != "dense":
        with pytest.raises(AssertionError, match="sampling gap"):
            assert_parity(model, WRONG["no eviction"](batch))


@pytest.mark.parametrize("evictor", ["h2o", "snapkv"])
@pytest.mark.parametrize("temperature", [0.0, 0.7, 1.6])
def test_parity_at_other_temperatures(temperature: float, evictor: str) -> None:
    model = shared_model("gemma2")
    batch = rollout(model, evictor, evict_every=3, temperature=temperature)
    assert_parity(model, batch)
    if temperature:
        wrong = dataclasses.replace(batch, temperature=1.0)
        assert parity_gap(model, wrong) > WRONG_RECORD


@pytest.mark.parametrize("evict_every", [1, 2, 7, 23, 100])
def test_parity_for_any_schedule(evict_every: int) -> None:
    model = shared_model("llama-gqa")
    assert_parity(model, rollout(model, "snapkv", evict_every))


@pytest.mark.parametrize("family", FAMILIES)
def test_untouched_float64_models_keep_parity(family: str) -> None:
    """With the float32 casts that transformers has inside its norms, as users run them."""
    model = make_model(family, torch.float32).double()
    assert_parity(model, rollout(model, "h2o", evict_every=5))


def test_honest_float64_sees_rounding() -> None:
    """The widened norms let rounding through: were every gap exactly 0, a test could not see anything."""
    model = shared_model("llama-gqa")
    assert parity_gap(model, rollout(model, "snapkv", evict_every=5)) > 0


def test_first_completion_token_saw_the_full_prompt() -> None:
    model = shared_model("llama-gqa")
    batch = rollout(model, "snapkv")
    dense = dense_logprobs(model, batch)
    first = torch.stack([x[0] for x in dense]) - torch.stack([x[0] for x in batch.sparse_logprobs])
    later = torch.cat([x[1:] for x in dense]) - torch.cat([x[1:] for x in batch.sparse_logprobs])
    assert float(first.abs().max()) <= PARITY[torch.float64]
    assert float(later.abs().max()) > WRONG_RECORD


# -- negative controls ----------------------------------------------------------------------------


def with_entries(batch: RolloutBatch, change: Callable[[torch.Tensor, int], torch.Tensor]) -> RolloutBatch:
    """The batch with ``change(evicted_at, n)`` for every entry, under the *right* token hashes."""
    entries = []
    for n, entry in enumerate(batch.shadow):
        keys = torch.arange(entry.lengths[0], dtype=torch.int32)
        changed = change(entry.evicted_at.clone(), n)
        entries.append(torch.maximum(changed.to(torch.int32), keys + 1))
    shadow = ShadowMask.from_entries(entries, batch.prompts_per_completion, batch.completion_ids)
    return dataclasses.replace(batch, shadow=shadow)


def shifted(batch: RolloutBatch, by: int) -> RolloutBatch:
    return with_entries(batch, lambda e, n: torch.where(e == NEVER, e, e + by))


def neighbours(batch: RolloutBatch, offset: int) -> RolloutBatch:
    """Every completion gets the record of the one ``offset`` further, moved to its own prompt's end."""

    def change(evicted_at: torch.Tensor, n: int) -> torch.Tensor:
        other = batch.shadow[(n + offset) % len(batch.shadow)]
        moved = torch.full_like(evicted_at, NEVER)
        width = min(evicted_at.shape[-1], other.lengths[0])
        shift = batch.shadow.prompt_lengths[n] - other.prompt_lengths[0]
        source = other.evicted_at[..., :width]
        moved[..., :width] = torch.where(source == NEVER, source, (source + shift).clamp(min=1))
        return moved

    return with_entries(batch, change)


WRONG: dict[str, Callable[[RolloutBatch], RolloutBatch]] = {
    "one query late": lambda batch: shifted(batch, 1),
    "one query early": lambda batch: shifted(batch, -1),
    "no eviction": lambda batch: with_entries(batch, lambda e, n: torch.full_like(e, NEVER)),
    "heads exchanged": lambda batch: with_entries(batch, lambda e, n: e.flip(1)),
    "layers exchanged": lambda batch: with_entries(batch, lambda e, n: e.flip(0)),
    "one head for all": lambda batch: with_entries(batch, lambda e, n: e[:, :1]),
    "one layer for all": lambda batch: with_entries(batch, lambda e, n: e[:1]),
    "keys one further": lambda batch: with_entries(batch, lambda e, n: e.roll(1, dims=-1)),
    "another prompt's": lambda batch: neighbours(batch, GROUP),
    "without time": lambda batch: with_entries(batch, lambda e, n: torch.where(e == NEVER, e, 1)),
}


def controls() -> Iterator[tuple[str, str, str]]:
    """Prompt-only eviction leaves a simpler record: two families for it, all for decode-time eviction."""
    for family in FAMILIES:
        for schedule in SCHEDULES:
            for wrong in WRONG:
                if family == "llama-mqa" and "head" in wrong:
                    continue  # one KV head: nothing to exchange
                if schedule == "decode-time" or family in ("llama-gqa", "gemma2"):
                    yield family, schedule, wrong


@pytest.mark.parametrize(("family", "schedule", "wrong"), [*controls()])
def test_a_wrong_record_is_noticed(family: str, schedule: str, wrong: str) -> None:
    evict_every = SCHEDULES[schedule]
    batch = shared_rollout(family, torch.float64, "snapkv", evict_every)
    _assert_noticed(shared_model(family, torch.float64), WRONG[wrong](batch))


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("evictor", PER_HEAD_EVICTORS)
def test_a_wrong_record_is_noticed_in_float32(evictor: str, wrong: str) -> None:
    for evict_every in SCHEDULES.values():
        batch = shared_rollout("llama-gqa", torch.float32, evictor, evict_every)
        _assert_noticed(shared_model("llama-gqa", torch.float32), WRONG[wrong](batch))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_record_of_a_sibling_is_noticed(family: str) -> None:
    """In decode-time eviction the completions of one prompt keep different keys."""
    model = shared_model(family)
    for evictor in PER_HEAD_EVICTORS:
        _assert_noticed(model, neighbours(shared_rollout(family, torch.float64, evictor, 5), 1))


def _assert_noticed(model: torch.nn.Module, batch: RolloutBatch) -> None:
    try:
        gap = parity_gap(model, batch)
    except RecordError:
        return  # siblings that contradict each other about their prompt: noticed even earlier
    assert gap > WRONG_RECORD
    with pytest.raises(AssertionError, match="sampling gap"):
        assert_parity(model, batch)


def test_identity_controls_pass() -> None:
    """The machinery of the controls changes nothing by itself."""
    model = shared_model("llama-gqa")
    batch = rollout(model, "snapkv", evict_every=5)
    assert_parity(model, with_entries(batch, lambda e, n: e))
    assert_parity(model, shifted(batch, 0))
    assert_parity(model, neighbours(batch, 0))


def test_every_registered_evictor_is_under_test() -> None:
    assert set(list_evictors()) == set(EVICTORS)
    for name in EVICTORS:
        evictor = make_evictor(name)
        assert evictor.name == name
        assert name == "dense" or evictor.recent_window_for(BUDGET) == RECENT_WINDOW


def test_prompts_of_the_rollouts_are_ragged() -> None:
    lengths = [len(prompt) for prompt in make_prompts()]
    assert min(lengths) == 1 and max(lengths) > 2 * BUDGET
