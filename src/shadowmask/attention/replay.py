"""Attention sessions of the learner: replay a shadow mask over packed rollouts.

Prompt rows attend causally (or as recorded, if eviction began inside the prompt). Completion rows
attend to the prompt keys that some completion row of the group may still see, gathered once per head,
and to their own completion; the mask of a chunk of queries is made from ``evicted_at`` of just those
keys. So the learner's attention shrinks with the compression and no tokens x tokens tensor exists.

``TeacherSession`` is the dense track: the same weights, full context. When eviction starts after the
prefill the prompt rows of both tracks are the same numbers, so it attends to the prompt keys and
values that the shadow pass left behind and computes completion rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int, Int32
from torch import Tensor

from shadowmask.attention.kernel import Scoring, causal_attention, chunked_attention
from shadowmask.packing import PackedBatch, PackedGroup
from shadowmask.record import NEVER, RecordError, ShadowMask


@dataclass(frozen=True)
class GroupRecord:
    """The shadow masks of one group, split at the end of the prompt and padded like the pack."""

    prompt: Int32[Tensor, "layers kv_heads group prompt"]
    completion: Int32[Tensor, "layers kv_heads group longest"]
    dense_prompt_rows: bool  # no eviction happened inside the prompt

    def at(self, layer: int) -> tuple[Tensor, Tensor]:
        """This layer's (prompt, completion) parts; a shared record has one layer for all."""
        index = layer if self.prompt.shape[0] > 1 else 0
        return self.prompt[index], self.completion[index]


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
    return GroupRecord(prompt.to(device), completion.to(device), dense_prompt_rows)


@dataclass
class PromptMemory:
    """Keys and values of the packed prompts per layer, detached, for the teacher."""

    keys: dict[int, list[Tensor]]
    values: dict[int, list[Tensor]]


