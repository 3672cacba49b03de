"""The slot cache: KV memory of a fixed size, written and evicted in place.

Each layer owns ``slots`` slots per sequence and KV head. A new key goes into a free slot; evicting
only marks slots free, to be overwritten. Nothing is gathered, concatenated or allocated after the
start, so memory is flat and there is no spike. Order in memory does not matter: keys are cached with
their rotary position applied, and ``positions`` says which token a slot holds (-1 = free).

Everything that changes is a tensor (counters included), per sequence: what a sequence keeps does not
depend on its neighbours, and a decode step needs no host synchronisation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring, masked_attention
from shadowmask.eviction.base import Evictor, LayerView
from shadowmask.record import NEVER


def slot_bytes(num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes that one token's keys and values take over all layers and KV heads."""
    return num_layers * num_kv_heads * (key_dim + value_dim) * itemsize


@dataclass(frozen=True)
class CachePlan:
    """What a cache must be able to hold. All of it is known before the first prefill."""

    rows: int  # sequences
    slots: int  # per row, layer and KV head
    tokens: int  # longest prompt + completion, the length of the record
    observation_window: int
    accumulates_attention: bool


class LayerSlots:
    """One layer of the cache. Allocated when the layer's first keys arrive and never again."""

    def __init__(
        self,
        plan: CachePlan,
        heads: int,
        key: Float[Tensor, "_ kv_heads _ head_dim"],
        value: Float[Tensor, "_ kv_heads _ value_dim"],
    ) -> None:
        rows, slots, device = plan.rows, plan.slots, key.device
        kv_heads = key.shape[1]
        self.keys = key.new_zeros(rows, kv_heads, slots, key.shape[-1])
        self.values = value.new_zeros(rows, kv_heads, slots, value.shape[-1])
        self.positions = torch.full((rows, kv_heads, slots), -1, dtype=torch.int32, device=device)
        # slot that the n-th token since the last eviction goes to, and that n
        self.free = torch.arange(slots, device=device).repeat(rows, kv_heads, 1)
        self.written = torch.zeros(rows, kv_heads, 1, dtype=torch.int64, device=device)
        # one column more than tokens: writes about slots that stay are sent there
        self.evicted_at = torch.full(
            (rows, kv_heads, plan.tokens + 1), NEVER, dtype=torch.int32, device=device
        )
        wide = torch.promote_types(key.dtype, torch.float32)
        self.attention_received: Tensor | None = None
        if plan.accumulates_attention:
            self.attention_received = torch.zeros(rows, kv_heads, slots, dtype=wide, device=device)
        self.window_queries: Tensor | None = None
        self.window_positions: Tensor | None = None
        if plan.observation_window:
            window = plan.observation_window
            self.window_queries = key.new_zeros(rows, heads, window, key.shape[-1])
            self.window_positions = torch.full((rows, window), -1, dtype=torch.int32, device=device)
        self.scoring: Scoring | None = None

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    def store_prompt(
        self,
        rows: slice,
        key: Float[Tensor, "kv_heads prompt head_dim"],
        value: Float[Tensor, "kv_heads prompt value_dim"],
        keep: Bool[Tensor, "kv_heads prompt"] | None,
        attention_received: Float[Tensor, "kv_heads prompt"] | None,
    ) -> None:
        """Write the prompt keys that stay (``keep=None``: all) into the slots of a group's rows."""
        kv_heads, prompt, _ = key.shape
        index = torch.arange(prompt, device=key.device).expand(kv_heads, -1)
        if keep is not None:
            # the same number stays in every head; a stable sort puts those first, in order
            kept = int(keep[0].sum())
            index = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[:, :kept]
            self.evicted_at[rows, :, :prompt] = torch.where(keep, NEVER, prompt).to(torch.int32)
        kept = index.shape[1]
        for source, slots in ((key, self.keys), (value, self.values)):
            gathered = source if keep is None else source.gather(1, _like(index, source))
            slots[rows, :, :kept] = gathered
        self.positions[rows, :, :kept] = index.to(torch.int32)
        self.written[rows] = kept
        if self.attention_received is not None and attention_received is not None:
            self.attention_received[rows, :, :kept] = attention_received.gather(1, index)

    def store_window(
        self, rows: slice, query: Float[Tensor, "heads prompt head_dim"], prompt_length: int
    ) -> None:
        """Remember the prompt's last queries, at the ring places that decoding will overwrite in turn."""
        if self.window_queries is None or self.window_positions is None:
            return
        window = self.window_queries.shape[2]
        last = torch.arange(max(prompt_length - window, 0), prompt_length, device=query.device)
        self.window_queries[rows, :, last % window] = query[:, last]
        self.window_positions[rows, last % window] = last.to(torch.int32)

    def append(
        self,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        position: Int[Tensor, " rows"],
    ) -> None:
        """Write one new token per row into its next free slot."""
        slot = self.free.gather(-1, self.written)  # (rows, kv_heads, 1)
        self.keys.scatter_(2, _like(slot, key), key)
        self.values.scatter_(2, _like(slot, value), value)
        where = position.to(torch.int32)[:, None, None]
        self.positions.scatter_(2, slot, where.expand_as(slot))
        if self.attention_received is not None:
            zero = self.attention_received.new_zeros(())
            self.attention_received.scatter_(2, slot, zero.expand(slot.shape))
        self.written += 1
        if self.window_queries is not None and self.window_positions is not None:
            place = (position % self.window_queries.shape[2])[:, None]
            self.window_queries.scatter_(2, place[:, None, :, None].expand(-1, *query.shape[1:]), query)
            self.window_positions.scatter_(1, place, position.to(torch.int32)[:, None])

    def view(
        self, layer: int, query_positions: Int[Tensor, " rows"], seeds: Int[Tensor, " rows"]
    ) -> LayerView:
        assert self.scoring is not None
        return LayerView(
            layer=layer,
            keys=self.keys,
            values=self.values,
            positions=self.positions,
            query_positions=query_positions,
            seeds=seeds,
            scaling=self.scoring.scaling,
            softcap=self.scoring.softcap,
            sliding_window=self.scoring.sliding_window,
            window_queries=self.window_queries,
            window_positions=self.window_positions,
            attention_received=self.attention_received,
        )

    def evict(
        self,
        keep: Bool[Tensor, "rows kv_heads slots"],
        query_positions: Int[Tensor, " rows"],
    ) -> None:
        """Free every occupied slot outside ``keep`` and record when: before the next query."""
        dropped = (self.positions >= 0) & ~keep
        trash = self.evicted_at.shape[-1] - 1
        column = torch.where(dropped, self.positions.long(), trash)
        moment = (query_positions + 1).to(torch.int32)[:, None, None]
        self.evicted_at.scatter_(2, column, moment.expand_as(column).contiguous())
        self.positions.masked_fill_(dropped, -1)
        # free slots first, in order; the counter of written tokens starts again
        self.free.copy_((self.positions >= 0).to(torch.uint8).argsort(dim=-1, stable=True))
        self.written.zero_()


