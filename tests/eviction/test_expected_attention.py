"""Expected attention against explicit means and covariance matrices of the queries."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shadowmask import get_evictor
from shadowmask.eviction import EVICTORS, LayerView
from tiny_views import by_position, heads_of, held, make_view, slow_logit, slow_softmax
from tolerances import FLOAT64, HAND_COMPUTED

SINKS = 2


def rows_of(view: LayerView) -> list[int]:
    assert view.window_positions is not None
    return [row for row, p in enumerate(view.window_positions[0].tolist()) if p >= SINKS]


def normal_logit(view: LayerView, head: int, slot: int, kv_head: int) -> float:
    """m.k + k.C.k / 2 with the sample's mean and covariance written out."""
    assert view.window_queries is not None
    queries = view.window_queries[0, head, rows_of(view)] * view.scaling
    mean = queries.mean(dim=0)
    covariance = (queries - mean).T @ (queries - mean) / len(queries)
    key = view.keys[0, kv_head, slot]
    return float(mean @ key + key @ covariance @ key / 2)


def capped_logit(view: LayerView, head: int, slot: int) -> float:
    logits = [slow_logit(view, head, row, slot) for row in rows_of(view)]
    mean = sum(logits) / len(logits)
    return mean + sum((x - mean) ** 2 for x in logits) / len(logits) / 2


def slow_expected(view: LayerView, kv_head: int) -> dict[int, float]:
    slots = {p: slot for p, slot in held(view, kv_head).items() if p >= SINKS}
    scores = dict.fromkeys(held(view, kv_head), 0.0)
    after = int(view.query_positions[0]) + 1
    if view.sliding_window is not None:
        slots = {p: slot for p, slot in slots.items() if p > after - view.sliding_window}
    for head in heads_of(kv_head):
        if view.softcap is None:
            logits = {p: normal_logit(view, head, slot, kv_head) for p, slot in slots.items()}
        else:
            logits = {p: capped_logit(view, head, slot) for p, slot in slots.items()}
        for p, weight in slow_softmax(logits).items():
            value = view.values[0, kv_head, slots[p]]
            scores[p] += weight * math.sqrt(float(value @ value)) / len(heads_of(kv_head))
    return scores


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("rules", [{}, {"softcap": 0.7}, {"sliding_window": 6}], ids=str)
def test_mean_and_covariance_of_the_queries(rules: dict[str, Any], shuffled: bool) -> None:
    view = make_view(14, 4, shuffled, **rules)
    evictor = get_evictor("expected-attention", budget=64, num_sinks=SINKS, observation_window=4)
    for kv_head, mine in enumerate(by_position(evictor.score(view), view)):
        assert mine == pytest.approx(slow_expected(view, kv_head), abs=FLOAT64)


def test_queries_of_sinks_and_missing_ones_are_left_out() -> None:
    early = make_view(5, 4, window_positions=torch.tensor([[4, -1, 1, 3]], dtype=torch.int32))
    evictor = get_evictor("expected-attention", budget=64, num_sinks=SINKS, observation_window=4)
    for kv_head, mine in enumerate(by_position(evictor.score(early), early)):
        assert mine == pytest.approx(slow_expected(early, kv_head), abs=FLOAT64)


def test_by_hand() -> None:
    """Queries 1 and 3: key 1 has logits of mean 2 and variance 1, so exp(2.5) against exp(0) of key 0."""
    view = LayerView(
        layer=0,
        keys=torch.tensor([[[[1.0], [0.0]]]]),
        values=torch.tensor([[[[2.0], [-3.0]]]]),
        positions=torch.tensor([[[0, 1]]]),
        query_positions=torch.tensor([1]),
        seeds=torch.tensor([0]),
        scaling=1.0,
        window_queries=torch.tensor([[[[1.0], [3.0]]]]),
        window_positions=torch.tensor([[0, 1]]),
    )
    scores = get_evictor("expected-attention", budget=64, num_sinks=0).score(view)
    share = math.exp(2.5) / (math.exp(2.5) + 1)
    assert scores[0, 0].tolist() == pytest.approx([share * 2, (1 - share) * 3], abs=HAND_COMPUTED)


def test_defaults_and_settings() -> None:
    assert EVICTORS["expected-attention"](budget=64).observation_window == 64
    with pytest.raises(ValueError, match="observation_window=0 must be at least 1"):
        get_evictor("expected-attention", budget=64, observation_window=0)
