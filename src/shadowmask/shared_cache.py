"""The cache for prompt-only eviction: a group shares the kept keys of its prompt.

What is kept of a prompt is the same for all completions of it, and stays the same to the end. So it is
stored once per prompt, and each row owns slots for its own new tokens only. A decode step attends to
the two parts apart and merges them: over the shared part, the queries of the whole group are the rows
of one matrix product, so its keys are read once per group instead of once per completion.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring, merge_partials, partial_attention
from shadowmask.cache import CachePlan, KVCache
from shadowmask.eviction.base import Evictor
from shadowmask.record import NEVER

WIDTH_STEP = 64  # a decode step reads own slots up to the next multiple of this


class SharedLayer:
    """One layer: kept prompt keys per prompt, own keys per row."""

    def __init__(
        self,
        prompts: int,
        kept: int,
        rows: int,
        new_tokens: int,
        longest_prompt: int,
        key: Float[Tensor, "_ kv_heads _ head_dim"],
        value: Float[Tensor, "_ kv_heads _ value_dim"],
    ) -> None:
        kv_heads, device = key.shape[1], key.device
        self.prompt_keys = key.new_zeros(prompts, kv_heads, kept, key.shape[-1])
        self.prompt_values = value.new_zeros(prompts, kv_heads, kept, value.shape[-1])
        self.prompt_positions = torch.full((prompts, kv_heads, kept), -1, dtype=torch.int32, device=device)
        self.keys = key.new_zeros(rows, kv_heads, new_tokens, key.shape[-1])
        self.values = value.new_zeros(rows, kv_heads, new_tokens, value.shape[-1])
        shape = (prompts, kv_heads, longest_prompt)
        self.evicted_at = torch.full(shape, NEVER, dtype=torch.int32, device=device)

    @property
    def nbytes(self) -> int:
        tensors = (self.prompt_keys, self.prompt_values, self.keys, self.values)
        return sum(x.numel() * x.element_size() for x in tensors)


class SharedPromptCache(KVCache):
    """See module. Rows are prompt-major: group ``g`` owns ``sizes[g]`` rows in a row."""

    shares_prompts = True
    layers: dict[int, SharedLayer]

    def __init__(
        self,
        plan: CachePlan,
        evictor: Evictor,
        budgets: Int[Tensor, " rows"],
        prompt_seeds: Int[Tensor, " rows"],
        seeds: Int[Tensor, " rows"],
        prompt_lengths: Int[Tensor, " rows"],
        sizes: list[int],
        new_tokens: int,
    ) -> None:
        super().__init__(plan, evictor, budgets, prompt_seeds, seeds)
        self.sizes = sizes
        self.new_tokens = new_tokens
        self.prompt_lengths = prompt_lengths
        starts = [sum(sizes[:n]) for n in range(len(sizes))]
        self.group_of = {start: n for n, start in enumerate(starts)}
        self.group_of_row = [n for n, size in enumerate(sizes) for _ in range(size)]
        kept = torch.minimum(prompt_lengths, budgets).tolist()
        self.kept = [kept[start] for start in starts]
        # rows of each group, short groups padded with their last row; None: all groups are as large
        self.rows_of_group: Int[Tensor, "groups largest"] | None = None
        self.place_of_row: Int[Tensor, " rows"] | None = None
        if min(sizes) != max(sizes):
            largest, device = max(sizes), budgets.device
            index = [[s + min(n, k - 1) for n in range(largest)] for s, k in zip(starts, sizes, strict=True)]
            self.rows_of_group = torch.tensor(index, device=device)
            places = [g * largest + n for g, size in enumerate(sizes) for n in range(size)]
            self.place_of_row = torch.tensor(places, device=device)

    def store_prompt(
        self,
        layer: int,
        rows: slice,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        keep: Bool[Tensor, "kv_heads prompt"] | None,
        attention_received: Float[Tensor, "1 kv_heads prompt"] | None,
        scoring: Scoring,
    ) -> None:
        if layer not in self.layers:
            longest = int(self.prompt_lengths.max())
            groups = len(self.sizes)
            self.layers[layer] = SharedLayer(
                groups, max(self.kept), self.plan.rows, self.new_tokens, longest, key, value
            )
        slots, group = self.layers[layer], self.group_of[rows.start]
        kv_heads, prompt = key.shape[1], key.shape[2]
        kept = self.kept[group]
        if keep is None:
            slots.prompt_keys[group, :, :kept] = key[0]
            slots.prompt_values[group, :, :kept] = value[0]
            slots.prompt_positions[group, :, :kept] = torch.arange(prompt, device=key.device)
            return
        index = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[:, :kept]
        for source, target in ((key, slots.prompt_keys), (value, slots.prompt_values)):
            chosen = index[..., None].expand(kv_heads, kept, source.shape[-1])
            torch.gather(source[0], 1, chosen, out=target[group, :, :kept])
        slots.prompt_positions[group, :, :kept] = index.to(torch.int32)
        slots.evicted_at[group, :, :prompt] = torch.where(keep, NEVER, prompt).to(torch.int32)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        positions: Int[Tensor, " rows"],
        step: int,
        scoring: Scoring,
    ) -> Float[Tensor, "rows heads 1 value_dim"]:
        slots = self.layers[layer]
        slots.keys[:, :, step] = key[:, :, 0]
        slots.values[:, :, step] = value[:, :, 0]
        rows, heads = query.shape[:2]
        kv_heads = key.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        own = self._attend_own(slots, grouped, step, scoring)
        prompt = self._attend_prompt(slots, grouped, positions, scoring)
        return merge_partials([prompt, own]).reshape(rows, heads, 1, -1)

    def _attend_own(
        self,
        slots: SharedLayer,
        query: Float[Tensor, "rows kv_heads per_kv head_dim"],
        step: int,
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        width = min((step // WIDTH_STEP + 1) * WIDTH_STEP, self.new_tokens)
        columns = torch.arange(width, device=query.device)
        visible = columns <= step
        if scoring.sliding_window is not None:
            visible = visible & (columns > step - scoring.sliding_window)
        return partial_attention(
            query, slots.keys[:, :, :width], slots.values[:, :, :width], visible[None, None, None], scoring
        )

    def _attend_prompt(
        self,
        slots: SharedLayer,
        query: Float[Tensor, "rows kv_heads per_kv head_dim"],
        positions: Int[Tensor, " rows"],
        scoring: Scoring,
    ) -> tuple[Tensor, Tensor]:
        """All queries of a group against its shared keys in one product."""
        groups = len(self.sizes)
        per_kv = query.shape[2]
        if self.rows_of_group is not None:
            query = query[self.rows_of_group.flatten()]
            positions = positions[self.rows_of_group[:, 0]]
        else:
            positions = positions[:: self.sizes[0]]
        largest = query.shape[0] // groups
        # (groups, kv_heads, largest x per_kv, head_dim)
        together = query.unflatten(0, (groups, largest)).transpose(1, 2).flatten(2, 3)
        visible = None
        if scoring.sliding_window is not None:
            visible = slots.prompt_positions > (positions - scoring.sliding_window)[:, None, None]
        if min(self.kept) != max(self.kept):
            occupied = slots.prompt_positions >= 0
            visible = occupied if visible is None else visible & occupied
        out, lse = partial_attention(
            together,
            slots.prompt_keys,
            slots.prompt_values,
            None if visible is None else visible[:, :, None, :],
            scoring,
        )
        out = out.unflatten(2, (largest, per_kv)).transpose(1, 2).flatten(0, 1)
        lse = lse.unflatten(2, (largest, per_kv)).transpose(1, 2).flatten(0, 1)
        if self.place_of_row is not None:
            out, lse = out[self.place_of_row], lse[self.place_of_row]
        return out, lse

    def evict(self, query_positions: Int[Tensor, " rows"]) -> None:
        raise NotImplementedError("decode-time eviction differs between the rows of a group: use SlotCache")

    def evicted_at(self, row: int, tokens: int) -> Int[Tensor, "layers kv_heads tokens"]:
        group = self.group_of_row[row]
        prompt = int(self.prompt_lengths[row])
        kept = torch.stack([self.layers[n].evicted_at[group, :, :prompt] for n in sorted(self.layers)])
        record = torch.full((*kept.shape[:2], tokens), NEVER, dtype=torch.int32)
        # evicted right after the prompt: hidden from nobody if the completion is one token
        record[..., :prompt] = kept.masked_fill(kept >= tokens, NEVER).cpu()
        return record