class KVCache(ABC):
    """What a sampler's cache is: an evictor's choice from each prompt, then one token per row at a time.

    Args:
        budgets: keys that may stay per row; ``NEVER`` where the evictor sets no bound.
        prompt_seeds: what a random evictor draws from in the prefill, equal within a group.
        seeds: the same for decoding, one per sequence.
    """

    def __init__(
        self,
        plan: CachePlan,
        evictor: Evictor,
        budgets: Int[Tensor, " rows"],
        prompt_seeds: Int[Tensor, " rows"],
        seeds: Int[Tensor, " rows"],
    ) -> None:
        self.plan = plan
        self.evictor = evictor
        self.budgets = budgets
        self.prompt_seeds = prompt_seeds
        self.seeds = seeds
        windows = [evictor.recent_window_for(int(budget)) for budget in budgets.tolist()]
        self.recent_windows = torch.tensor(windows, device=budgets.device)
        self.layers: dict[int, Any] = {}  # made when a layer's first keys arrive
        self.prefill_bytes = 0  # largest keys + values of one layer's whole prompt seen so far
        self.token_bytes = 0  # keys and values of one token over all layers
        self._layers_filled: set[int] = set()

    shares_prompts: ClassVar[bool]  # whether a group holds its prompt once

    @abstractmethod
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
        """Store the prompt keys that stay (``keep=None``: all) for the rows of one group."""

    @abstractmethod
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
        """Store one new token per row, at these absolute positions, and attend from it.

        Args:
            step: how many tokens each row has decoded before this one.
        """

    @abstractmethod
    def evict(self, query_positions: Int[Tensor, " rows"]) -> None:
        """Cut every layer down to the budgets, after query ``query_positions`` was computed."""

    @abstractmethod
    def evicted_at(self, row: int, tokens: int) -> Int[Tensor, "layers kv_heads tokens"]:
        """The record of one row's first ``tokens`` tokens, on the CPU."""

    @property
    def nbytes(self) -> int:
        """Bytes that keys and values really occupy."""
        return sum(layer.nbytes for layer in self.layers.values())

    def prefill(
        self,
        layer: int,
        rows: slice,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        attention_received: Float[Tensor, "1 kv_heads prompt"] | None,
        scoring: Scoring,
    ) -> None:
        """Evict from one layer's full prompt and store what stays for all rows of the group.

        Called as soon as that layer has attended, so at no time do two layers hold a full prompt.
        """
        size = key.numel() * key.element_size() + value.numel() * value.element_size()
        self.prefill_bytes = max(self.prefill_bytes, size)
        if layer not in self._layers_filled:
            self._layers_filled.add(layer)
            self.token_bytes += size // key.shape[2]
        first = slice(rows.start, rows.start + 1)  # the whole group has the same prompt
        keep = None
        if key.shape[2] > int(self.budgets[rows.start]):
            view = self._prompt_view(layer, first, query, key, value, attention_received, scoring)
            keep = self._keep(view, first)[0]
        self.store_prompt(layer, rows, query, key, value, keep, attention_received, scoring)

    def _keep(self, view: LayerView, rows: slice) -> Bool[Tensor, "batch kv_heads slots"]:
        return self.evictor.select(
            self.evictor.score(view),
            view.positions,
            view.query_positions,
            self.budgets[rows],
            self.recent_windows[rows],
        )

    def _prompt_view(
        self,
        layer: int,
        rows: slice,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_received: Tensor | None,
        scoring: Scoring,
    ) -> LayerView:
        prompt = key.shape[2]
        tokens = torch.arange(prompt, dtype=torch.int32, device=key.device)
        window = min(self.plan.observation_window, prompt)
        return LayerView(
            layer=layer,
            keys=key,
            values=value,
            positions=tokens.expand(1, key.shape[1], -1),
            query_positions=torch.tensor([prompt - 1], device=key.device),
            seeds=self.prompt_seeds[rows],
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            sliding_window=scoring.sliding_window,
            window_queries=query[:, :, prompt - window :] if window else None,
            window_positions=tokens[None, prompt - window :] if window else None,
            attention_received=attention_received,
        )


