"""Every correction on ratios that can be checked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from shadowmask.corrections import (
    MAX_LOG_RATIO,
    METHODS,
    Correction,
    effective_sample_size,
    get_method,
    icepop,
    method_settings,
    mis,
    naive,
    naive_is,
    sparse_rl,
    tis,
)
from shadowmask.metrics import off_policyness, weight_statistics
from tolerances import EXACT, HAND_COMPUTED

# r = pi_dense / pi_sparse of two completions, the second one token shorter
RATIOS = torch.tensor([[1.0, 4.0, 0.25], [2.0, 0.75, 1.0]], dtype=torch.float64)
MASK = torch.tensor([[True, True, True], [True, True, False]])
SPARSE = torch.tensor([[-1.0, -2.0, -0.5], [-3.0, -0.1, -9.0]], dtype=torch.float64)
LEARNER = SPARSE + RATIOS.log()
LEARNER[1, 2] = 50.0  # outside the mask: must not matter


def close(actual: Tensor, expected: list[list[float]]) -> bool:
    wanted = torch.tensor(expected, dtype=actual.dtype)
    return torch.allclose(actual, wanted, rtol=EXACT, atol=HAND_COMPUTED)


def test_naive_ignores_the_ratio() -> None:
    found = naive(SPARSE, LEARNER, MASK)
    assert close(found.weights, [[1, 1, 1], [1, 1, 0]])
    assert not found.rejected.any()


def test_naive_is_is_the_ratio() -> None:
    assert close(naive_is(SPARSE, LEARNER, MASK).weights, [[1, 4, 0.25], [2, 0.75, 0]])


def test_tis_truncates_from_above_only() -> None:
    found = tis(SPARSE, LEARNER, MASK)
    assert close(found.weights, [[1, 2, 0.25], [2, 0.75, 0]])
    assert not found.rejected.any()
    assert close(tis(SPARSE, LEARNER, MASK, cap=0.5).weights, [[0.5, 0.5, 0.25], [0.5, 0.5, 0]])


def test_mis_masks_whole_sequences() -> None:
    # products: 1 x 4 x 0.25 = 1 and 2 x 0.75 = 1.5
    assert close(mis(SPARSE, LEARNER, MASK).weights, [[1, 1, 1], [1.5, 1.5, 0]])
    found = mis(SPARSE, LEARNER, MASK, cap=1.2)
    assert close(found.weights, [[1, 1, 1], [0, 0, 0]])
    assert found.rejected.tolist() == [[False] * 3, [True, True, False]]


def test_icepop_masks_tokens_on_both_sides() -> None:
    found = icepop(SPARSE, LEARNER, MASK)
    assert close(found.weights, [[1, 4, 0], [2, 0.75, 0]])
    assert found.rejected.tolist() == [[False, False, True], [False] * 3]
    assert close(icepop(SPARSE, LEARNER, MASK, high=3.0).weights, [[1, 0, 0], [2, 0.75, 0]])


def test_sparse_rl_truncates_normalises_and_rejects() -> None:
    # truncated at 1.5: 1, 1.5, 0.25 | 1.5, 0.75; their mean is 1. Outside [0.5, 1.5]: 4, 0.25 and 2
    found = sparse_rl(SPARSE, LEARNER, MASK)
    assert close(found.weights, [[1, 0, 0], [0, 0.75, 0]])
    assert found.rejected.tolist() == [[False, True, True], [True, False, False]]
    # a mean other than 1: cap 1 leaves 1, 1, 0.25 | 1, 0.75 with mean 0.8
    assert close(sparse_rl(SPARSE, LEARNER, MASK, cap=1.0).weights, [[1.25, 0, 0], [0, 0.9375, 0]])


def test_sparse_rl_vetoes_a_sequence_for_one_token() -> None:
    learner = LEARNER.clone()
    learner[1, 1] = SPARSE[1, 1] + math.log(0.9e-4)
    found = sparse_rl(SPARSE, learner, MASK)
    assert found.rejected[1].tolist() == [True, True, False] and not found.rejected[0, 0]
    learner[1, 1] = SPARSE[1, 1] + math.log(1.1e-4)
    learner[1, 0] = SPARSE[1, 0]
    assert sparse_rl(SPARSE, learner, MASK).rejected[1].tolist() == [False, True, False]


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.rule])
def test_without_a_gap_every_weight_is_one(name: str) -> None:
    rule = METHODS[name].rule
    assert rule is not None
    found = rule(SPARSE, SPARSE, MASK)
    assert torch.equal(found.weights, MASK.double()) and not found.rejected.any()
    off = rule(SPARSE, LEARNER, MASK).weights
    assert torch.equal(off, found.weights) == (name == "naive")


@pytest.mark.parametrize("name", [name for name, method in METHODS.items() if method.rule])
def test_absurd_ratios_and_empty_masks_stay_finite(name: str) -> None:
    rule = METHODS[name].rule
    assert rule is not None
    for gap in (500.0, -500.0, math.inf, -math.inf):
        found: Correction = rule(SPARSE.float(), (SPARSE + gap).float(), MASK)
        assert found.weights.isfinite().all() and (found.weights >= 0).all()
        assert float(found.weights.max()) <= math.exp(MAX_LOG_RATIO) * (1 + HAND_COMPUTED)
    nothing = torch.zeros_like(MASK)
    assert float(rule(SPARSE, LEARNER, nothing).weights.abs().max()) == EXACT


def test_effective_sample_size_by_hand() -> None:
    assert effective_sample_size(torch.tensor([2.0, 2.0, 2.0])) == pytest.approx(1.0, abs=HAND_COMPUTED)
    # (1 + 3)^2 / (2 (1 + 9))
    assert effective_sample_size(torch.tensor([1.0, 3.0])) == pytest.approx(0.8, abs=HAND_COMPUTED)
    assert effective_sample_size(torch.tensor([1.0, 0.0])) == pytest.approx(0.5, abs=HAND_COMPUTED)
    assert effective_sample_size(torch.zeros(3)) == EXACT
    assert effective_sample_size(torch.tensor([3e30, 3e30])) == pytest.approx(1.0, abs=HAND_COMPUTED)
    assert effective_sample_size(torch.tensor([])) == 1.0


def test_off_policyness_by_hand() -> None:
    found = off_policyness(SPARSE, LEARNER, MASK)
    assert found["off_policy/log_ratio_min"] == pytest.approx(math.log(0.25), abs=HAND_COMPUTED)
    assert found["off_policy/log_ratio_p5"] == pytest.approx(math.log(0.25), abs=HAND_COMPUTED)
    assert found["off_policy/log_ratio_max"] == pytest.approx(math.log(4), abs=HAND_COMPUTED)
    # 1, 4, 0.25, 2, 0.75: 8^2 / (5 x 21.625)
    assert found["off_policy/ess"] == pytest.approx(64 / 108.125, abs=HAND_COMPUTED)


def test_weight_statistics_by_hand() -> None:
    found = mis(SPARSE, LEARNER, MASK, cap=1.2)
    stats = weight_statistics(found.weights, found.rejected, MASK)
    assert stats["correction/rejected_fraction"] == pytest.approx(2 / 5, abs=HAND_COMPUTED)
    assert stats["correction/rejected_sequences"] == pytest.approx(1 / 2, abs=HAND_COMPUTED)
    assert stats["correction/ess"] == pytest.approx(9 / 15, abs=HAND_COMPUTED)
    assert stats["sampling/importance_sampling_ratio/mean"] == pytest.approx(3 / 5, abs=HAND_COMPUTED)
    assert stats["sampling/importance_sampling_ratio/min"] == EXACT


def test_published_settings_are_the_defaults() -> None:
    assert method_settings("tis", {}) == {"cap": 2.0}
    assert method_settings("mis", {}) == {"cap": 3.0}
    assert method_settings("icepop", {}) == {"low": 0.5, "high": 5.0}
    assert method_settings("sparse-rl", {}) == {"veto": 1e-4, "cap": 1.5, "low": 0.5, "high": 1.5}
    assert method_settings("smd", {}) == {} == method_settings("naive", {})
    assert method_settings("tis", {"cap": 8}) == {"cap": 8}


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("tsi", {}, "method='tsi' must be one of smd, shadow, dense"),
        ("tis", {"cup": 2}, "has no setting 'cup'; it has cap"),
        ("smd", {"cap": 2}, "has no setting 'cap'; it has none"),
        ("tis", {"cap": -1}, "cap=-1 of method 'tis' must be a positive number"),
        ("tis", {"cap": "2"}, "cap='2'"),
        ("tis", {"cap": math.nan}, "cap=nan"),
        ("tis", {"cap": True}, "cap=True"),
    ],
)
def test_bad_settings_are_named(name: str, settings: dict, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        method_settings(name, settings)


def test_only_methods_with_a_dense_learner_have_a_rule() -> None:
    assert {name for name in METHODS if get_method(name).replays} == {"smd", "shadow", "dense"}
    assert all((method.rule is None) == method.replays for method in METHODS.values())
