"""LagKV against loops over partitions, tokens and channels."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from shadowmask import get_evictor
from shadowmask.eviction import EVICTORS, LayerView
from tiny_views import by_position, held, make_view, view_of_keys


def slow_spread(partition: list[list[float]], following: list[list[float]]) -> list[float]:
    """Softmax over a partition of the standard deviation of each token's scaled channels."""
    low = [min(channel) for channel in zip(*following, strict=True)]
    high = [max(channel) for channel in zip(*following, strict=True)]
    deviations = []
    for token in partition:
        scaled = [(x - a) / (b - a) if b > a else 0.0 for x, a, b in zip(token, low, high, strict=True)]
        deviations.append(statistics.stdev(scaled))
    total = sum(math.exp(d) for d in deviations)
    return [math.exp(d) / total for d in deviations]


def slow_lagkv(view: LayerView, head: int, sinks: int, lag: int) -> dict[int, float]:
    slots = held(view, head)
    others = [p for p in slots if p >= sinks]
    partitions = [others[n : n + lag] for n in range(0, len(others), lag)]
    scores = dict.fromkeys(slots, 1.0)
    for mine, following in itertools.pairwise(partitions):
        if len(following) < lag:
            continue
        key, value = (
            slow_spread(*([states[0, head, slots[p]].tolist() for p in part] for part in (mine, following)))
            for states in (view.keys, view.values)
        )
        spread = {p: k + v for p, k, v in zip(mine, key, value, strict=True)}
        for rank, p in enumerate(sorted(mine, key=lambda p: (spread[p], p))):
            scores[p] = rank / lag
    return {p: s for p, s in scores.items() if p >= sinks}


@pytest.mark.parametrize("lag", [2, 3, 5, 8])
@pytest.mark.parametrize("tokens", [4, 16, 23])
@pytest.mark.parametrize("shuffled", [False, True])
def test_ranks_within_partitions(shuffled: bool, tokens: int, lag: int) -> None:
    view = make_view(tokens, 1, shuffled)
    scores = EVICTORS["lagkv"](budget=64, num_sinks=2, lag_size=lag).score(view)
    for head, mine in enumerate(by_position(scores, view)):
        assert {p: s for p, s in mine.items() if p >= 2} == pytest.approx(slow_lagkv(view, head, 2, lag))


def by_hand(tokens: list[list[float]]) -> list[float]:
    """Scores behind one sink, in partitions of two."""
    evictor = get_evictor("lagkv", budget=64, num_sinks=1, lag_size=2)
    return evictor.score(view_of_keys(tokens))[0, 0].tolist()[1:]


def test_hand_computed_ranks() -> None:
    """Behind a sink: (5,5) is even and (0,2) uneven against the range 0..1 of the next two tokens, which
    are the last full partition, and one token follows."""
    tokens = [[9.0, 9.0], [0.0, 2.0], [5.0, 5.0], [0.0, 1.0], [1.0, 0.0], [3.0, 3.0]]
    assert by_hand(tokens) == [0.5, 0.0, 1.0, 1.0, 1.0]


def test_of_equal_tokens_the_later_is_higher_and_constant_channels_count_nothing() -> None:
    assert by_hand([[1.0, 1.0]] * 5) == [0.0, 0.5, 1.0, 1.0]
    constant = [[9.0, 9.0], [7.0, 0.1], [1.0, 0.9], [0.0, 0.0], [0.0, 1.0]]
    assert by_hand(constant) == [0.0, 0.5, 1.0, 1.0]


def test_too_short_to_rank_keeps_the_recent() -> None:
    view = make_view(10, 1)
    evictor = get_evictor("lagkv", budget=6, num_sinks=1, recent_window=1)
    limits = (torch.tensor([9]), torch.tensor([6]), torch.tensor([1]))
    keep = evictor.select(evictor.score(view), view.positions, *limits)
    assert keep[0, 0].nonzero()[:, 0].tolist() == [0, 5, 6, 7, 8, 9]


def test_settings_are_checked() -> None:
    assert EVICTORS["lagkv"](budget=64).lag_size == 128
    with pytest.raises(ValueError, match="lag_size=1 must be at least 2"):
        get_evictor("lagkv", budget=64, lag_size=1)
