"""Attention sessions of the sampler: prefill one prompt, decode one token per row."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.attention.kernel import Scoring, causal_attention, received_attention
from shadowmask.cache.base import DecodeStep, KVCache, PromptInfo
from shadowmask.record import RecordError


class PrefillSession:
    """Dense causal attention over one prompt; each layer is evicted as soon as it has attended."""

    def __init__(self, cache: KVCache, place: int, prompt: PromptInfo) -> None:
        """``place``: where the cache will keep this prompt, from ``open_prompt``."""
        self.cache = cache
        self.place = place
        self.prompt = prompt
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
        self.cache.prefill(layer, self.place, self.prompt, query, key, value, received, scoring)
        return out


class DecodeSession:
    """One new token per row attends to what its row holds."""

    def __init__(self, cache: KVCache, step: DecodeStep) -> None:
        self.cache = cache
        self.step = step
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
        return self.cache.attend(layer, query, key, value, self.step, scoring)


class ShapeSession:
    """Dense attention that notes how many bytes one token's keys and values take in each layer."""

    def __init__(self) -> None:
        self.bytes_of_layer: dict[int, int] = {}

    @property
    def layers_served(self) -> set[int]:
        return set(self.bytes_of_layer)

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "batch heads tokens head_dim"],
        key: Float[Tensor, "batch kv_heads tokens head_dim"],
        value: Float[Tensor, "batch kv_heads tokens value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "batch heads tokens value_dim"]:
        size = key.numel() * key.element_size() + value.numel() * value.element_size()
        self.bytes_of_layer[layer] = size // (key.shape[0] * key.shape[2])
        return causal_attention(query, key, value, scoring)


def _serve_once(layers_served: set[int], layer: int) -> None:
    """Note that a layer attended; raise if it did before (differential attention, looped layers)."""
    if layer in layers_served:
        raise RecordError(f"layer {layer} attends more than once per forward, which no record describes")
    layers_served.add(layer)
