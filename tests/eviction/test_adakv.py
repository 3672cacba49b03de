"""Ada-KV: heads compete inside a layer, and what they keep takes no more memory than even budgets."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import shadowmask.rollout
from shadowmask import RolloutEngine, get_evictor
from shadowmask.cache import OwnedSlotCache, SharedPromptCache, slot_bytes
from tiny_models import BUDGET, GROUP, MAX_NEW_TOKENS, make_evictor, make_prompts, rollout, shared_model
from tiny_views import KV_HEADS, by_position, heads_of, held, make_view, slow_weights
from tolerances import FLOAT64

LAYERS, HEAD_DIM = 2, 16


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("rules", [{}, {"softcap": 0.7}, {"sliding_window": 6}], ids=str)
def test_scores_are_the_pooled_maximum(rules: dict[str, Any], shuffled: bool) -> None:
    view = make_view(14, 4, shuffled, **rules)
    evictor = get_evictor("adakv", budget=8, num_sinks=0, observation_window=4, kernel_size=3)
    actual = by_position(evictor.score(view), view)
    for kv_head in range(KV_HEADS):
        positions = list(held(view, kv_head))
        received = dict.fromkeys(positions, 0.0)
        for head in heads_of(kv_head):
            for row in range(4):
                for position, weight in slow_weights(view, head, row).items():
                    received[position] += weight / len(heads_of(kv_head))
        near = {p: positions[max(n - 1, 0) : n + 2] for n, p in enumerate(positions)}
        expected = {p: max(received[q] for q in near[p]) for p in positions}
        assert actual[kv_head] == pytest.approx(expected, abs=FLOAT64)


def choose(scores: list[list[float]], budget: int, recent: int, floor: float, sinks: int = 0) -> list[Any]:
    evictor = get_evictor(
        "adakv", budget=budget, num_sinks=sinks, recent_window=recent, observation_window=1, floor=floor
    )
    given = torch.tensor([scores])
    positions = torch.arange(given.shape[2]).expand_as(given)
    limits = (torch.tensor([n]) for n in (given.shape[2] - 1, budget, recent))
    keep = evictor.select(given, positions, *limits)[0]
    return [row.nonzero().flatten().tolist() for row in keep]


def test_heads_compete_by_hand() -> None:
    scores = [[9.0, 8.0, 7.0, 6.0, 0.0], [1.0, 5.0, 0.5, 0.2, 0.0]]
    # six of ten stay, the last of each head in any case; the best four are all of the first head
    assert choose(scores, budget=3, recent=1, floor=0.0) == [[0, 1, 2, 3, 4], [4]]
    # two in every head for sure: the one that stays anyway, and the best
    assert choose(scores, budget=3, recent=1, floor=0.7) == [[0, 1, 2, 4], [1, 4]]
    assert choose(scores, budget=3, recent=1, floor=1.0) == [[0, 1, 4], [0, 1, 4]]


def slow_choice(
    scores: list[list[float]], budget: int, recent: int, floor: float, sinks: int
) -> list[list[int]]:
    tokens = len(scores[0])
    stay = [{p for p in range(tokens) if p < sinks or p >= tokens - recent} for _ in scores]
    for head, mine in enumerate(stay):
        for p in sorted(range(tokens), key=lambda p: (scores[head][p], p), reverse=True):
            if len(mine) < int(floor * budget):
                mine.add(p)
    rest = [(s, p, -h) for h, row in enumerate(scores) for p, s in enumerate(row) if p not in stay[h]]
    for _, p, h in sorted(rest, reverse=True)[: budget * len(scores) - sum(map(len, stay))]:
        stay[-h].add(p)
    return [sorted(mine) for mine in stay]


@given(st.data(), st.sampled_from([0.0, 0.2, 0.5, 1.0]), st.integers(1, 4), st.integers(4, 9))
def test_the_choice_against_sets(data: st.DataObject, floor: float, heads: int, budget: int) -> None:
    # few values, so that there are ties
    row = st.lists(st.sampled_from([0.0, 1.0, 2.0, 3.0]), min_size=12, max_size=12)
    scores = data.draw(st.lists(row, min_size=heads, max_size=heads))
    mine = choose(scores, budget, 2, floor, sinks=1)
    assert mine == slow_choice(scores, budget, 2, floor, sinks=1)
    assert sum(map(len, mine)) == heads * budget


def test_the_floor_is_checked() -> None:
    with pytest.raises(ValueError, match=r"floor=1\.5 is outside"):
        get_evictor("adakv", budget=512, floor=1.5)
    with pytest.raises(ValueError, match="share='heads' is none of none"):
        get_evictor("adakv", budget=512, share="heads")


def alive(evicted_at: Tensor, moment: int) -> Tensor:
    return (evicted_at[..., :moment] > moment).sum(-1)


@pytest.mark.parametrize("evict_every", [None, 5])
def test_ragged_heads_take_the_bytes_of_the_budget(
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
    model, prompts = shared_model(), make_prompts((60, 40))
    ragged, even = (
        RolloutEngine(model, None, make_evictor(name), evict_every).generate(
            prompts, GROUP, MAX_NEW_TOKENS, stop_token_ids=[], seed=0
        )
        for name in ("adakv", "snapkv")
    )
    assert ragged.kv_bytes_peak == even.kv_bytes_peak
    tensors = [x for s in made[0].layers.values() for x in vars(s).values() if isinstance(x, Tensor)]
    float_bytes = sum(x.untyped_storage().nbytes() for x in tensors if x.dtype == torch.float64)
    queries = sum(
        s.window_queries.nbytes
        for s in made[0].layers.values()
        if getattr(s, "window_queries", None) is not None
    )
    assert float_bytes - queries == made[0].nbytes == made[1].nbytes
    one = slot_bytes(1, KV_HEADS, HEAD_DIM, HEAD_DIM, itemsize=8)
    assert ragged.kv_bytes_peak == one * 60 + made[0].nbytes
    kept = torch.stack([alive(entry.evicted_at, 60) for entry in ragged.shadow[:GROUP]])
    assert kept.sum(-1).unique().tolist() == [KV_HEADS * BUDGET]
    assert int(kept.max()) > BUDGET > int(kept.min()), "heads keep the same number: nothing is ragged"


@pytest.mark.parametrize("evict_every", [None, 5])
def test_with_a_full_floor_it_is_an_even_budget(evict_every: int | None) -> None:
    """Slots in one pool for all heads, and one set each: the same rollout, up to rounding."""
    settings = {"floor": 1.0, "kernel_size": 1}
    pooled = rollout(shared_model(), make_evictor("adakv", **settings), evict_every)
    even = rollout(shared_model(), make_evictor("snapkv", kernel_size=1), evict_every)
    assert torch.equal(pooled.shadow.evicted_at, even.shadow.evicted_at)
    gap = torch.cat(pooled.sparse_logprobs) - torch.cat(even.sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT64
