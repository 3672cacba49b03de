"""The cache for prompt-only eviction: a group shares the kept keys of its prompt.

What is kept of a prompt is the same for all completions of it, and stays the same to the end. So it is
stored once per prompt, and each row owns slots for its own new tokens only. A decode step attends to
the two parts apart and merges them: over the shared part, the queries of the whole group are the rows
of one matrix product, so its keys are read once per group instead of once per completion.

Which rows belong to which prompt changes as sequences come and go, so it stands in two index tensors.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring, add_sinks, additive_mask, merge_partials, partial_attention
from shadowmask.cache.base import CachePlan, Chosen, DecodeStep, KVCache, PromptInfo
from shadowmask.cache.slots import along, of_own_head
from shadowmask.eviction.base import Evictor
from shadowmask.record import NEVER


class SharedLayer:
    """One layer: kept prompt keys per prompt, own keys per row."""

    def __init__(
        self,
        plan: CachePlan,
        layer: int,
        key: Float[Tensor, "_ kv_heads _ head_dim"],
        value: Float[Tensor, "_ kv_heads _ value_dim"],
    ) -> None:
        kv_heads, device = key.shape[1], key.device
        # heads that keep different numbers of keys share one pool of slots
        pools, kept = (
            (1, kv_heads * plan.kept_at(layer)) if plan.ragged_heads else (kv_heads, plan.kept_at(layer))
        )
        shape = (plan.prompts, pools, kept)
        self.prompt_keys = key.new_zeros(*shape, key.shape[-1])
        self.prompt_values = value.new_zeros(*shape, value.shape[-1])
        self.prompt_positions = torch.full(shape, -1, dtype=torch.int32, device=device)
        self.prompt_heads: Tensor | None = None
        if plan.ragged_heads:
            self.prompt_heads = torch.zeros(shape, dtype=torch.int64, device=device)
        self.keys = key.new_zeros(plan.rows, kv_heads, plan.new_tokens, key.shape[-1])
        self.values = value.new_zeros(plan.rows, kv_heads, plan.new_tokens, value.shape[-1])
        shape = (plan.prompts, kv_heads, plan.longest_prompt)
        self.evicted_at = torch.full(shape, NEVER, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (self.prompt_keys, self.prompt_values, self.keys, self.values)
        return sum(x.numel() * x.element_size() for x in tensors)

    def prompt_state(self) -> tuple[Tensor, ...]:
        heads = () if self.prompt_heads is None else (self.prompt_heads,)
        return self.prompt_keys, self.prompt_values, self.prompt_positions, self.evicted_at, *heads


class SharedPromptCache(KVCache):
    """See module. ``place`` is the slot of a prompt, held until its last sequence is finished."""

    shares_prompts = True

    def __init__(self, plan: CachePlan, evictor: Evictor, device: torch.device) -> None:
        super().__init__(plan, evictor, device)
        self.layers: dict[int, SharedLayer] = {}  # made when a layer's first keys arrive
        self.prompts_in_use = plan.prompts
        self._unfinished = [0] * plan.prompts  # sequences of each prompt that are not finished
        self._members: list[list[int | None]] = [[None] * plan.group for _ in range(plan.prompts)]
        self._prompt_of: dict[int, int] = {}  # seated row -> its prompt's place
        # the same for the device: rows of each prompt, and where in that table each row stands
        self.rows_of_prompt = torch.zeros(plan.prompts, plan.group, dtype=torch.int64, device=device)
        self.place_of_row = torch.zeros(plan.rows, dtype=torch.int64, device=device)

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @staticmethod
    def slots_needed(plan: CachePlan, layer: int = 0) -> int:
        return plan.prompts * plan.kept_at(layer) + plan.rows * plan.new_tokens

    # -- prompts and rows -----------------------------------------------------------------------

    def can_open(self, samples: int, seated_now: int) -> bool:
        return 0 in self._unfinished

    def open_prompt(self, prompt: PromptInfo, samples: int, rows: list[int]) -> int:
        place = self._unfinished.index(0)
        self._unfinished[place] = samples
        return place

    def store_prompt(
        self,
        layer: int,
        place: int,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        chosen: Chosen,
        attention_received: Float[Tensor, "1 kv_heads prompt"] | None,
        scoring: Scoring,
    ) -> None:
        if layer not in self.layers:
            self.layers[layer] = SharedLayer(self.plan, layer, key, value)
        slots = self.layers[layer]
        kv_heads, prompt = key.shape[1], key.shape[2]
        slots.prompt_positions[place] = -1
        slots.evicted_at[place] = NEVER
        first = slice(0, chosen.kept)
        for source, target in ((key[0], slots.prompt_keys), (value[0], slots.prompt_values)):
            if chosen.single_heads:
                torch.gather(source, 1, along(chosen.position, source), out=target[place, :, first])
            else:
                target[place, :, first] = chosen.of(source)
        slots.prompt_positions[place, :, first] = chosen.position.to(torch.int32)
        if slots.prompt_heads is not None:
            slots.prompt_heads[place, :, first] = chosen.head
        slots.evicted_at[place, :, :prompt] = chosen.record(kv_heads, prompt)

    def _seat(self, rows: list[int], place: int) -> None:
        members = self._members[place]
        for row in rows:
            n = members.index(None)
            members[n] = row
            self._prompt_of[row] = place
        self._write_table(place)

    def _release(self, row: int) -> None:
        place = self._prompt_of.pop(row)
        members = self._members[place]
        members[members.index(row)] = None
        self._unfinished[place] -= 1
        self._write_table(place)
        self.place_of_row[row] = 0

    def _write_table(self, place: int) -> None:
        """Copy one prompt's members to the device; empty places point at row 0, and nobody reads them."""
        members = self._members[place]
        table = torch.tensor([row or 0 for row in members], device=self.device)
        self.rows_of_prompt[place] = table
        seated = [(row, n) for n, row in enumerate(members) if row is not None]
        if seated:
            rows, places = torch.tensor(seated, device=self.device).T
            self.place_of_row[rows] = places + place * self.plan.group

    def _move(self, source: int, target: int) -> None:
        for slots in self.layers.values():
            slots.keys[target] = slots.keys[source]
            slots.values[target] = slots.values[source]
        place = self._prompt_of.pop(source)
        self._prompt_of[target] = place
        members = self._members[place]
        members[members.index(source)] = target
        self._write_table(place)
        self.place_of_row[source] = 0

    def shrink(self, moves: list[tuple[int, int]], in_use: int) -> None:
        """The base class's, and the prompts that are left move to the front as well."""
        super().shrink(moves, in_use)
        left = sum(count > 0 for count in self._unfinished)
        free = [place for place in range(left) if not self._unfinished[place]]
        for source in range(left, self.plan.prompts):
            if self._unfinished[source]:
                self._move_prompt(source, free.pop(0))
        self.prompts_in_use = max(left, 1)

    def _move_prompt(self, source: int, target: int) -> None:
        for slots in self.layers.values():
            for tensor in slots.prompt_state():
                tensor[target] = tensor[source]
        swap = [target, source]
        self._unfinished[source], self._unfinished[target] = (self._unfinished[n] for n in swap)
        self._members[source], self._members[target] = (self._members[n] for n in swap)
        for row, place in self._prompt_of.items():
            if place == source:
                self._prompt_of[row] = target
        for place in (source, target):
            self._write_table(place)

    # -- decoding -------------------------------------------------------------------------------

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        step: DecodeStep,
        scoring: Scoring,
    ) -> Float[Tensor, "rows heads 1 value_dim"]:
        slots = self.layers[layer]
        rows, heads = query.shape[:2]
        kv_heads = key.shape[1]
        where = step.decoded[:, None, None].expand(-1, kv_heads, -1)
        slots.keys[:rows].scatter_(2, along(where, key), key)
        slots.values[:rows].scatter_(2, along(where, value), value)
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        own = self._attend_own(slots, grouped, step, scoring)
        sinks = scoring.sink_logits_by_kv_head(kv_heads)
        if sinks is not None:
            own = add_sinks(own, sinks)
        prompt = self._attend_prompt(slots, grouped, step, scoring)
        return merge_partials(prompt, own).reshape(rows, heads, 1, -1)

    def _attend_own(
        self,
        slots: SharedLayer,
        query: Float[Tensor, "rows kv_heads per_kv head_dim"],
        step: DecodeStep,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        rows, width, window = query.shape[0], step.width, scoring.sliding_window
        name = ("own", window)
        if name not in step.masks:
            columns, last = torch.arange(width, device=query.device), step.decoded[:, None]
            visible = columns <= last
            if window is not None:
                visible = visible & (columns > last - window)
            step.masks[name] = additive_mask(visible[:, None, None, :], query)
        return partial_attention(
            query, slots.keys[:rows, :, :width], slots.values[:rows, :, :width], step.masks[name], scoring
        )

    def _attend_prompt(
        self,
        slots: SharedLayer,
        query: Float[Tensor, "rows kv_heads per_kv head_dim"],
        step: DecodeStep,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        """All queries of a prompt's rows against its shared keys in one product."""
        kv_heads, pools = query.shape[1], slots.prompt_keys.shape[1]
        query = query.flatten(1, 2).unflatten(1, (pools, -1))
        per_pool = query.shape[2]
        prompts = slice(0, self.prompts_in_use)
        table = self.rows_of_prompt[prompts]
        group = table.shape[1]
        # (prompts, pools, group x per_pool, head_dim)
        together = query[table.flatten()].unflatten(0, (-1, group)).transpose(1, 2).flatten(2, 3)
        out, lse = partial_attention(
            together,
            slots.prompt_keys[prompts],
            slots.prompt_values[prompts],
            self._prompt_mask(slots, kv_heads, together, step.positions[table], scoring),
            scoring,
        )
        where = self.place_of_row[: query.shape[0]]
        out, lse = (
            x.unflatten(2, (group, per_pool)).transpose(1, 2).flatten(0, 1)[where] for x in (out, lse)
        )
        out, lse = (x.flatten(1, 2).unflatten(1, (kv_heads, -1)) for x in (out, lse))
        return out, lse

    def _prompt_mask(
        self,
        slots: SharedLayer,
        kv_heads: int,
        query: Float[Tensor, "prompts pools queries head_dim"],
        positions: Int[Tensor, "prompts group"],
        scoring: Scoring,
    ) -> Float[Tensor, "prompts pools _ kept"] | None:
        held = slots.prompt_positions[: query.shape[0]]
        group = positions.shape[1]
        visible: Bool[Tensor, ...] | None = None
        if self.plan.ragged_prompts:
            visible = (held >= 0)[:, :, None, :]
        if scoring.sliding_window is not None:
            first = (positions - scoring.sliding_window)[:, None, :, None]
            inside = held[:, :, None, :] > first
            visible = inside if visible is None else inside & visible
            visible = visible.repeat_interleave(query.shape[2] // group, dim=2)
        if slots.prompt_heads is not None:
            mine = of_own_head(slots.prompt_heads[: query.shape[0]], query.shape[2] // group, kv_heads)
            mine = mine.repeat(1, 1, group, 1)
            visible = mine if visible is None else mine & visible
        return None if visible is None else additive_mask(visible, query)

    def evict(self, rows: list[int]) -> None:
        raise NotImplementedError("decode-time eviction differs between the rows of a group: OwnedSlotCache")

    def evicted_at(self, row: int, tokens: int) -> Int[Tensor, "layers kv_heads tokens"]:
        place, prompt = self._prompt_of[row], int(self.prompt_lengths[row])
        kept = torch.stack([self.layers[n].evicted_at[place, :, :prompt] for n in sorted(self.layers)])
        record = torch.full((*kept.shape[:2], tokens), NEVER, dtype=torch.int32)
        # evicted right after the prompt: hidden from nobody if the completion is one token
        record[..., :prompt] = kept.masked_fill(kept >= tokens, NEVER).cpu()
        return record
