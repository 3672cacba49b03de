"""GRPO terms by hand."""

from __future__ import annotations

import math

import pytest
import torch

from shadowmask import group_advantages
from shadowmask.losses import LOSS_TYPES, aggregate, clipped_policy_loss
from tolerances import HAND_COMPUTED

PER_TOKEN = torch.tensor([[1.0, 2.0, 9.0], [3.0, 9.0, 9.0]])
MASK = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])  # lengths 2 and 1; the nines are padding


def close(actual: torch.Tensor, expected: list[float]) -> bool:
    return bool(
        torch.allclose(actual, torch.tensor(expected, dtype=actual.dtype), atol=HAND_COMPUTED, rtol=0)
    )


def test_advantages_by_hand() -> None:
    rewards = torch.tensor([1.0, 3.0, 0.0, 0.0, 6.0])
    # groups (1, 3) and (0, 0, 6): means 2 and 2; standard deviations sqrt(2) and sqrt(12)
    a, b = math.sqrt(2) + 1e-4, math.sqrt(12) + 1e-4
    assert close(group_advantages(rewards, [2, 3]), [-1 / a, 1 / a, -2 / b, -2 / b, 4 / b])
    assert close(group_advantages(rewards, [2, 3], "none"), [-1, 1, -2, -2, 4])
    # of all five: mean 2, squares 1 + 1 + 4 + 4 + 16 = 26, over 4
    c = math.sqrt(26 / 4) + 1e-4
    assert close(group_advantages(rewards, [2, 3], "batch"), [-1 / c, 1 / c, -2 / c, -2 / c, 4 / c])


def test_groups_without_contrast_have_no_advantage() -> None:
    assert group_advantages(torch.ones(4), [4]).tolist() == [0.0] * 4
    assert group_advantages(torch.tensor([5.0, 7.0]), [1, 1]).tolist() == [0.0, 0.0]
    assert group_advantages(torch.tensor([5.0]), [1], "batch").tolist() == [0.0]


def test_bad_rewards_are_refused() -> None:
    with pytest.raises(ValueError, match="'group', 'batch' or 'none'"):
        group_advantages(torch.ones(2), [2], "std")
    with pytest.raises(ValueError, match=r"3 rewards for groups of \[2\]"):
        group_advantages(torch.ones(3), [2])
    with pytest.raises(ValueError, match="not finite"):
        group_advantages(torch.tensor([1.0, math.nan]), [2])


def test_clipping_by_hand() -> None:
    ratio = torch.tensor([[0.5, 1.0, 1.5], [0.5, 1.0, 1.5]])
    loss = clipped_policy_loss(ratio.log(), torch.zeros(2, 3), torch.tensor([2.0, -2.0]), 0.2, 0.3)
    # A > 0: min(r, clip) -> 0.5, 1, 1.3;  A < 0: max -> 0.8, 1, 1.5
    assert close(loss[0], [-1.0, -2.0, -2.6]) and close(loss[1], [1.6, 2.0, 3.0])


@pytest.mark.parametrize(
    ("loss_type", "expected"),
    [
        ("grpo", ((1 + 2) / 2 + 3 / 1) / 2),
        ("sapo", ((1 + 2) / 2 + 3 / 1) / 2),
        ("bnpo", (1 + 2 + 3) / 3),
        ("dapo", (1 + 2 + 3) / 3),
        ("cispo", (1 + 2 + 3) / 3),
        ("vespo", (1 + 2 + 3) / 3),
        ("dr_grpo", (1 + 2 + 3) / (2 * 10)),
        ("luspo", ((1 + 2) + 3) / 2),
    ],
)
def test_averages_by_hand(loss_type: str, expected: float) -> None:
    for mask in (MASK, MASK.bool()):
        value = aggregate(PER_TOKEN, mask, loss_type, max_completion_length=10)
        assert float(value) == pytest.approx(expected, abs=HAND_COMPUTED)


def test_dapo_takes_the_tokens_of_the_whole_batch() -> None:
    assert float(aggregate(PER_TOKEN, MASK, "dapo", num_items=12.0)) == pytest.approx(0.5)


def test_fully_masked_rows_cost_nothing() -> None:
    for loss_type in LOSS_TYPES:
        assert float(aggregate(PER_TOKEN, torch.zeros(2, 3), loss_type, max_completion_length=10)) == 0


def test_unknown_loss_types_are_named() -> None:
    with pytest.raises(ValueError, match="unknown loss_type 'ppo'"):
        aggregate(PER_TOKEN, MASK, "ppo")
    with pytest.raises(ValueError, match="needs max_completion_length"):
        aggregate(PER_TOKEN, MASK, "dr_grpo")
