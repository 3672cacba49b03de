"""Between TRL's padded rows and the ragged rollouts of the engine."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shadowmask.head import TokenStats
from shadowmask.record import ShadowMask


def group_rows(prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    """Find repeated prompts. Returns distinct prompts, their counts, and for each input row the
    index of its completion in prompt-major order."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for n, prompt in enumerate(prompt_ids):
        rows.setdefault(tuple(prompt), []).append(n)
    order = [0] * len(prompt_ids)
    for position, row in enumerate(n for members in rows.values() for n in members):
        order[row] = position
    return [list(p) for p in rows], [len(members) for members in rows.values()], order


def unpad_rows(
    input_ids: Tensor, completion_width: int, records: list[ShadowMask]
) -> tuple[list[list[int]], list[list[int]]]:
    """Cut left-padded prompts and right-padded completions down to the recorded lengths.

    The lengths come from the record, never from TRL's masks: ``mask_truncated_completions`` clears
    those for rows that were sampled all the same.
    """
    boundary = input_ids.shape[1] - completion_width
    prompts, completions = [], []
    for row, record in zip(input_ids.tolist(), records, strict=True):
        prompt, total = record.prompt_lengths[0], record.lengths[0]
        prompts.append(row[boundary - prompt : boundary])
        completions.append(row[boundary : boundary + total - prompt])
    return prompts, completions


def pad_rows(values: Float[Tensor, " targets"], lengths: list[int], width: int) -> Tensor:
    """Lay ragged per-token values out as TRL does: one row per completion, zeros behind."""
    rows = pad_sequence(list(values.split(lengths)), batch_first=True)
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


def cat_rows(parts: list[TokenStats]) -> TokenStats:
    if len(parts) == 1:
        return parts[0]
    columns: list[Any] = [
        None if column[0] is None else torch.cat(list(column)) for column in zip(*parts, strict=True)
    ]
    return TokenStats(*columns)
