"""Budget arithmetic, selection and the registry: what every evictor shares."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from shadowmask import get_evictor, list_evictors
from shadowmask.eviction import EVICTORS, Evictor, LayerView
from shadowmask.eviction.base import window_attention
from tiny_views import KV_HEADS, PER_KV, make_view
from tolerances import FLOAT64, WRONG_RECORD

EVICTING = [name for name in list_evictors() if name != "dense"]


class Plain(Evictor):
    """An evictor as a user would write it: a name and a score."""

    name = "plain"
    default_recent_window = 1

    def score(self, view: LayerView) -> Tensor:
        return view.positions.float()


def choose(
    evictor: Evictor, scores: Tensor, positions: Tensor, query: int, budget: int, recent: int
) -> list[list[int]]:
    """Positions that stay, per head, of one sequence."""
    keep = evictor.select(
        scores[None], positions[None], torch.tensor([query]), torch.tensor([budget]), torch.tensor([recent])
    )
    return [sorted(row[k].tolist()) for row, k in zip(positions, keep[0], strict=True)]


@st.composite
def caches(draw: st.DrawFn) -> tuple[list[int], list[float], int, int, int, int]:
    """Occupied positions in any order with free slots between, scores (with ties), and the limits."""
    tokens = draw(st.integers(1, 12))
    held = draw(st.sets(st.integers(0, tokens - 1), min_size=1))
    slots = draw(st.permutations([*held, *[-1] * draw(st.integers(0, 4))]))
    scores = draw(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 2.0]), min_size=len(slots), max_size=len(slots)))
    sinks, recent = draw(st.integers(0, 3)), draw(st.integers(1, 3))
    budget = sinks + recent + draw(st.integers(0, 5))
    return slots, scores, tokens, sinks, recent, budget


def slow_choice(
    slots: list[int], scores: list[float], tokens: int, sinks: int, recent: int, budget: int
) -> list[int]:
    """Protected first, then by score, ties to the later position."""
    held = [(p, s) for p, s in zip(slots, scores, strict=True) if p >= 0]
    protected = [p for p, _ in held if p < sinks or p > tokens - 1 - recent]
    others = sorted(((s, p) for p, s in held if p not in protected), reverse=True)
    return sorted(protected + [p for _, p in others[: budget - len(protected)]])


@given(caches())
def test_selection_equals_the_slow_one(cache: tuple[list[int], list[float], int, int, int, int]) -> None:
    slots, scores, tokens, sinks, recent, budget = cache
    evictor = Plain(budget=budget, num_sinks=sinks, recent_window=recent)
    kept = choose(evictor, torch.tensor([scores]), torch.tensor([slots]), tokens - 1, budget, recent)[0]
    assert kept == slow_choice(*cache)
    held = [p for p in slots if p >= 0]
    assert len(kept) == min(budget, len(held))
    assert {p for p in held if p < sinks or p > tokens - 1 - recent} <= set(kept)


@given(caches(), st.randoms())
def test_selection_ignores_the_order_of_slots(
    cache: tuple[list[int], list[float], int, int, int, int], random: object
) -> None:
    slots, scores, tokens, sinks, recent, budget = cache
    order = list(range(len(slots)))
    random.shuffle(order)  # type: ignore[attr-defined]
    evictor = Plain(budget=budget, num_sinks=sinks, recent_window=recent)
    limits = (tokens - 1, budget, recent)
    mixed = [torch.tensor([[x[n] for n in order]]) for x in (scores, slots)]
    assert choose(evictor, *mixed, *limits) == choose(
        evictor, torch.tensor([scores]), torch.tensor([slots]), *limits
    )


def test_scores_in_free_slots_do_not_matter() -> None:
    evictor = Plain(budget=3, num_sinks=0, recent_window=1)
    positions = torch.tensor([[4, -1, 2, 3, -1, 0]])
    for junk in (torch.inf, -torch.inf, torch.nan):
        scores = torch.tensor([[0.0, junk, 5.0, 1.0, junk, 3.0]])
        assert choose(evictor, scores, positions, 4, 3, 1) == [[0, 2, 4]]


def test_heads_choose_for_themselves() -> None:
    scores = torch.tensor([[9.0, 0.0, 0.0, 0.0], [0.0, 0.0, 9.0, 0.0]])
    positions = torch.arange(4).expand(2, -1)
    assert choose(Plain(budget=2, num_sinks=0), scores, positions, 3, 2, 1) == [[0, 3], [2, 3]]


@pytest.mark.parametrize(
    ("ratio", "prompt", "expected"),
    [
        (0.5, 100, 50),
        (0.5, 101, 51),
        (0.75, 100, 25),
        (0.9, 64, 6),
        (0.25, 10, 8),
        (0.99, 40, 5),
        (0.5, 3, 5),
    ],
)
def test_a_ratio_is_what_is_removed(ratio: float, prompt: int, expected: int) -> None:
    """Rounded half up, never below 4 sinks + 1 recent."""
    assert Plain(compression_ratio=ratio).budget_for(prompt) == expected


def test_ratio_zero_has_no_budget_at_all() -> None:
    assert Plain(compression_ratio=0.0).budget_for(10_000) is None
    assert get_evictor("dense").budget_for(5) is None


@given(st.floats(0.001, 0.999), st.integers(1, 5000))
def test_a_budget_by_ratio_holds_what_is_protected(ratio: float, prompt: int) -> None:
    for name in EVICTING:
        evictor = get_evictor(name, compression_ratio=ratio)
        budget = evictor.budget_for(prompt)
        assert budget is not None and budget >= 1
        if name != "h2o":  # its window is a part of the budget itself
            assert budget >= evictor.num_sinks + evictor.recent_window_for(budget)


@pytest.mark.parametrize("name", EVICTING)
@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "exactly one of budget and compression_ratio, got budget=None and compression_ratio=None"),
        ({"budget": 64, "compression_ratio": 0.5}, "exactly one of budget and compression_ratio"),
        ({"compression_ratio": 1.0}, r"compression_ratio=1.0 is outside \[0, 1\)"),
        ({"compression_ratio": -0.1}, r"compression_ratio=-0.1 is outside \[0, 1\)"),
        ({"budget": 64, "num_sinks": -1}, "num_sinks=-1 is negative"),
        ({"budget": 64, "recent_window": 0}, "recent_window=0 must be at least 1"),
        ({"budget": 9, "recent_window": 8, "num_sinks": 2}, "raise the budget to at least 10"),
        ({"budget": 0, "num_sinks": 0, "recent_window": 1}, "budget=0 is below"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_bad_settings_are_one_clear_line(name: str, settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        get_evictor(name, **settings)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", EVICTING)
def test_the_smallest_legal_budget(name: str) -> None:
    evictor = get_evictor(name, budget=10, recent_window=8, num_sinks=2)
    assert evictor.budget_for(1000) == 10 and evictor.recent_window_for(10) == 8


def test_published_defaults() -> None:
    assert get_evictor("snapkv", budget=512).recent_window_for(512) == 32
    assert EVICTORS["snapkv"](budget=512).observation_window == 32
    assert EVICTORS["snapkv"](budget=512).kernel_size == 5
    assert get_evictor("h2o", budget=512).recent_window_for(512) == 254  # half of what sinks leave
    assert {get_evictor(name, budget=512).num_sinks for name in EVICTING} == {4}


@pytest.mark.parametrize(
    ("typed", "meant"), [("snapvk", "snapkv"), ("rand", "random"), ("h20", "h2o"), ("recnt", "recent")]
)
def test_an_unknown_name_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(ValueError, match=f"unknown evictor '{typed}'. Did you mean '{meant}'"):
        get_evictor(typed, budget=64)


def test_a_name_like_no_other_lists_them_all() -> None:
    with pytest.raises(ValueError, match=f"Known: {', '.join(list_evictors())}"):
        get_evictor("zzzzzzzz", budget=64)


def test_settings_an_evictor_does_not_take_are_named() -> None:
    with pytest.raises(ValueError, match=r"evictor 'recent' does not take these settings: .*kernel_size"):
        get_evictor("recent", budget=64, kernel_size=3)


def test_repr_names_the_size() -> None:
    assert repr(get_evictor("recent", budget=64)) == "RecentEvictor(budget=64, num_sinks=4)"
    assert "compression_ratio=0.5" in repr(get_evictor("snapkv", compression_ratio=0.5))


def test_sinks_take_their_share_of_the_attention() -> None:
    view = make_view(9, 3)
    plain = window_attention(view)
    sinks = torch.linspace(-1, 2, KV_HEADS * PER_KV).double()
    sunk = window_attention(dataclasses.replace(view, sink_logits=sinks))
    # by hand, for the first KV head and the last query
    assert view.window_queries is not None
    logits = view.window_queries[0, :PER_KV, 2] @ view.keys[0, 0].T * view.scaling
    exp = logits.exp()
    shares = exp / (exp.sum(-1, keepdim=True) + sinks[:PER_KV, None].exp())
    assert float((sunk[0, 0, 2] - shares.mean(0)).abs().max()) <= FLOAT64
    assert float((sunk - plain).abs().max()) > WRONG_RECORD
