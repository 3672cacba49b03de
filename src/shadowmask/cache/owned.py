"""The cache for decode-time eviction: every row owns its slots, prompt keys included."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring, masked_attention, sink_softmax
from shadowmask.cache.base import CachePlan, Chosen, DecodeStep, KVCache, PromptInfo
from shadowmask.cache.slots import LayerSlots, of_own_head
from shadowmask.eviction.base import Evictor
from shadowmask.record import NEVER


class OwnedSlotCache(KVCache):
    """See module. A prompt is written into the first row that it is for and copied to the others.

    If sequences of it have to wait for a free row, it is written into one row more, the waiting row, and
    copied from there when their turn comes: by then the first row has evicted other keys.
    """

    shares_prompts = False

    def __init__(self, plan: CachePlan, evictor: Evictor, device: torch.device) -> None:
        super().__init__(plan, evictor, device)
        self.layers: dict[int, LayerSlots] = {}  # made when a layer's first keys arrive
        self._waiting_row = plan.rows
        self._left = 0  # sequences that the waiting row's prompt still has to begin

    @property
    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self.layers.values())

    @staticmethod
    def slots_needed(plan: CachePlan, layer: int = 0) -> int:
        return (plan.rows + plan.waiting) * plan.slots_at(layer)

    def can_open(self, samples: int, seated_now: int) -> bool:
        return samples == seated_now or self._left == 0

    def open_prompt(self, prompt: PromptInfo, samples: int, rows: list[int]) -> int:
        if samples == len(rows):
            return rows[0]
        self._left = samples
        return self._waiting_row

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
            rows = self.plan.rows + self.plan.waiting
            self.layers[layer] = LayerSlots(self.plan, layer, rows, query.shape[1], key, value, scoring)
        slots = self.layers[layer]
        slots.clear_row(place)
        received = None if attention_received is None else attention_received[0]
        slots.store_prompt(place, key[0], value[0], chosen, received)
        slots.store_window(place, query[0])

    def _seat(self, rows: list[int], place: int) -> None:
        targets = torch.tensor([row for row in rows if row != place], dtype=torch.int64, device=self.device)
        if len(targets):
            for slots in self.layers.values():
                slots.copy_row(place, targets)
        if place == self._waiting_row:
            self._left -= len(rows)

    def _release(self, row: int) -> None:
        for slots in self.layers.values():
            slots.clear_row(row)

    def _move(self, source: int, target: int) -> None:
        for slots in self.layers.values():
            slots.copy_row(source, torch.tensor([target], device=self.device))
            slots.clear_row(source)

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
        slots.append(query, key, value, step.positions, self.active[:rows])
        held, keys, values = (x[:rows] for x in (slots.positions, slots.keys, slots.values))
        visible = held >= 0
        if scoring.sliding_window is not None:
            visible = visible & (held > (step.positions - scoring.sliding_window)[:, None, None])
        # the query heads of one pool, which is one KV head's, become rows of one product: no key is repeated
        pools = keys.shape[1]
        grouped = query.reshape(rows, pools, heads // pools, -1)
        mask = visible[:, :, None, :].expand(-1, -1, heads // pools, -1)
        if slots.heads is not None:
            mask = mask & of_own_head(slots.heads[:rows], heads, key.shape[1])
        scoring = replace(scoring, sink_logits=scoring.sink_logits_by_kv_head(pools))
        if slots.attention_received is not None:
            _accumulate(slots.attention_received[:rows], grouped, keys, mask, scoring)
        out = masked_attention(grouped, keys, values, mask, scoring)
        return out.reshape(rows, heads, 1, -1)

    def evict(self, rows: list[int]) -> None:
        # every row in use: views; some of them: copies of those
        whole = len(rows) == self.in_use
        chosen = slice(0, self.in_use) if whole else torch.tensor(rows, device=self.device)
        last = (self.prompt_lengths + self.decoded - 1)[chosen]
        for index, slots in self.layers.items():
            view = slots.view(index, chosen, last, self.seeds[chosen])
            keep = self.evictor.select(
                self.evictor.score(view),
                view.positions,
                last,
                *self._limits(chosen, index),
            )
            slots.evict(chosen, keep, last)

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
    received += sink_softmax(logits.masked_fill(~visible, -torch.inf), scoring.sink_logits).sum(dim=2)
