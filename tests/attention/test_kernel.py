"""Masked attention against loops: grouped heads, softcap, windows, chunks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

import shadowmask.attention.kernel
from shadowmask.attention.kernel import (
    Scoring,
    add_sinks,
    causal_attention,
    chunked_attention,
    masked_attention,
    partial_attention,
    received_attention,
)
from tolerances import FLOAT64, GRADIENT_FLOAT64, WRONG_RECORD, relative_gap

RULES: dict[str, Scoring] = {
    "plain": Scoring(0.3),
    "softcap": Scoring(0.3, softcap=0.8),
    "window": Scoring(0.3, sliding_window=5),
    "both": Scoring(0.3, softcap=0.8, sliding_window=5),
    "sinks": Scoring(0.3, sliding_window=5, sink_logits=torch.linspace(-2, 2, 6).double()),
}


def tensors(queries: int, keys: int, heads: int = 6, kv_heads: int = 2, batch: int = 2) -> list[Tensor]:
    generator = torch.Generator().manual_seed(queries * 100 + keys)
    shapes = [(batch, heads, queries, 4), (batch, kv_heads, keys, 4), (batch, kv_heads, keys, 3)]
    return [torch.randn(s, generator=generator, dtype=torch.float64, requires_grad=True) for s in shapes]


def slow(
    query: Tensor, key: Tensor, value: Tensor, visible: Tensor, scoring: Scoring
) -> tuple[Tensor, Tensor]:
    """Outputs, and weights (batch, heads, query, key), one row at a time."""
    batch, heads, rows, _ = query.shape
    kv_heads = key.shape[1]
    visible = visible.expand(batch, kv_heads, -1, -1)
    outputs, all_weights = [], []
    for b in range(batch):
        for h in range(heads):
            j = h // (heads // kv_heads)
            for i in range(rows):
                logits = key[b, j] @ query[b, h, i] * scoring.scaling
                if scoring.softcap is not None:
                    logits = scoring.softcap * torch.tanh(logits / scoring.softcap)
                chosen = visible[b, j, i].nonzero()[:, 0]
                weights = torch.zeros(len(logits), dtype=logits.dtype)
                exp = logits[chosen].exp()
                sink = 0.0 if scoring.sink_logits is None else scoring.sink_logits[h].exp()
                weights = weights.index_put((chosen,), exp / (exp.sum() + sink))
                outputs.append(weights @ value[b, j])
                all_weights.append(weights)
    out = torch.stack(outputs).reshape(batch, heads, rows, -1)
    return out, torch.stack(all_weights).reshape(batch, heads, rows, -1)


def causal(tokens: int, window: int | None) -> Tensor:
    rows, columns = torch.arange(tokens)[:, None], torch.arange(tokens)
    mask = columns <= rows
    return (mask if window is None else mask & (columns > rows - window))[None, None]


def assert_same(function: Any, reference: Any, inputs: list[Tensor]) -> None:
    """Values and gradients."""
    mine, theirs = function(*inputs), reference(*inputs)
    assert mine.shape == theirs.shape
    assert float((mine - theirs).detach().abs().max()) <= FLOAT64
    weights = torch.randn(mine.shape, dtype=mine.dtype)
    gradients = [torch.autograd.grad((out * weights).sum(), inputs) for out in (mine, theirs)]
    for a, b in zip(*gradients, strict=True):
        assert relative_gap(a, b) <= GRADIENT_FLOAT64


@pytest.mark.parametrize("mask_heads", [1, 2])
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("rules", ["plain", "softcap", "sinks"])
def test_masked_attention(rules: str, kv_heads: int, mask_heads: int) -> None:
    if mask_heads == 2:
        mask_heads = kv_heads
    generator = torch.Generator().manual_seed(1)
    visible = torch.rand(2, mask_heads, 5, 7, generator=generator) < 0.4
    visible[..., 0] = True
    scoring = RULES[rules]
    inputs = tensors(5, 7, kv_heads=kv_heads)
    assert_same(
        lambda q, k, v: masked_attention(q, k, v, visible, scoring),
        lambda q, k, v: slow(q, k, v, visible, scoring)[0],
        inputs,
    )


@pytest.mark.parametrize("rules", ["plain", "softcap"])
def test_no_mask_means_all_keys(rules: str) -> None:
    everything = torch.ones(1, 1, 5, 7, dtype=torch.bool)
    assert_same(
        lambda q, k, v: masked_attention(q, k, v, None, RULES[rules]),
        lambda q, k, v: slow(q, k, v, everything, RULES[rules])[0],
        tensors(5, 7),
    )


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("rules", RULES)
def test_causal_attention(rules: str, chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowmask.attention.kernel, "QUERY_CHUNK", chunk)
    scoring = RULES[rules]
    assert_same(
        lambda q, k, v: causal_attention(q, k, v, scoring),
        lambda q, k, v: slow(q, k, v, causal(11, scoring.sliding_window), scoring)[0],
        tensors(11, 11),
    )


@pytest.mark.parametrize("chunk", [1, 4, 256])
def test_chunked_attention_asks_for_its_rows_only(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shadowmask.attention.kernel, "QUERY_CHUNK", chunk)
    visible = torch.rand(2, 2, 11, 11, generator=torch.Generator().manual_seed(3)) < 0.5
    visible |= torch.eye(11, dtype=torch.bool)
    asked: list[tuple[int, int]] = []

    def rows(start: int, stop: int) -> Tensor:
        asked.append((start, stop))
        return visible[:, :, start:stop]

    inputs = tensors(11, 11)
    out = chunked_attention(*inputs, rows, RULES["plain"])
    expected, _ = slow(*inputs, visible, RULES["plain"])
    assert float((out - expected).detach().abs().max()) <= FLOAT64
    assert [i for start, stop in asked for i in range(start, stop)] == list(range(11))
    assert max(stop - start for start, stop in asked) <= chunk


@pytest.mark.parametrize("chunk", [1, 4, 256])
@pytest.mark.parametrize("rules", RULES)
def test_received_attention_is_the_column_sum(
    rules: str, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadowmask.attention.kernel, "QUERY_CHUNK", chunk)
    scoring = RULES[rules]
    query, key, value = tensors(11, 11)
    _, weights = slow(query, key, value, causal(11, scoring.sliding_window), scoring)
    expected = weights.unflatten(1, (2, 3)).sum(dim=(2, 3))
    received = received_attention(query, key, scoring)
    assert float((received - expected).detach().abs().max()) <= FLOAT64
    if scoring.sink_logits is None:  # every query hands out 1 per query head
        assert float(received.detach().sum()) == pytest.approx(2 * 6 * 11)


def test_sinks_weigh_and_have_no_value() -> None:
    """In a partial attention as in a whole one, and their gradient is that of the softmax."""
    query, key, value = tensors(3, 7)
    rules = RULES["sinks"]
    assert rules.sink_logits is not None
    sinks = rules.sink_logits.clone().requires_grad_(True)
    everything = torch.ones(1, 1, 3, 7, dtype=torch.bool)
    scoring = Scoring(0.3, sink_logits=sinks)
    expected, weights = slow(query, key, value, everything, scoring)
    whole = masked_attention(query, key, value, None, scoring)
    grouped = query.unflatten(1, (2, 3)).transpose(1, 2).flatten(0, 1)  # query heads as a batch axis
    keys, values = (x.repeat_interleave(3, dim=0) for x in (key, value))
    partial = partial_attention(grouped, keys, values, None, Scoring(0.3))
    by_head = sinks.view(2, 3).T.repeat(2, 1)[:, :, None]
    out = add_sinks(partial, by_head)[0].unflatten(0, (2, 3)).transpose(1, 2).flatten(1, 2)
    for found in (whole, out):
        assert float((found - expected).detach().abs().max()) <= FLOAT64
    assert float(weights.detach().sum(-1).max()) < 1
    gradients = [torch.autograd.grad(x.sum(), sinks, retain_graph=True)[0] for x in (whole, expected)]
    assert relative_gap(*gradients) <= GRADIENT_FLOAT64
    without = masked_attention(query, key, value, None, Scoring(0.3))
    assert float((without - expected).detach().abs().max()) > WRONG_RECORD


def test_scoring_by_hand() -> None:
    assert float(Scoring(0.5).logits(torch.tensor(4.0))) == 2.0
    assert float(Scoring(0.5, softcap=2.0).logits(torch.tensor(4.0))) == pytest.approx(2 * math.tanh(1))
