"""The shadow masks of one packed group, and what follows from them for all layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Int, Int32
from torch import Tensor

from shadowmask.attention import kernel
from shadowmask.packing import PackedGroup
from shadowmask.record import NEVER, RecordError, ShadowMask


@dataclass(frozen=True)
class LayerRecord:
    """One layer's part of a ``GroupRecord``; the KV-head axis is 1 if the record is shared by heads.

    Counts are host integers made once per session, so that no layer has to wait for the device.
    """

    prompt: Int32[Tensor, "kv_heads group prompt"]
    completion: Int32[Tensor, "kv_heads group longest"]
    kept: int  # most prompt keys, over heads, that some completion row may see
    even: bool  # that many in every head
    steady: bool  # they stay, as do completion keys: no key disappears while completions are decoded
    visible: tuple[tuple[int, ...], ...]  # by member and chunk of its rows: most keys some row may see


@dataclass(frozen=True)
class GroupRecord:
    """The shadow masks of one group, split at the end of the prompt and padded like the pack."""

    layers: tuple[LayerRecord, ...]  # one, if the record is shared by layers
    dense_prompt_rows: bool  # no eviction happened inside the prompt

    def at(self, layer: int) -> LayerRecord:
        return self.layers[layer if len(self.layers) > 1 else 0]


def group_record(group: PackedGroup, shadow: ShadowMask, device: torch.device) -> GroupRecord:
    """Collect the records of a group's members.

    Raises:
        RecordError: members disagree about evictions inside their common prompt.
    """
    entries = [shadow[n].evicted_at for n in group.members]
    prompt = torch.stack([entry[..., : group.prompt_length] for entry in entries], dim=2)
    inside = prompt.clamp(max=group.prompt_length)  # what prompt rows notice
    if not bool((inside == inside[:, :, :1]).all()):
        raise RecordError(
            f"completions {group.members} share a prompt but record different evictions inside it"
        )
    longest = max(group.completion_lengths)
    completion = torch.full((*prompt.shape[:3], longest), NEVER, dtype=torch.int32)
    for n, (entry, length) in enumerate(zip(entries, group.completion_lengths, strict=True)):
        completion[:, :, n, :length] = entry[..., group.prompt_length : group.prompt_length + length]
    dense_prompt_rows = bool((inside == group.prompt_length).all())
    gone = (prompt <= group.prompt_length).all(dim=2)  # (layers, kv_heads, prompt): before any row
    kept = (~gone).sum(dim=-1)
    even = (kept == kept[:, :1]).all(dim=-1).tolist()
    steady = _steady(group, prompt, completion, gone)
    layers = tuple(
        LayerRecord(
            prompt[n].to(device),
            completion[n].to(device),
            int(kept[n].max()),
            even[n],
            steady[n],
            () if steady[n] else _visible_counts(group, prompt[n], completion[n]),
        )
        for n in range(prompt.shape[0])
    )
    return GroupRecord(layers, dense_prompt_rows)


def _steady(group: PackedGroup, prompt: Tensor, completion: Tensor, gone: Tensor) -> list[bool]:
    # the last query of a member is the last row of its completion
    ends = torch.tensor([group.prompt_length + n for n in group.completion_lengths], dtype=torch.int32)
    stays = (prompt >= ends[:, None]).all(dim=2)
    completions_stay = (completion >= ends[:, None]).flatten(1).all(dim=1)
    return ((gone | stays).flatten(1).all(dim=1) & completions_stay).tolist()


def _visible_counts(
    group: PackedGroup,
    prompt: Int32[Tensor, "kv_heads group prompt"],
    completion: Int32[Tensor, "kv_heads group longest"],
) -> tuple[tuple[int, ...], ...]:
    def count(member: int, start: int, stop: int) -> int:
        evicted_at = torch.cat([prompt[:, member], completion[:, member, :stop]], dim=-1)
        return int((evicted_at > group.prompt_length + start).sum(dim=-1).max())

    return tuple(
        tuple(count(member, start, stop) for start, stop in row_chunks(length))
        for member, length in enumerate(group.completion_lengths)
    )


def row_chunks(rows: int) -> list[tuple[int, int]]:
    """Ranges of a completion's rows that are attended at one time."""
    step = kernel.QUERY_CHUNK
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def first_of(needed: Tensor, count: int) -> Int[Tensor, "*heads count"]:
    """Positions of the needed keys in order, filled up with others where a head needs fewer."""
    return (~needed).to(torch.uint8).argsort(dim=-1, stable=True)[..., :count]
