"""One layer's slots: KV memory of a fixed size, written and evicted in place.

Each row owns ``slots`` slots per KV head. A new key goes into a free slot; evicting only marks slots
free, to be overwritten. Nothing is gathered, concatenated or allocated after the start, so memory is
flat and there is no spike.
Where the heads of a layer keep different numbers of keys, their slots are one pool, which is no larger for
it: ``heads`` says whose key a slot holds. Order in memory does not matter: keys are cached with their rotary
position applied, and ``positions`` says which token a slot holds (-1 = free).
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring
from shadowmask.cache.base import CachePlan, Chosen
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
        device, kv_heads = key.device, key.shape[1]
        self.per_pool = kv_heads if plan.ragged_heads else 1
        pools, slots = kv_heads // self.per_pool, plan.slots_at(layer) * self.per_pool
        self.scoring = scoring
        self.keys = key.new_zeros(rows, pools, slots, key.shape[-1])
        self.values = value.new_zeros(rows, pools, slots, value.shape[-1])
        self.positions = torch.full((rows, pools, slots), -1, dtype=torch.int32, device=device)
        self.heads: Tensor | None = None
        if plan.ragged_heads:
            self.heads = torch.zeros(rows, pools, slots, dtype=torch.int64, device=device)
        # slot that the n-th key since the last eviction goes to, and that n
        self.free = torch.arange(slots, device=device).repeat(rows, pools, 1)
        self.written = torch.zeros(rows, pools, 1, dtype=torch.int64, device=device)
        # one column more than tokens: writes about slots that stay are sent there
        self.evicted_at = torch.full(
            (rows, kv_heads, plan.tokens + 1), NEVER, dtype=torch.int32, device=device
        )
        wide = torch.promote_types(key.dtype, torch.float32)
        self.attention_received: Tensor | None = None
        if plan.accumulates_attention:
            self.attention_received = torch.zeros(rows, pools, slots, dtype=wide, device=device)
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
            self.heads,
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
        chosen: Chosen,
        attention_received: Float[Tensor, "kv_heads prompt"] | None,
    ) -> None:
        """Write these keys of a prompt into the first slots of a cleared row."""
        kv_heads, prompt, _ = key.shape
        first = slice(0, chosen.kept)
        self.keys[row, :, first] = chosen.of(key)
        self.values[row, :, first] = chosen.of(value)
        self.positions[row, :, first] = chosen.position.to(torch.int32)
        if self.heads is not None:
            self.heads[row, :, first] = chosen.head
        self.evicted_at[row, :, :prompt] = chosen.record(kv_heads, prompt)
        self.written[row] = chosen.kept
        if self.attention_received is not None and attention_received is not None:
            self.attention_received[row, :, first] = chosen.of(attention_received)

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
        heads = torch.arange(self.per_pool, device=key.device)
        slot = self.free[rows].gather(-1, self.written[rows] + heads)  # (rows, pools, heads of a pool)
        key, value = (x.reshape(*slot.shape, x.shape[-1]) for x in (key, value))
        self.keys[rows].scatter_(2, along(slot, key), key)
        self.values[rows].scatter_(2, along(slot, value), value)
        if self.heads is not None:
            self.heads[rows].scatter_(2, slot, heads.expand_as(slot))
        where = positions.to(torch.int32)
        self.positions[rows].scatter_(2, slot, where[:, None, None].expand_as(slot))
        if self.attention_received is not None:
            zero = self.attention_received.new_zeros(())
            self.attention_received[rows].scatter_(2, slot, zero.expand(slot.shape))
        self.written[rows] += active[:, None, None] * self.per_pool
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

        def by_head(tensor: Tensor) -> Tensor:
            # of a pool every head gets all slots, without a copy; those of the others are empty to it
            return tensor.expand(-1, tensor.shape[1] * self.per_pool, *[-1] * (tensor.ndim - 2))

        received = of(self.attention_received)
        return LayerView(
            layer=layer,
            keys=by_head(self.keys[rows]),
            values=by_head(self.values[rows]),
            positions=self._held(rows),
            query_positions=query_positions,
            seeds=seeds,
            scaling=self.scoring.scaling,
            softcap=self.scoring.softcap,
            sliding_window=self.scoring.sliding_window,
            sink_logits=self.scoring.sink_logits,
            window_queries=of(self.window_queries),
            window_positions=of(self.window_positions),
            attention_received=None if received is None else by_head(received),
        )

    def _held(self, rows: Rows) -> Int[Tensor, "rows kv_heads slots"]:
        """Position that a slot holds for each head, -1 if none."""
        positions = self.positions[rows]
        if self.heads is None:
            return positions
        mine = self.heads[rows] == torch.arange(self.per_pool, device=positions.device)[:, None]
        return positions.masked_fill(~mine, -1)

    def evict(
        self, rows: Rows, keep: Bool[Tensor, "rows kv_heads slots"], query_positions: Int[Tensor, " rows"]
    ) -> None:
        """Free every occupied slot outside ``keep`` and record when: before the next query."""
        positions, evicted_at = self._held(rows), self.evicted_at[rows]
        dropped = (positions >= 0) & ~keep
        trash = evicted_at.shape[-1] - 1
        column = torch.where(dropped, positions.long(), trash)
        moment = (query_positions + 1).to(torch.int32)[:, None, None]
        self.evicted_at[rows] = evicted_at.scatter(2, column, moment.expand_as(column))
        of_pool = dropped.unflatten(1, (-1, self.per_pool)).any(dim=2)
        left = self.positions[rows].masked_fill(of_pool, -1)
        self.positions[rows] = left
        # free slots first, in order; the counter of written tokens starts again
        self.free[rows] = (left >= 0).to(torch.uint8).argsort(dim=-1, stable=True)
        self.written[rows] = 0


def along(
    index: Int[Tensor, "... chosen"], data: Float[Tensor, "... slots dim"]
) -> Int[Tensor, "... chosen dim"]:
    """Repeat an index over the last axis of what it indexes."""
    return index[..., None].expand(*index.shape, data.shape[-1])


def of_own_head(
    heads: Int[Tensor, "rows 1 slots"], queries: int, kv_heads: int
) -> Bool[Tensor, "rows 1 queries slots"]:
    """Which slots of a pool belong to the KV head of each query head."""
    mine = torch.arange(queries, device=heads.device) // (queries // kv_heads)
    return heads[:, :, None, :] == mine[:, None]
