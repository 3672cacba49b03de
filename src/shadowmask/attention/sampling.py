"""Attention sessions of the sampler: prefill one prompt, decode one token per row."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import (
    Scoring,
    causal_attention,
    masked_attention,
    received_attention,
)
from shadowmask.cache import SlotCache
from shadowmask.record import RecordError


class PrefillSession:
    """Dense causal attention over one prompt; each layer is evicted as soon as it has attended."""

    def __init__(self, cache: SlotCache, rows: slice) -> None:
        """``rows``: the rows of the cache that this prompt's group will decode in."""
        self.cache = cache
        self.rows = rows
        self.layers_served: set[int] = set()

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "1 heads prompt value_dim"]:
        _serve_once(self.layers_served, layer)
        out = causal_attention(query, key, value, scoring)
        received = None
        if self.cache.plan.accumulates_attention:
            received = received_attention(query, key, scoring)
        self.cache.prefill(layer, self.rows, query, key, value, received, scoring)
        return out


class DecodeSession:
    """One new token per row attends to the slots of its row."""

    def __init__(self, cache: SlotCache, positions: Int[Tensor, " rows"]) -> None:
        """``positions``: absolute position of each row's new token."""
        self.cache = cache
        self.positions = positions
        self.layers_served: set[int] = set()

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "rows heads 1 value_dim"]:
        _serve_once(self.layers_served, layer)
        slots = self.cache.layers[layer]
        slots.append(query, key, value, self.positions)
        visible = slots.positions >= 0
        if scoring.sliding_window is not None:
            visible = visible & (slots.positions > (self.positions - scoring.sliding_window)[:, None, None])
        # the query heads of one KV head become rows of one product: no key is repeated
        rows, heads = query.shape[:2]
        kv_heads = slots.keys.shape[1]
        grouped = query.reshape(rows, kv_heads, heads // kv_heads, -1)
        mask = visible[:, :, None, :].expand(-1, -1, heads // kv_heads, -1)
        if slots.attention_received is not None:
            _accumulate(slots.attention_received, grouped, slots.keys, mask, scoring)
        out = masked_attention(grouped, slots.keys, slots.values, mask, scoring)
        return out.reshape(rows, heads, 1, -1)


def _serve_once(layers_served: set[int], layer: int) -> None:
    """Note that a layer attended; raise if it did before (differential attention, looped layers)."""
    if layer in layers_served:
        raise RecordError(f"layer {layer} attends more than once per forward, which no record describes")
    layers_served.add(layer)


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
