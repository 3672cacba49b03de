"""Attention sessions of the learner: replay a shadow mask over packed rollouts.

Prompt rows attend causally (or as recorded, if eviction began inside the prompt); what completion rows
do stands in ``completions``.

``TeacherSession`` is the dense track: the same weights, full context. When eviction starts after the
prefill the prompt rows of both tracks are the same numbers, so it attends to the prompt keys and
values that the shadow pass left behind and computes completion rows only.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from shadowmask.attention.completions import attend_completions, visible_keys
from shadowmask.attention.group_record import group_record
from shadowmask.attention.kernel import Scoring, causal_attention, chunked_attention
from shadowmask.packing import PackedBatch
from shadowmask.record import RecordError, ShadowMask


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
            recorded = record.at(layer)
            if record.dense_prompt_rows:
                pieces.append(causal_attention(q, k, v, scoring))
            else:
                pieces.append(_recorded_prompt(q, k, v, recorded.prompt[:, 0], scoring))
            pieces += attend_completions(query[0], key[0], value[0], k[0], v[0], group, recorded, scoring)
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
            pieces += attend_completions(
                query[0],
                key[0],
                value[0],
                self.prompts.keys[layer][n],
                self.prompts.values[layer][n],
                group,
                None,
                scoring,
                skipped,
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
        return visible_keys(positions[start:stop], positions.expand(1, 1, -1), evicted_at[None], scoring)

    return chunked_attention(query, key, value, visible, scoring)
