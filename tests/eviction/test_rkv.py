"""R-KV against loops over pairs of keys."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shadowmask import get_evictor
from shadowmask.eviction import EVICTORS, LayerView, rkv
from shadowmask.eviction.rkv import key_redundancy
from tiny_views import by_position, heads_of, held, make_view, sees, slow_logit, slow_softmax
from tolerances import FLOAT64, HAND_COMPUTED


def slow_importance(view: LayerView, kv_head: int, recent: int, kernel: int) -> dict[int, float]:
    assert view.window_positions is not None
    slots = held(view, kv_head)
    last = int(view.query_positions[0])
    rows = [row for row, p in enumerate(view.window_positions[0].tolist()) if p >= 0]
    mean = dict.fromkeys(slots, 0.0)
    for row in rows:
        logits = {
            p: max(slow_logit(view, head, row, slot) for head in heads_of(kv_head))
            for p, slot in slots.items()
            if sees(view, row, p) and p <= last - recent
        }
        for p, weight in slow_softmax(logits).items():
            mean[p] += weight / len(rows)
    held_positions = list(slots)
    return {
        p: max(mean[q] for q in held_positions[max(n - kernel // 2, 0) : n + kernel // 2 + 1])
        for n, p in enumerate(held_positions)
    }


def slow_redundancy(view: LayerView, kv_head: int, threshold: float) -> dict[int, float]:
    keys = {p: view.keys[0, kv_head, slot] for p, slot in held(view, kv_head).items()}
    similarity = {
        (p, q): float(a @ b) / math.sqrt(float(a @ a) * float(b @ b))
        for p, a in keys.items()
        for q, b in keys.items()
        if p != q
    }
    for p in keys:
        alike = [q for q in keys if q != p and similarity[p, q] > threshold]
        if alike:
            similarity[p, max(alike)] = 0.0
    return slow_softmax({q: sum(similarity[p, q] for p in keys if p != q) / len(keys) for q in keys})


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("block", [1, 3, 128])
@pytest.mark.parametrize("rules", [{}, {"softcap": 0.7}, {"sliding_window": 9}], ids=str)
def test_scores(rules: dict[str, Any], block: int, shuffled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rkv, "BLOCK_ROWS", block)
    view = make_view(17, 4, shuffled, **rules)
    settings: dict[str, Any] = {"observation_window": 4, "kernel_size": 3, "similarity_threshold": 0.3}
    evictor = get_evictor("rkv", budget=64, importance_weight=0.6, **settings)
    for kv_head, mine in enumerate(by_position(evictor.score(view), view)):
        important = slow_importance(view, kv_head, 4, 3)
        redundant = slow_redundancy(view, kv_head, 0.3)
        expected = {p: 0.6 * important[p] - 0.4 * redundant[p] for p in important}
        assert mine == pytest.approx(expected, abs=FLOAT64)


@pytest.mark.parametrize("recent", [1, 4, 30])
def test_importance_with_any_recent_window_and_missing_rows(recent: int) -> None:
    """A window of three of which one query does not exist; a recent window longer than all keys."""
    view = make_view(6, 3, window_positions=torch.tensor([[5, -1, 4]], dtype=torch.int32))
    evictor = EVICTORS["rkv"](
        budget=64, recent_window=recent, observation_window=3, importance_weight=1.0, kernel_size=1
    )
    for kv_head, mine in enumerate(by_position(evictor.score(view), view)):
        assert mine == pytest.approx(slow_importance(view, kv_head, recent, 1), abs=FLOAT64)


def test_a_small_limit_on_numbers_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    view = make_view(17, 4, shuffled=True)
    whole = key_redundancy(view.keys, view.positions, 0.3)
    monkeypatch.setattr(rkv, "BLOCK_NUMBERS", 1)
    gap = (key_redundancy(view.keys, view.positions, 0.3) - whole).abs().max()
    assert float(gap) <= FLOAT64


def test_redundancy_by_hand() -> None:
    """Three equal keys and one apart. The first two spare the third, the third spares the second: sums of
    similarities 2, 2 - 1, 2 - 2, 0, over four keys."""
    keys = torch.tensor([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [0.0, 1.0]])[None, None]
    redundancy = key_redundancy(keys, torch.tensor([[[0, 1, 2, 3]]]), 0.5)
    weights = [math.exp(x / 4) for x in (2, 1, 0, 0)]
    assert redundancy[0, 0].tolist() == pytest.approx([w / sum(weights) for w in weights], abs=HAND_COMPUTED)
    assert bool((redundancy.argsort(dim=-1)[..., -2:] == torch.tensor([1, 0])).all())


def test_published_defaults_and_settings() -> None:
    evictor = EVICTORS["rkv"](budget=64)
    assert (evictor.observation_window, evictor.kernel_size, evictor.recent_window_for(64)) == (8, 7, 8)
    assert (evictor.importance_weight, evictor.similarity_threshold) == (0.1, 0.5)
    for settings in ({"observation_window": 0}, {"kernel_size": 4}, {"importance_weight": 1.5}):
        with pytest.raises(ValueError, match=next(iter(settings))):
            get_evictor("rkv", budget=64, **settings)
