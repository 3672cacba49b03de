"""What no evictor's scores may depend on, for every registered evictor."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowmask.eviction import EVICTORS, LayerView, list_evictors
from tiny_models import BUDGET, DTYPES, RECENT_WINDOW, make_evictor
from tiny_views import KV_HEADS, in_order, make_view, reordered
from tolerances import FLOAT32, FLOAT64, WRONG_RECORD

EVICTORS_AND_RULES = [
    pytest.param(name, rules, id=f"{name}-{next(iter(rules), 'plain')}")
    for name in list_evictors()
    for rules in ({}, {"softcap": 0.7}, {"sliding_window": 6})
]
BY_POSITION = {"dense", "recent", "streaming"}  # every layer and head scores alike
TENSORS = [
    field.name
    for field in dataclasses.fields(LayerView)
    if isinstance(getattr(make_view(3, 1), field.name), Tensor)
]


def window_of(name: str) -> int:
    return max(make_evictor(name).observation_window, 1)


def assert_same_scores(actual: Tensor, expected: Tensor, positions: Tensor, tolerance: float) -> None:
    """Equal in every occupied slot."""
    gap = (actual.double() - expected.double())[positions >= 0].abs().max()
    assert float(gap) <= tolerance


@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
@settings(deadline=None, max_examples=15)
@given(seed=st.integers(0, 10_000), tokens=st.integers(5, 24))
def test_slots_in_another_order_take_their_scores_along(
    name: str, rules: dict[str, Any], seed: int, tokens: int
) -> None:
    view = make_view(tokens, window_of(name), shuffled=True, seed=seed, **rules)
    order = torch.rand(view.positions.shape, generator=torch.Generator().manual_seed(seed)).argsort(dim=-1)
    evictor = make_evictor(name)
    moved = reordered(view, order)
    expected = in_order(evictor.score(view), order)
    assert_same_scores(evictor.score(moved), expected, moved.positions, FLOAT64)


@pytest.mark.parametrize("junk", [0.0, 1e30, torch.inf, torch.nan])
@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
def test_what_free_slots_hold_does_not_matter(name: str, rules: dict[str, Any], junk: float) -> None:
    view = make_view(17, window_of(name), shuffled=True, **rules)
    assert view.attention_received is not None
    free = view.positions < 0
    dirty = dataclasses.replace(
        view,
        keys=view.keys.masked_fill(free[..., None], junk),
        values=view.values.masked_fill(free[..., None], junk),
        attention_received=view.attention_received.masked_fill(free, junk),
    )
    evictor = make_evictor(name)
    assert_same_scores(evictor.score(dirty), evictor.score(view), view.positions, FLOAT64)


@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
def test_other_rows_do_not_matter(name: str, rules: dict[str, Any]) -> None:
    mine, other = (make_view(17, window_of(name), shuffled=True, seed=seed, **rules) for seed in (0, 1))
    both = {field: torch.cat([getattr(mine, field), getattr(other, field)]) for field in TENSORS}
    evictor = make_evictor(name)
    together = evictor.score(dataclasses.replace(mine, **both))
    assert_same_scores(together[:1], evictor.score(mine), mine.positions, FLOAT64)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
def test_scores_are_finite_and_wide_in_every_dtype(name: str, rules: dict[str, Any], dtype: str) -> None:
    view = in_dtype(make_view(17, window_of(name), shuffled=True, **rules), DTYPES[dtype])
    scores = make_evictor(name).score(view)
    assert scores.dtype in (torch.float32, torch.float64) and scores.shape == view.positions.shape
    assert bool(scores[view.positions >= 0].isfinite().all())


@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
def test_float32_scores_are_those_of_float64(name: str, rules: dict[str, Any]) -> None:
    view = make_view(17, window_of(name), shuffled=True, **rules)
    evictor = make_evictor(name)
    narrow = evictor.score(in_dtype(view, torch.float32))
    assert_same_scores(narrow, evictor.score(view), view.positions, FLOAT32)


def in_dtype(view: LayerView, dtype: torch.dtype) -> LayerView:
    """A model's view in that dtype; what the engine sums stays in float32 or wider."""
    assert view.attention_received is not None and view.window_queries is not None
    return dataclasses.replace(
        view,
        keys=view.keys.to(dtype),
        values=view.values.to(dtype),
        window_queries=view.window_queries.to(dtype),
        attention_received=view.attention_received.to(torch.promote_types(dtype, torch.float32)),
    )


@pytest.mark.parametrize(("name", "rules"), EVICTORS_AND_RULES)
def test_scoring_and_selecting_read_no_number(name: str, rules: dict[str, Any]) -> None:
    """On tensors without data: a host synchronisation or a shape that depends on data would raise."""
    view = make_view(17, window_of(name), shuffled=True, **rules)
    empty = dataclasses.replace(view, **{field: getattr(view, field).to("meta") for field in TENSORS})
    evictor = make_evictor(name, **{"share": "heads"} if "heads" in EVICTORS[name].shares else {})
    limits = (torch.tensor([n], device="meta") for n in (BUDGET, RECENT_WINDOW))
    keep = evictor.select(evictor.score(empty), empty.positions, empty.query_positions, *limits)
    assert keep.shape == view.positions.shape and keep.dtype == torch.bool


@pytest.mark.parametrize("name", list_evictors())
def test_a_prompt_shorter_than_every_window(name: str) -> None:
    """One token: one query, one key, and nothing to compare it with."""
    view = make_view(1, 1)
    evictor = make_evictor(name)
    limits = (view.query_positions, torch.tensor([BUDGET]), torch.tensor([RECENT_WINDOW]))
    assert bool(evictor.select(evictor.score(view), view.positions, *limits).all())


@pytest.mark.parametrize("name", [name for name in list_evictors() if name not in BY_POSITION])
def test_heads_have_scores_of_their_own(name: str) -> None:
    """The tests above would pass for a constant."""
    scores = make_evictor(name).score(make_view(17, window_of(name)))
    assert KV_HEADS == 2 and float((scores[0, 0] - scores[0, 1]).abs().max()) > WRONG_RECORD
    assert float(scores[0, 0].std()) > WRONG_RECORD
