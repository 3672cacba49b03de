"""A random layer for scorers to look at, and slow ways to read it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from shadowmask.eviction import LayerView

KV_HEADS, PER_KV, DIM, VALUE_DIM = 2, 3, 8, 6


def make_view(
    tokens: int,
    window: int,
    shuffled: bool = False,
    softcap: float | None = None,
    sliding_window: int | None = None,
    seed: int = 0,
    same_keys: bool = False,
    **changes: Any,
) -> LayerView:
    """A random layer of one sequence.

    Args:
        shuffled: spread keys over slots with holes and drop some, in every head others.
        same_keys: let all heads drop the same ones.
    """
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    keys, values = normal(1, KV_HEADS, tokens, DIM), normal(1, KV_HEADS, tokens, VALUE_DIM)
    queries = normal(1, KV_HEADS * PER_KV, window, DIM)
    received = normal(1, KV_HEADS, tokens).abs()
    positions = torch.arange(tokens, dtype=torch.int32).expand(1, KV_HEADS, -1).clone()
    if shuffled:
        slots = tokens + 4
        dropped = torch.rand(KV_HEADS, tokens, generator=generator) < 0.3
        dropped[:, -window:] = False
        if same_keys:
            dropped[:] = dropped[0]
        positions = positions.masked_fill(dropped, -1)
        # free slots hold old keys
        filling = normal(1, KV_HEADS, 4, DIM), normal(1, KV_HEADS, 4, VALUE_DIM), normal(1, KV_HEADS, 4)
        keys, values, received = (
            torch.cat([x, more], dim=2) for x, more in zip((keys, values, received), filling, strict=True)
        )
        positions = torch.cat([positions, positions.new_full((1, KV_HEADS, 4), -1)], dim=2)
        order = torch.rand(1, KV_HEADS, slots, generator=generator).argsort(dim=-1)
        keys, values, received, positions = (in_order(x, order) for x in (keys, values, received, positions))
    settings: dict[str, Any] = {
        "layer": 0,
        "keys": keys,
        "values": values,
        "positions": positions,
        "query_positions": torch.tensor([tokens - 1]),
        "seeds": torch.tensor([7]),
        "scaling": DIM**-0.5,
        "softcap": softcap,
        "sliding_window": sliding_window,
        "window_queries": queries,
        "window_positions": torch.arange(tokens - window, tokens, dtype=torch.int32)[None],
        "attention_received": received,
    }
    return LayerView(**settings | changes)


def view_of_keys(keys: list[list[float]]) -> LayerView:
    """One head with these keys, and the same values, at positions 0, 1, ...; no queries."""
    states = torch.tensor(keys)[None, None]
    return LayerView(
        layer=0,
        keys=states,
        values=states,
        positions=torch.arange(len(keys))[None, None],
        query_positions=torch.tensor([len(keys) - 1]),
        seeds=torch.tensor([7]),
        scaling=1.0,
    )


def in_order(x: Tensor, order: Tensor) -> Tensor:
    """Slots of every row and head in another order."""
    return x.gather(2, order.reshape(*order.shape, *[1] * (x.ndim - 3)).expand_as(x))


def reordered(view: LayerView, order: Tensor) -> LayerView:
    """The same keys in other slots."""
    assert view.attention_received is not None
    return dataclasses.replace(
        view,
        keys=in_order(view.keys, order),
        values=in_order(view.values, order),
        positions=in_order(view.positions, order),
        attention_received=in_order(view.attention_received, order),
    )


def held(view: LayerView, head: int) -> dict[int, int]:
    """Slot of every position that a KV head holds, in order of position."""
    slots = {int(p): n for n, p in enumerate(view.positions[0, head]) if p >= 0}
    return dict(sorted(slots.items()))


def slow_logit(view: LayerView, head: int, row: int, slot: int) -> float:
    """Logit that one query head's window row gives to a slot, capped if the view says so."""
    assert view.window_queries is not None
    key = view.keys[0, head // PER_KV, slot]
    logit = float(view.window_queries[0, head, row] @ key) * view.scaling
    return logit if view.softcap is None else view.softcap * math.tanh(logit / view.softcap)


def sees(view: LayerView, row: int, position: int) -> bool:
    """Whether a row of the window attends to that position."""
    assert view.window_positions is not None
    at = int(view.window_positions[0, row])
    return position <= at and (view.sliding_window is None or position > at - view.sliding_window)


def slow_softmax(logits: dict[int, float]) -> dict[int, float]:
    total = sum(math.exp(x) for x in logits.values())
    return {position: math.exp(x) / total for position, x in logits.items()}


def slow_weights(view: LayerView, head: int, row: int) -> dict[int, float]:
    """Attention of one query head's window row over positions, as a dictionary."""
    slots = held(view, head // PER_KV)
    return slow_softmax(
        {p: slow_logit(view, head, row, slot) for p, slot in slots.items() if sees(view, row, p)}
    )


def heads_of(kv_head: int) -> range:
    """Query heads that share a KV head."""
    return range(kv_head * PER_KV, (kv_head + 1) * PER_KV)


def by_position(scores: Tensor, view: LayerView) -> list[dict[int, float]]:
    return [
        {int(p): float(s) for p, s in zip(view.positions[0, h], scores[0, h], strict=True) if p >= 0}
        for h in range(KV_HEADS)
    ]
