"""What the completion rows of a packed group attend to: kept prompt keys and their own completion.

Three ways to the same numbers, by what the record says:

- every row sees every kept prompt key (prompt-only eviction, and the dense track): one product of all
  rows with the prompt's keys, see ``group``;
- the same on devices without that kernel, or inside a sliding window: completions side by side, each
  with its copy of the kept keys, and a mask;
- keys disappear while a completion is decoded: each completion apart, by chunks of its rows, with just
  the keys that some row of the chunk may see. So attention follows the budget, not the length.

No tokens x tokens tensor exists in any of them.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from shadowmask.attention.group import can_share, group_attention
from shadowmask.attention.group_record import LayerRecord, first_of, row_chunks
from shadowmask.attention.kernel import Scoring, chunked_attention, masked_attention
from shadowmask.packing import PackedGroup


def attend_completions(
    query: Float[Tensor, "heads tokens head_dim"],
    key: Float[Tensor, "kv_heads tokens head_dim"],
    value: Float[Tensor, "kv_heads tokens value_dim"],
    prompt_key: Float[Tensor, "kv_heads prompt head_dim"],
    prompt_value: Float[Tensor, "kv_heads prompt value_dim"],
    group: PackedGroup,
    record: LayerRecord | None,
    scoring: Scoring,
    skipped: int = 0,
) -> list[Float[Tensor, "1 heads _ value_dim"]]:
    """Outputs of one group's completion rows, in flat order, as pieces to be concatenated.

    Args:
        query: the flat rows of the pack, as are key and value.
        record: ``None`` is the dense track.
        skipped: rows that the flat row lacks in front of this group's completions.
    """
    rows = sum(group.completion_lengths)
    if rows == 0:
        return []
    start = group.completion_starts[0] - skipped
    span = slice(start, start + rows)
    own = query[:, span], key[:, span], value[:, span]
    prompt, kept = (prompt_key, prompt_value), None
    if record is not None and record.kept < group.prompt_length:
        kept = first_of((record.prompt > group.prompt_length).any(dim=1), record.kept)
        prompt = _take(prompt_key, kept), _take(prompt_value, kept)
    if record is not None and not record.steady:
        return _each_apart(own, prompt, kept, group, record, scoring)
    window = scoring.sliding_window
    unbounded = window is None or window >= group.prompt_length + max(group.completion_lengths)
    even = record is None or (record.even and record.kept > 0)
    if unbounded and even and can_share(query, value, scoring):
        lengths = group.completion_lengths
        return [group_attention(own, prompt, lengths, scoring.scaling)[None]]
    return _side_by_side(own, prompt, kept, group, record, scoring)


QKV = tuple[Tensor, Tensor, Tensor]  # queries, keys and values of the group's completion rows


def _side_by_side(
    own: QKV,
    prompt: tuple[Tensor, Tensor],
    kept: Int[Tensor, "_ kept"] | None,
    group: PackedGroup,
    record: LayerRecord | None,
    scoring: Scoring,
) -> list[Float[Tensor, "1 heads _ value_dim"]]:
    """All completions at once, padded to the longest, each with the kept prompt keys in front."""
    query, key, value = (group.stack_completions(x, group.completion_starts[0]) for x in own)
    size, longest, device = query.shape[1], query.shape[2], query.device
    positions = torch.arange(group.prompt_length + longest, device=device)
    before = positions[None, : group.prompt_length] if kept is None else kept
    after = positions[group.prompt_length :]
    evicted_at = None
    if record is not None:
        of_prompt = record.prompt if kept is None else _take_record(record.prompt, kept)
        evicted_at = torch.cat([of_prompt, record.completion], dim=-1).transpose(0, 1)
    key_positions = torch.cat([before, after.expand(before.shape[0], -1)], dim=-1)[None]
    keys = torch.cat([prompt[0].expand(size, -1, -1, -1), key.transpose(0, 1)], dim=2)
    values = torch.cat([prompt[1].expand(size, -1, -1, -1), value.transpose(0, 1)], dim=2)

    def visible(start: int, stop: int) -> Tensor:
        return visible_keys(after[start:stop], key_positions, evicted_at, scoring)

    out = chunked_attention(query.transpose(0, 1), keys, values, visible, scoring)
    return [out[n : n + 1, :, :length] for n, length in enumerate(group.completion_lengths) if length]


def _each_apart(
    own: QKV,
    prompt: tuple[Tensor, Tensor],
    kept: Int[Tensor, "_ kept"] | None,
    group: PackedGroup,
    record: LayerRecord,
    scoring: Scoring,
) -> list[Float[Tensor, "1 heads _ value_dim"]]:
    """One completion and one chunk of its rows at a time, with the keys that some row of it may see."""
    pieces = []
    lengths = list(group.completion_lengths)
    positions = torch.arange(group.prompt_length + max(lengths), device=own[0].device)
    before = positions[None, : group.prompt_length] if kept is None else kept
    of_prompt = record.prompt if kept is None else _take_record(record.prompt, kept)
    rows = zip(*(x.split(lengths, dim=1) for x in own), strict=True)
    for n, (query, key, value) in enumerate(rows):
        for chunk, (start, stop) in enumerate(row_chunks(lengths[n])):
            after = positions[group.prompt_length : group.prompt_length + stop]
            evicted_at = torch.cat([of_prompt[:, n], record.completion[:, n, :stop]], dim=-1)
            needed = evicted_at > group.prompt_length + start
            index = first_of(needed, record.visible[n][chunk])
            key_positions = torch.cat([before, after.expand(before.shape[0], -1)], dim=-1)
            mask = visible_keys(
                after[start:stop],
                key_positions.expand(index.shape[0], -1).gather(-1, index)[None],
                evicted_at.gather(-1, index)[None],
                scoring,
            )
            keys = _take(torch.cat([prompt[0], key[:, :stop]], dim=1), index)
            values = _take(torch.cat([prompt[1], value[:, :stop]], dim=1), index)
            pieces.append(
                masked_attention(query[None, :, start:stop], keys[None], values[None], mask, scoring)
            )
    return pieces


def _take(
    data: Float[Tensor, "kv_heads keys dim"], index: Int[Tensor, "_ chosen"]
) -> Float[Tensor, "kv_heads chosen dim"]:
    return data.gather(1, index.expand(data.shape[0], -1)[..., None].expand(-1, -1, data.shape[-1]))


def _take_record(
    evicted_at: Int32[Tensor, "heads group keys"], index: Int[Tensor, "heads chosen"]
) -> Int32[Tensor, "heads group chosen"]:
    return evicted_at.gather(2, index[:, None].expand(-1, evicted_at.shape[1], -1))


def visible_keys(
    queries: Int[Tensor, " query"],
    keys: Int[Tensor, "#batch #kv_heads key"],
    evicted_at: Int32[Tensor, "#batch #kv_heads key"] | None,
    scoring: Scoring,
) -> Bool[Tensor, "_ _ query key"]:
    """visible(i, k) <=> k <= i < evicted_at[k], and inside the layer's sliding window."""
    rows = queries[:, None]
    mask = keys[:, :, None, :] <= rows
    if evicted_at is not None:
        mask = mask & (rows < evicted_at[:, :, None, :])
    if scoring.sliding_window is not None:
        mask = mask & (keys[:, :, None, :] > rows - scoring.sliding_window)
    return mask
