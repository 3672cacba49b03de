"""One product with the prompt's keys, gradients from merged log-sum-exps: against row-by-row attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowmask.attention import kernel
from shadowmask.attention.group import can_share, group_attention
from shadowmask.attention.kernel import Scoring
from tolerances import FLOAT32, FLOAT64, GRADIENT_DIFFERS, relative_gap

SCALING = 0.3
Inputs = dict[str, Tensor]


def inputs(heads: int, kv_heads: int, kept: int, rows: int, dtype: torch.dtype = torch.float64) -> Inputs:
    generator = torch.Generator().manual_seed(heads + 7 * rows + kept)
    shapes = {
        "query": (heads, rows, 8),
        "key": (kv_heads, rows, 8),
        "value": (kv_heads, rows, 8),
        "prompt_key": (kv_heads, kept, 8),
        "prompt_value": (kv_heads, kept, 8),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=dtype).requires_grad_()
        for name, shape in shapes.items()
    }


def fast(x: Inputs, lengths: list[int]) -> Tensor:
    own = x["query"], x["key"], x["value"]
    return group_attention(own, (x["prompt_key"], x["prompt_value"]), lengths, SCALING)


def slow(x: Inputs, lengths: list[int], causal: bool = True) -> Tensor:
    """Row by row, head by head, over the keys of the prompt and of the row's own completion."""
    heads, kv_heads = x["query"].shape[0], x["key"].shape[0]
    outputs = []
    for head in range(heads):
        kv = head // (heads // kv_heads)
        start = 0
        for length in lengths:
            for row in range(start, start + length):
                stop = row + 1 if causal else start + length
                keys = torch.cat([x["prompt_key"][kv], x["key"][kv, start:stop]])
                values = torch.cat([x["prompt_value"][kv], x["value"][kv, start:stop]])
                weights = (keys @ x["query"][head, row] * SCALING).softmax(0)
                outputs.append(weights @ values)
            start += length
    return torch.stack(outputs).unflatten(0, (heads, -1))


def gradients(out: Tensor, x: Inputs) -> Tensor:
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
    grads = torch.autograd.grad((out * weights).sum(), list(x.values()), retain_graph=True)
    return torch.cat([g.flatten() for g in grads])


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from([(1, 1), (4, 2), (3, 3), (6, 2)]),
    st.integers(1, 70),
    st.lists(st.integers(0, 40), min_size=1, max_size=4).filter(sum),
)
def test_values_and_gradients(heads: tuple[int, int], kept: int, lengths: list[int]) -> None:
    x = inputs(*heads, kept, sum(lengths))
    mine, reference = fast(x, lengths), slow(x, lengths)
    assert float((mine - reference).detach().abs().max()) <= FLOAT64
    assert float((gradients(mine, x) - gradients(reference, x)).abs().max()) <= 10 * FLOAT64


def test_float32() -> None:
    x = inputs(4, 2, 33, 20, torch.float32)
    mine, reference = fast(x, [9, 11]), slow(x, [9, 11])
    assert float((mine - reference).detach().abs().max()) <= FLOAT32
    assert relative_gap(gradients(mine, x), gradients(reference, x)) <= FLOAT32


def test_other_lengths_and_other_visibility_differ() -> None:
    """The controls: who belongs to which completion matters, and so does the order in it."""
    x = inputs(4, 2, 33, 20)
    mine = fast(x, [9, 11])
    for other in (slow(x, [11, 9]), slow(x, [9, 11], causal=False)):
        assert float((mine - other).detach().abs().max()) > GRADIENT_DIFFERS
        assert relative_gap(gradients(mine, x), gradients(other, x)) > GRADIENT_DIFFERS


def test_gradients_of_the_parts_alone_would_be_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """The backward pass needs the merged log-sum-exp, not that of a part."""
    x = inputs(4, 2, 33, 20)
    mine = fast(x, [9, 11])
    monkeypatch.setattr(torch, "logaddexp", lambda prompt, own: prompt)
    assert relative_gap(gradients(fast(x, [9, 11]), x), gradients(mine, x)) > GRADIENT_DIFFERS


def test_where_the_kernel_is_missing_it_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    query = torch.zeros(2, 3, 4)
    assert can_share(query, query, Scoring(1.0))
    assert not can_share(query, query, Scoring(1.0, softcap=5.0))
    assert not can_share(query, torch.zeros(2, 3, 6), Scoring(1.0))
    assert not can_share(query.to("meta"), query, Scoring(1.0))
    monkeypatch.setattr(kernel, "FLASH_CPU", None)
    assert not can_share(query, query, Scoring(1.0))
