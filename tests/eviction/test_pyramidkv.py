"""PyramidKV: the budget of every layer, and that memory is allocated by it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import shadowmask.rollout
from shadowmask import RolloutEngine, get_evictor
from shadowmask.cache import OwnedSlotCache, SharedPromptCache, slot_bytes
from shadowmask.eviction.pyramidkv import PyramidKVEvictor
from tiny_models import BUDGET, MAX_NEW_TOKENS, layer_budgets, make_evictor, make_prompts, shared_model
from tiny_views import make_view
from tolerances import FLOAT64

LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16


def pyramid(budget: int, beta: int = 20, sinks: int = 4, window: int = 64) -> PyramidKVEvictor:
    settings = {"num_sinks": sinks, "observation_window": window, "beta": beta}
    evictor = get_evictor("pyramidkv", budget=budget, **settings)
    assert isinstance(evictor, PyramidKVEvictor)
    return evictor


def test_budgets_by_hand() -> None:
    """Without what stays 200: the last layer keeps 200 / 20 = 10 of them, the first 390, steps of 95."""
    assert pyramid(268).layer_budgets(268, 4096, 5) == (458, 363, 268, 173, 78)
    # an even number of layers has no middle: steps of 380 / 3, rounded in pairs
    assert pyramid(268).layer_budgets(268, 4096, 4) == (458, 331, 205, 78)


def test_no_layer_keeps_more_than_there_is() -> None:
    assert pyramid(268).layer_budgets(268, 300, 5) == (300, 284, 268, 252, 236)
    assert pyramid(268).layer_budgets(268, 268, 5) == pyramid(268).layer_budgets(268, 9, 5) == (268,) * 5


def test_one_layer_keeps_the_budget() -> None:
    assert pyramid(268).layer_budgets(268, 4096, 1) == (268,)


@given(st.integers(0, 500), st.integers(1, 3000), st.integers(1, 60), st.integers(1, 40))
def test_budgets_fall_and_add_up(more: int, tokens: int, layers: int, beta: int) -> None:
    budget = 68 + more
    budgets = pyramid(budget, beta).layer_budgets(budget, tokens, layers)
    assert len(budgets) == layers and sum(budgets) == budget * layers
    assert list(budgets) == sorted(budgets, reverse=True)
    assert min(budgets) >= 68 + more // beta or tokens < budget + more - more // beta
    assert min(budgets) >= 68 and max(budgets) <= max(tokens, budget)


def test_scores_are_those_of_snapkv() -> None:
    view = make_view(14, 4, shuffled=True)
    ours, theirs = (make_evictor(name).score(view) for name in ("pyramidkv", "snapkv"))
    assert float((ours - theirs).abs().max()) <= FLOAT64


def test_beta_is_checked() -> None:
    with pytest.raises(ValueError, match="beta=0 must be at least 1"):
        get_evictor("pyramidkv", budget=512, beta=0)


@pytest.mark.parametrize("evict_every", [None, 5])
def test_each_layer_has_its_own_number_of_slots(
    evict_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Any] = []

    def watched(base: Any) -> Any:
        class Watched(base):
            def __init__(self, *args: Any) -> None:
                super().__init__(*args)
                made.append(self)

        return Watched

    monkeypatch.setattr(shadowmask.rollout, "SharedPromptCache", watched(SharedPromptCache))
    monkeypatch.setattr(shadowmask.rollout, "OwnedSlotCache", watched(OwnedSlotCache))
    engine = RolloutEngine(shared_model(), None, make_evictor("pyramidkv"), evict_every)
    batch = engine.generate(make_prompts((60, 40)), 3, MAX_NEW_TOKENS, stop_token_ids=[], seed=0)
    (cache,) = made
    budgets = layer_budgets("pyramidkv", 60, evict_every)
    assert budgets[0] > budgets[1] and sum(budgets) == LAYERS * BUDGET
    for layer, budget in enumerate(budgets):
        slots = cache.layers[layer]
        if evict_every is None:
            assert slots.prompt_keys.shape[2] == slots.prompt_values.shape[2] == budget
        else:
            assert slots.keys.shape[2] == slots.values.shape[2] == budget + evict_every
    one = slot_bytes(1, KV_HEADS, HEAD_DIM, HEAD_DIM, itemsize=8)
    total = LAYERS * BUDGET  # as with any evictor of that budget
    rows = 2 * total + 6 * LAYERS * (MAX_NEW_TOKENS - 1) if evict_every is None else 6 * (total + LAYERS * 5)
    assert batch.kv_bytes_peak == one * (rows + 60)
    alive = (batch.shadow[0].evicted_at[..., :60] > 60).sum(-1)
    assert alive.tolist() == [[n, n] for n in budgets]


@pytest.mark.parametrize("evict_every", [None, 5])
def test_a_budget_above_the_length_is_dense(evict_every: int | None) -> None:
    model, prompts = shared_model(), make_prompts()
    longest = max(map(len, prompts)) + MAX_NEW_TOKENS
    batches = [
        RolloutEngine(model, None, evictor, evict_every).generate(prompts, 2, MAX_NEW_TOKENS, seed=1)
        for evictor in (make_evictor("pyramidkv", budget=longest), make_evictor("dense"))
    ]
    assert batches[0].completion_ids == batches[1].completion_ids
    assert batches[0].shadow.retained_fraction() == 1
    gap = torch.cat(batches[0].sparse_logprobs) - torch.cat(batches[1].sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT64
