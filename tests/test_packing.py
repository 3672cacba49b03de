"""Layouts by hand."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from shadowmask.packing import pack


def test_two_prompts_by_hand() -> None:
    # prompt A = [5, 6] with completions [7, 8, 9] and [7]; prompt B = [4] with [3, 2]
    packed = pack([[5, 6], [4], [5, 6]], [[7, 8, 9], [3, 2], [7]])
    # A, then its completions without their last token, then B
    assert packed.input_ids.tolist() == [[5, 6, 7, 8, 4, 3]]
    assert packed.position_ids.tolist() == [[0, 1, 2, 3, 0, 1]]
    # completion 0 is predicted by rows 1, 2, 3; completion 1 by 4, 5; completion 2 by 1
    assert packed.target_rows.tolist() == [1, 2, 3, 4, 5, 1]
    assert packed.targets.tolist() == [7, 8, 9, 3, 2, 7]
    assert packed.completion_lengths == (3, 2, 1)
    assert [g.members for g in packed.groups] == [(0, 2), (1,)]
    assert packed.groups[0].completion_starts == (2, 4) and packed.groups[0].completion_lengths == (2, 0)
    assert packed.completion_token_rows().tolist() == [2, 3, 5]
    assert packed.num_tokens == 6


def flat_rows(tokens: int) -> torch.Tensor:
    """(heads 1, tokens, dim 1): every row holds its own number, from 1."""
    return torch.arange(1, tokens + 1, dtype=torch.float64)[None, :, None]


def test_short_completions_are_padded_with_zeros() -> None:
    packed = pack([[5]] * 3, [[1, 2, 3, 4], [1], [1, 2]])
    stacked = packed.groups[0].stack_completions(flat_rows(packed.num_tokens))
    assert stacked[0, :, :, 0].tolist() == [[2, 3, 4], [0, 0, 0], [5, 0, 0]]


def test_equal_completions_are_stacked_without_a_copy() -> None:
    packed = pack([[5]] * 2, [[1, 2, 3], [4, 5, 6]])
    flat = flat_rows(packed.num_tokens)
    stacked = packed.groups[0].stack_completions(flat)
    assert stacked[0, :, :, 0].tolist() == [[2, 3], [4, 5]]
    assert stacked.untyped_storage().data_ptr() == flat.untyped_storage().data_ptr()


def test_rows_left_out_in_front_shift_the_group() -> None:
    packed = pack([[5, 6]] * 2, [[1, 2, 3], [4, 5]])
    completions = flat_rows(packed.num_tokens)[:, 2:]
    stacked = packed.groups[0].stack_completions(completions, skipped=2)
    assert stacked[0, :, :, 0].tolist() == [[3, 4], [5, 0]]


def test_completions_of_one_token_leave_only_prompts() -> None:
    packed = pack([[5, 6], [5, 6]], [[7], [8]])
    assert packed.input_ids.tolist() == [[5, 6]]
    assert packed.target_rows.tolist() == [1, 1]
    assert packed.completion_token_rows().tolist() == []


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt 1 is empty"):
        pack([[1], []], [[2], [3]])


TOKENS = st.lists(st.integers(0, 3), min_size=1, max_size=4)


@given(st.lists(st.tuples(TOKENS, TOKENS), min_size=1, max_size=6))
def test_every_target_is_predicted_from_its_own_past(pairs: list[tuple[list[int], list[int]]]) -> None:
    prompts, completions = [p for p, _ in pairs], [c for _, c in pairs]
    packed = pack(prompts, completions)
    ids, positions = packed.input_ids[0].tolist(), packed.position_ids[0].tolist()
    # each prompt once, each completion without its last token
    distinct = {tuple(p) for p in prompts}
    assert packed.num_tokens == sum(map(len, distinct)) + sum(len(c) - 1 for c in completions)
    rows, targets = packed.target_rows.tolist(), packed.targets.tolist()
    for prompt, completion in pairs:
        sequence = prompt + completion
        for t in range(len(completion)):
            row, target = rows.pop(0), targets.pop(0)
            query = len(prompt) - 1 + t
            assert (ids[row], positions[row], target) == (sequence[query], query, sequence[query + 1])
    assert not rows and not targets