class ReplaySession:
    """The shadow track: every query attends to exactly the keys that the sampler's query saw."""

    def __init__(self, packed: PackedBatch, shadow: ShadowMask, remember_prompts: bool = False) -> None:
        """Prepare the records of all groups on the packed batch's device.

        Args:
            remember_prompts: keep each layer's prompt keys and values (detached) for a teacher;
                refused by ``prompts`` if eviction began inside a prompt.
        """
        device = packed.input_ids.device
        self.packed = packed
        self.records = [group_record(group, shadow, device) for group in packed.groups]
        self.num_layers_recorded, self.num_kv_heads_recorded = shadow.evicted_at.shape[:2]
        self.layers_served: set[int] = set()
        self._memory = PromptMemory({}, {}) if remember_prompts else None

    @property
    def dense_prompt_rows(self) -> bool:
        return all(record.dense_prompt_rows for record in self.records)

    def take_prompts(self) -> PromptMemory:
        """Hand the remembered prompts to the teacher and forget them.

        They are views of every layer's whole keys and values, which activation checkpointing would
        otherwise have freed before the backward pass.
        """
        assert self._memory is not None and self.dense_prompt_rows
        memory, self._memory = self._memory, None
        return memory

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 heads tokens head_dim"],
        key: Float[Tensor, "1 kv_heads tokens head_dim"],
        value: Float[Tensor, "1 kv_heads tokens value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "1 heads tokens value_dim"]:
        if self.num_kv_heads_recorded not in (1, key.shape[1]):
            raise RecordError(
                f"the record has {self.num_kv_heads_recorded} KV heads, layer {layer} has {key.shape[1]}: "
                "it was made by another model"
            )
        if self.num_layers_recorded != 1 and layer >= self.num_layers_recorded:
            raise RecordError(
                f"the record has {self.num_layers_recorded} layers, the model has a layer {layer}: "
                "it was made by another model"
            )
        pieces: list[Tensor] = []
        for group, record in zip(self.packed.groups, self.records, strict=True):
            prompt = slice(group.prompt_start, group.prompt_start + group.prompt_length)
            q, k, v = query[:, :, prompt], key[:, :, prompt], value[:, :, prompt]
            evicted = record.at(layer)
            if record.dense_prompt_rows:
                pieces.append(causal_attention(q, k, v, scoring))
            else:
                pieces.append(_recorded_prompt(q, k, v, evicted[0][:, 0], scoring))
            pieces += _completions(
                group.stack_completions(query[0]),
                group.stack_completions(key[0]),
                group.stack_completions(value[0]),
                k[0],
                v[0],
                group,
                evicted,
                scoring,
            )
        # a recomputation under activation checkpointing comes here a second time: nothing to remember
        if self._memory is not None and layer not in self.layers_served:
            prompts = [slice(g.prompt_start, g.prompt_start + g.prompt_length) for g in self.packed.groups]
            self._memory.keys[layer] = [key[0, :, p].detach() for p in prompts]
            self._memory.values[layer] = [value[0, :, p].detach() for p in prompts]
        self.layers_served.add(layer)
        return torch.cat(pieces, dim=2)


class TeacherSession:
    """The dense track over completion rows only, against remembered prompt keys and values."""

    def __init__(self, packed: PackedBatch, prompts: PromptMemory) -> None:
        self.packed = packed
        self.prompts = prompts
        self.layers_served: set[int] = set()
        # rows in front of each group's completions that the flat row of this track lacks: the prompts
        self.skipped = []
        start = 0
        for group in packed.groups:
            self.skipped.append(group.completion_starts[0] - start)
            start += sum(group.completion_lengths)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 heads completion_tokens head_dim"],
        key: Float[Tensor, "1 kv_heads completion_tokens head_dim"],
        value: Float[Tensor, "1 kv_heads completion_tokens value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "1 heads completion_tokens value_dim"]:
        self.layers_served.add(layer)
        pieces: list[Tensor] = []
        for n, (group, skipped) in enumerate(zip(self.packed.groups, self.skipped, strict=True)):
            pieces += _completions(
                group.stack_completions(query[0], skipped),
                group.stack_completions(key[0], skipped),
                group.stack_completions(value[0], skipped),
                self.prompts.keys[layer][n],
                self.prompts.values[layer][n],
                group,
                None,
                scoring,
            )
        return torch.cat(pieces, dim=2) if pieces else query[..., : value.shape[-1]]


def _recorded_prompt(
    query: Float[Tensor, "1 heads prompt head_dim"],
    key: Float[Tensor, "1 kv_heads prompt head_dim"],
    value: Float[Tensor, "1 kv_heads prompt value_dim"],
    evicted_at: Int32[Tensor, "#kv_heads prompt"],
    scoring: Scoring,
) -> Float[Tensor, "1 heads prompt value_dim"]:
    """Prompt rows when eviction began inside the prompt: the mask with time, by chunks of queries."""
    positions = torch.arange(query.shape[2], device=query.device)

    def visible(start: int, stop: int) -> Tensor:
        return _visible(positions[start:stop], positions.expand(1, 1, -1), evicted_at[None], scoring)

    return chunked_attention(query, key, value, visible, scoring)


def _completions(
    query: Float[Tensor, "heads group longest head_dim"],
    key: Float[Tensor, "kv_heads group longest head_dim"],
    value: Float[Tensor, "kv_heads group longest value_dim"],
    prompt_key: Float[Tensor, "kv_heads prompt head_dim"],
    prompt_value: Float[Tensor, "kv_heads prompt value_dim"],
    group: PackedGroup,
    evicted: tuple[Int32[Tensor, "_ group prompt"], Int32[Tensor, "_ group longest"]] | None,
    scoring: Scoring,
) -> list[Float[Tensor, "1 heads _ value_dim"]]:
    """Completion rows of one group, all completions at once. ``evicted=None``: the dense track.

    Returns one piece per completion, unpadded, in flat order.
    """
    longest = query.shape[2]
    if longest == 0:
        return []
    size = query.shape[1]
    device = query.device
    positions = torch.arange(group.prompt_length + longest, device=device)
    kept, own = positions[None, : group.prompt_length], positions[group.prompt_length :]
    evicted_at = None
    if evicted is not None:
        kept, prompt_key, prompt_value, kept_evicted = _gather_kept(
            prompt_key, prompt_value, evicted[0], group.prompt_length
        )
        evicted_at = torch.cat([kept_evicted, evicted[1]], dim=-1).transpose(0, 1)
    key_positions = torch.cat([kept, own.expand(kept.shape[0], -1)], dim=-1)[None]
    keys = torch.cat([prompt_key.expand(size, -1, -1, -1), key.transpose(0, 1)], dim=2)
    values = torch.cat([prompt_value.expand(size, -1, -1, -1), value.transpose(0, 1)], dim=2)

    def visible(start: int, stop: int) -> Tensor:
        return _visible(own[start:stop], key_positions, evicted_at, scoring)

    out = chunked_attention(query.transpose(0, 1), keys, values, visible, scoring)
    return [out[n : n + 1, :, :length] for n, length in enumerate(group.completion_lengths) if length]


def _gather_kept(
    key: Float[Tensor, "kv_heads prompt head_dim"],
    value: Float[Tensor, "kv_heads prompt value_dim"],
    evicted_at: Int32[Tensor, "_ group prompt"],
    prompt_length: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Take the prompt keys that any completion row may see; heads with fewer are filled up.

    A key that was gone before the first completion row (``evicted_at <= prompt_length``) is seen by
    none. Fill-ups are such keys, and the mask made from their ``evicted_at`` hides them.

    Returns positions, keys, values and ``evicted_at`` of the gathered keys.
    """
    needed = (evicted_at > prompt_length).any(dim=1)  # (kv_heads or 1, prompt)
    most = int(needed.sum(dim=-1).max())
    if most == prompt_length:
        positions = torch.arange(prompt_length, device=key.device)[None]
        return positions, key, value, evicted_at
    index = (~needed).to(torch.uint8).argsort(dim=-1, stable=True)[:, :most]
    per_head = index.expand(key.shape[0], -1)[..., None]
    gathered = evicted_at.gather(2, index[:, None].expand(-1, evicted_at.shape[1], -1))
    return (
        index,
        key.gather(1, per_head.expand(-1, -1, key.shape[-1])),
        value.gather(1, per_head.expand(-1, -1, value.shape[-1])),
        gathered,
    )


def _visible(
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
