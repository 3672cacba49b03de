"""KeyDiff against a loop over positions."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shadowmask import get_evictor
from tiny_views import KV_HEADS, by_position, held, make_view, view_of_keys
from tolerances import FLOAT64, HAND_COMPUTED


def cosine(a: Tensor, b: Tensor) -> float:
    dot = sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
    return dot / math.sqrt(sum(float(x) ** 2 for x in a)) / math.sqrt(sum(float(y) ** 2 for y in b))


@pytest.mark.parametrize("shuffled", [False, True])
def test_keys_unlike_the_mean_direction_stay(shuffled: bool) -> None:
    view = make_view(14, 1, shuffled)
    actual = by_position(get_evictor("keydiff", budget=64).score(view), view)
    for head in range(KV_HEADS):
        keys = {p: view.keys[0, head, slot] for p, slot in held(view, head).items()}
        anchor = sum((k / math.sqrt(float(k @ k)) for k in keys.values()), torch.zeros(1)) / len(keys)
        expected = {p: -cosine(k, anchor) for p, k in keys.items()}
        assert actual[head] == pytest.approx(expected, abs=FLOAT64)


def test_by_hand() -> None:
    """Directions (1,0), (1,0), (0,1): the anchor is (2,1)/3, cosines are 2/sqrt(5) and 1/sqrt(5)."""
    view = view_of_keys([[3.0, 0.0], [0.1, 0.0], [0.0, 7.0]])
    scores = get_evictor("keydiff", budget=64).score(view)
    expected = [-2 / math.sqrt(5), -2 / math.sqrt(5), -1 / math.sqrt(5)]
    assert scores[0, 0].tolist() == pytest.approx(expected, abs=HAND_COMPUTED)


def test_a_key_of_length_zero_has_no_direction() -> None:
    scores = get_evictor("keydiff", budget=64).score(view_of_keys([[0.0, 0.0], [1.0, 0.0]]))
    assert scores[0, 0].tolist() == [0.0, -1.0]
