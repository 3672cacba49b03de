"""Attention sessions of the sampler: prefill one prompt, decode one token per row."""

from __future__ import annotations

from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.attention.kernel import (
    Scoring,
    causal_attention,
    received_attention,
)
from shadowmask.cache import KVCache
from shadowmask.record import RecordError


class PrefillSession:
    """Dense causal attention over one prompt; each layer is evicted as soon as it has attended."""

    def __init__(self, cache: KVCache, rows: slice) -> None:
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

    def __init__(self, cache: KVCache, positions: Int[Tensor, " rows"], step: int) -> None:
        """``positions``: absolute position of each row's new token, its ``step``-th decoded one."""
        self.step = step
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
        return self.cache.attend(layer, query, key, value, self.positions, self.step, scoring)


def _serve_once(layers_served: set[int], layer: int) -> None:
    """Note that a layer attended; raise if it did before (differential attention, looped layers)."""
    if layer in layers_served:
        raise RecordError(f"layer {layer} attends more than once per forward, which no record describes")
    layers_served.add(layer)