class SlotCache(KVCache):
    """Every row owns its slots, prompt keys included: what decode-time eviction needs."""

    shares_prompts = False

    layers: dict[int, LayerSlots]

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
            self.layers[layer] = LayerSlots(self.plan, query.shape[1], key, value)
        slots = self.layers[layer]
        slots.scoring = scoring
        received = None if attention_received is None else attention_received[0]
        slots.store_prompt(rows, key[0], value[0], keep, received)
        slots.store_window(rows, query[0], key.shape[2])

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
        slots.append(query, key, value, positions)
        visible = slots.positions >= 0
        if scoring.sliding_window is not None:
            visible = visible & (slots.positions > (positions - scoring.sliding_window)[:, None, None])
        # the query heads of one KV head become rows of one product: no key is repeated
        rows, heads = query.shape[:2]
        kv_heads = slots.keys.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        mask = visible[:, :, None, :].expand(-1, -1, heads // kv_heads, -1)
        if slots.attention_received is not None:
            _accumulate(slots.attention_received, grouped, slots.keys, mask, scoring)
        out = masked_attention(grouped, slots.keys, slots.values, mask, scoring)
        return out.reshape(rows, heads, 1, -1)

    def evict(self, query_positions: Int[Tensor, " rows"]) -> None:
        """Cut every layer down to the budgets, after query ``query_positions`` was computed."""
        everything = slice(0, self.plan.rows)
        for index, slots in self.layers.items():
            view = slots.view(index, query_positions, self.seeds)
            slots.evict(self._keep(view, everything), query_positions)

    def evicted_at(self, row: int, tokens: int) -> Int[Tensor, "layers kv_heads tokens"]:
        """The record of one row's first ``tokens`` tokens.

        Evictions at or after the row's last token hid nothing from any of its queries: NEVER.
        """
        record = torch.stack([self.layers[n].evicted_at[row, :, :tokens] for n in sorted(self.layers)])
        return record.masked_fill(record >= tokens, NEVER).cpu()


def _accumulate(
    received: Float[Tensor, "rows kv_heads slots"],
    query: Float[Tensor, "rows kv_heads per_kv head_dim"],
    key: Float[Tensor, "rows kv_heads slots head_dim"],
    visible: Bool[Tensor, "rows kv_heads per_kv slots"],
    scoring: Scoring,
) -> None:
    """Add the attention weights of one query per row to what each slot has received.

    The outputs do not come from these weights but from the learner's own kernel: in bfloat16 the
    weights are rounded here and not there, which alone would make up most of the sampling gap.
    """
    logits = scoring.logits(query @ key.transpose(-1, -2)).to(received.dtype)
    received += logits.masked_fill(~visible, -torch.inf).softmax(dim=-1).sum(dim=2)


def _like(
    index: Int[Tensor, "... chosen"], data: Float[Tensor, "... slots dim"]
) -> Int[Tensor, "... chosen dim"]:
    """Repeat an index over the last axis of what it indexes."""
    return index[..., None].expand(*index.shape, data.shape[-1])
