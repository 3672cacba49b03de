"""TOVA against a loop over heads and positions."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shadowmask import get_evictor
from shadowmask.eviction import LayerView
from shadowmask.eviction.base import mean_over_heads
from tiny_views import KV_HEADS, PER_KV, by_position, held, make_view, slow_weights
from tolerances import FLOAT64, HAND_COMPUTED


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("rules", [{}, {"softcap": 0.7}, {"sliding_window": 6}], ids=str)
def test_the_last_query_over_all_heads(rules: dict[str, Any], shuffled: bool) -> None:
    view = make_view(14, 1, shuffled, same_keys=True, **rules)
    evictor = get_evictor("tova", budget=64)
    actual = by_position(mean_over_heads(evictor.score(view), view.positions), view)
    heads = range(KV_HEADS * PER_KV)
    weights = [slow_weights(view, head, 0) for head in heads]
    expected = {p: sum(w.get(p, 0.0) for w in weights) / len(heads) for p in held(view, 0)}
    for mine in actual:
        assert mine == pytest.approx(expected, abs=FLOAT64)


def test_by_hand() -> None:
    """Weights 1/4 and 3/4 of one head, 1/2 and 1/2 of the other: 3/8 and 5/8 on average."""
    log = math.log
    view = LayerView(
        layer=0,
        keys=torch.tensor([[[[log(1.0)], [log(3.0)]], [[log(2.0)], [log(2.0)]]]]),
        values=torch.zeros(1, 2, 2, 1),
        positions=torch.tensor([[[0, 1], [0, 1]]]),
        query_positions=torch.tensor([1]),
        seeds=torch.tensor([0]),
        scaling=1.0,
        window_queries=torch.ones(1, 2, 1, 1),
        window_positions=torch.tensor([[1]]),
    )
    scores = get_evictor("tova", budget=64).score(view)
    assert scores[0, 0].tolist() == pytest.approx([1 / 4, 3 / 4], abs=HAND_COMPUTED)
    mean = mean_over_heads(scores, view.positions)
    assert mean[0, 0].tolist() == pytest.approx([3 / 8, 5 / 8], abs=HAND_COMPUTED)
    assert torch.equal(mean[0, 0], mean[0, 1])


def test_published_defaults() -> None:
    evictor = get_evictor("tova", budget=64)
    assert evictor.share == "heads" and evictor.observation_window == 1
    assert get_evictor("tova", budget=64, share="none").share == "none"
