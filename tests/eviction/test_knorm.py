"""K-norm against a loop over positions."""

from __future__ import annotations

import math

import pytest

from shadowmask import get_evictor
from tiny_views import KV_HEADS, by_position, held, make_view, view_of_keys
from tolerances import FLOAT64


@pytest.mark.parametrize("shuffled", [False, True])
def test_short_keys_stay(shuffled: bool) -> None:
    view = make_view(14, 1, shuffled)
    actual = by_position(get_evictor("knorm", budget=64).score(view), view)
    for head in range(KV_HEADS):
        expected = {
            p: -math.sqrt(sum(float(x) ** 2 for x in view.keys[0, head, slot]))
            for p, slot in held(view, head).items()
        }
        assert actual[head] == pytest.approx(expected, abs=FLOAT64)


def test_by_hand() -> None:
    view = view_of_keys([[3.0, 4.0], [0.0, -1.0], [0.0, 0.0]])
    assert get_evictor("knorm", budget=64).score(view)[0, 0].tolist() == [-5.0, -1.0, 0.0]
