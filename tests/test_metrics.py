"""The three gaps by hand."""

from __future__ import annotations

import math

import pytest
import torch

from shadowmask import ParityError
from shadowmask.metrics import PARITY_LIMITS, check_parity, information_gap, sampling_gap, staleness_kl
from tolerances import HAND_COMPUTED

EMPTY = torch.tensor([])


def test_sampling_gap_by_hand() -> None:
    sparse = torch.arange(100, dtype=torch.float64)
    shadow = sparse + torch.arange(100, dtype=torch.float64) / 100  # gaps 0.00, 0.01, ..., 0.99
    gap = sampling_gap(sparse, shadow)
    assert gap["sampling_gap/mean"] == pytest.approx(0.495, abs=HAND_COMPUTED)
    assert gap["sampling_gap/max"] == pytest.approx(0.99, abs=HAND_COMPUTED)
    # rank round(0.99 * 99) = 98 and round(0.95 * 99) = 94
    assert gap["sampling_gap/p99"] == pytest.approx(0.98, abs=HAND_COMPUTED)
    assert gap["sampling_gap/p95"] == pytest.approx(0.94, abs=HAND_COMPUTED)
    assert sampling_gap(shadow, sparse) == gap, "the gap has no sign"


def test_information_gap_by_hand() -> None:
    shadow = torch.log(torch.tensor([0.5, 0.1, 0.4]))
    dense = torch.log(torch.tensor([0.25, 0.2, 0.4]))
    # agreement = min(ratio, 1 / ratio) = 0.5, 0.5, 1
    gap = information_gap(shadow, dense, torch.tensor([0.3, 0.0, 0.6]))
    assert gap["information_gap/kl"] == pytest.approx(0.3, abs=HAND_COMPUTED)
    assert gap["information_gap/agreement_mean"] == pytest.approx(2 / 3, abs=HAND_COMPUTED)
    assert gap["information_gap/agreement_p5"] == pytest.approx(0.5, abs=HAND_COMPUTED)
    assert gap["information_gap/max"] == pytest.approx(math.log(2), abs=HAND_COMPUTED)


def test_staleness_by_hand() -> None:
    new, old = torch.log(torch.tensor([0.5, 0.2])), torch.log(torch.tensor([0.25, 0.4]))
    # r - 1 - log r with r = 2 and 0.5: (1 - log 2) and (-0.5 + log 2)
    expected = ((1 - math.log(2)) + (-0.5 + math.log(2))) / 2
    assert staleness_kl(new, old) == pytest.approx(expected, abs=HAND_COMPUTED)
    assert staleness_kl(new, new) == 0


def test_nothing_sampled_is_no_gap() -> None:
    assert set(sampling_gap(EMPTY, EMPTY).values()) == {0.0}
    gap = information_gap(EMPTY, EMPTY, EMPTY)
    assert gap["information_gap/agreement_p5"] == 1.0 and gap["information_gap/kl"] == 0.0
    assert staleness_kl(EMPTY, EMPTY) == 0.0


@pytest.mark.parametrize("dtype", PARITY_LIMITS)
def test_parity_is_checked_by_dtype(dtype: torch.dtype) -> None:
    statistic, limit = PARITY_LIMITS[dtype]
    quiet = dict.fromkeys(sampling_gap(EMPTY, EMPTY), 0.0)
    check_parity(quiet | {f"sampling_gap/{statistic}": limit}, dtype)
    with pytest.raises(ParityError, match=f"sampling_gap/{statistic} = .* exceeds the tolerance"):
        check_parity(quiet | {f"sampling_gap/{statistic}": limit * 1.01}, dtype)


def test_nan_is_not_parity() -> None:
    bad = torch.tensor([math.nan, 0.0])
    gap = sampling_gap(bad, torch.zeros(2))
    for dtype in PARITY_LIMITS:
        with pytest.raises(ParityError):
            check_parity(gap, dtype)
