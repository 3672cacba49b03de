"""One layer's slots: KV memory of a fixed size, written and evicted in place.

Each row owns ``slots`` slots per KV head. A new key goes into a free slot; evicting only marks slots
free, to be overwritten. Nothing is gathered, concatenated or allocated after the start, so memory is
flat and there is no spike. Order in memory does not matter: keys are cached with their rotary position
applied, and ``positions`` says which token a slot holds (-1 = free).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring
from shadowmask.cache.base import CachePlan
from shadowmask.eviction.base import LayerView
from shadowmask.record import NEVER

Rows = slice | Tensor  # a slice reads views, an index copies


class LayerSlots:
    """One layer of the cache. Allocated when the layer's first keys arrive and never again."""

    def __init__(
        self,
        plan: CachePlan,
        layer: int,
        rows: int,
        heads: int,
        key: Float[Tensor, "_ kv_heads _ head_dim"],
        value: Float[Tensor, "_ kv_heads _ value_dim"],
        scoring: Scoring,
    ) -> None:
        slots, device = plan.slots_at(layer), key.device
        kv_heads = key.shape[1]
        self.scoring = scoring
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

    @property
    def nbytes(self) -> int:
        return sum(x.numel() * x.element_size() for x in (self.keys, self.values))

    def _state(self) -> list[Tensor]:
        """Everything that a row consists of."""
        state = (
            self.keys,
            self.values,
            self.positions,
            self.free,
            self.written,
            self.evicted_at,
            self.attention_received,
            self.window_queries,
            self.window_positions,
        )
        return [tensor for tensor in state if tensor is not None]

    def copy_row(self, source: int, targets: Int[Tensor, " targets"]) -> None:
        for tensor in self._state():
            tensor[targets] = tensor[source].clone()

    def clear_row(self, row: int) -> None:
        """Make every slot of a row free; what they held is overwritten before it is read."""
        self.positions[row] = -1
        self.free[row] = torch.arange(self.free.shape[-1], device=self.free.device)
        self.written[row] = 0
        self.evicted_at[row] = NEVER
        for tensor, empty in ((self.attention_received, 0), (self.window_positions, -1)):
            if tensor is not None:
                tensor[row] = empty

    def store_prompt(
        self,
        row: int,
        key: Float[Tensor, "kv_heads prompt head_dim"],
        value: Float[Tensor, "kv_heads prompt value_dim"],
        index: Int[Tensor, "kv_heads kept"] | None,
        attention_received: Float[Tensor, "kv_heads prompt"] | None,
    ) -> None:
        """Write the prompt keys at ``index`` (``None``: all) into the first slots of a cleared row."""
        kv_heads, prompt, _ = key.shape
        kept = prompt if index is None else index.shape[1]
        for source, slots in ((key, self.keys), (value, self.values)):
            slots[row, :, :kept] = source if index is None else source.gather(1, along(index, source))
        everywhere = torch.arange(prompt, device=key.device).expand(kv_heads, -1)
        if index is not None:
            record = torch.full((kv_heads, prompt), prompt, dtype=torch.int32, device=key.device)
            self.evicted_at[row, :, :prompt] = record.scatter_(1, index, NEVER)
        index = everywhere if index is None else index
        self.positions[row, :, :kept] = index.to(torch.int32)
        self.written[row] = kept
        if self.attention_received is not None and attention_received is not None:
            self.attention_received[row, :, :kept] = attention_received.gather(1, index)

    def store_window(self, row: int, query: Float[Tensor, "heads prompt head_dim"]) -> None:
        """Remember the prompt's last queries, at the ring places that decoding will overwrite in turn."""
        if self.window_queries is None or self.window_positions is None:
            return
        window, prompt = self.window_queries.shape[2], query.shape[1]
        last = torch.arange(max(prompt - window, 0), prompt, device=query.device)
        self.window_queries[row, :, last % window] = query[:, last]
        self.window_positions[row, last % window] = last.to(torch.int32)

    def append(
        self,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        positions: Int[Tensor, " rows"],
        active: Int[Tensor, " rows"],
    ) -> None:
        """Write one new token into the next free slot of each of the first ``rows`` rows.

        A row that is not active writes to the same slot again and again.
        """
        rows = slice(0, query.shape[0])
        slot = self.free[rows].gather(-1, self.written[rows])  # (rows, kv_heads, 1)
        self.keys[rows].scatter_(2, along(slot, key), key)
        self.values[rows].scatter_(2, along(slot, value), value)
        where = positions.to(torch.int32)
        self.positions[rows].scatter_(2, slot, where[:, None, None].expand_as(slot))
        if self.attention_received is not None:
            zero = self.attention_received.new_zeros(())
            self.attention_received[rows].scatter_(2, slot, zero.expand(slot.shape))
        self.written[rows] += active[:, None, None]
        if self.window_queries is not None and self.window_positions is not None:
            place = (positions % self.window_queries.shape[2])[:, None]
            ring = place[:, None, :, None].expand(-1, *query.shape[1:])
            self.window_queries[rows].scatter_(2, ring, query)
            self.window_positions[rows].scatter_(1, place, where[:, None])

    def view(
        self, layer: int, rows: Rows, query_positions: Int[Tensor, " rows"], seeds: Int[Tensor, " rows"]
    ) -> LayerView:
        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else tensor[rows]

        return LayerView(
            layer=layer,
            keys=self.keys[rows],
            values=self.values[rows],
            positions=self.positions[rows],
            query_positions=query_positions,
            seeds=seeds,
            scaling=self.scoring.scaling,
            softcap=self.scoring.softcap,
            sliding_window=self.scoring.sliding_window,
            sink_logits=self.scoring.sink_logits,
            window_queries=of(self.window_queries),
            window_positions=of(self.window_positions),
            attention_received=of(self.attention_received),
        )

    def evict(
        self, rows: Rows, keep: Bool[Tensor, "rows kv_heads slots"], query_positions: Int[Tensor, " rows"]
    ) -> None:
        """Free every occupied slot outside ``keep`` and record when: before the next query."""
        positions, evicted_at = self.positions[rows], self.evicted_at[rows]
        dropped = (positions >= 0) & ~keep
        trash = evicted_at.shape[-1] - 1
        column = torch.where(dropped, positions.long(), trash)
        moment = (query_positions + 1).to(torch.int32)[:, None, None]
        self.evicted_at[rows] = evicted_at.scatter(2, column, moment.expand_as(column))
        left = positions.masked_fill(dropped, -1)
        self.positions[rows] = left
        # free slots first, in order; the counter of written tokens starts again
        self.free[rows] = (left >= 0).to(torch.uint8).argsort(dim=-1, stable=True)
        self.written[rows] = 0


def along(
    index: Int[Tensor, "... chosen"], data: Float[Tensor, "... slots dim"]
) -> Int[Tensor, "... chosen dim"]:
    """Repeat an index over the last axis of what it indexes."""
    return index[..., None].expand(*index.shape, data.shape[-1])
