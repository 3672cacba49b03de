"""Tiled log-probabilities, entropy and KL against autograd on full logits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shadowmask.head
from shadowmask.head import head_logits, token_stats
from shadowmask.models import OutputHead
from tolerances import FLOAT64, GRADIENT_FLOAT64, relative_gap

ROWS, HIDDEN, VOCAB = 11, 5, 17
HEADS = {
    "plain": {},
    "bias": {"bias": True},
    "scale": {"scale": 0.3},
    "softcap": {"softcap": 1.5},
    "all": {"bias": True, "scale": 2.0, "softcap": 2.5},
}


def make_head(dtype: torch.dtype = torch.float64, bias: bool = False, **rest: float) -> OutputHead:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(VOCAB, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    offset = torch.randn(VOCAB, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    return OutputHead(weight, offset if bias else None, **rest)


def textbook(hidden: Tensor, targets: Tensor, head: OutputHead, temperature: float, teacher: Tensor) -> list:
    def log_distribution(x: Tensor) -> Tensor:
        logits = x @ head.weight.T * 1.0
        if head.bias is not None:
            logits = logits + head.bias
        logits = logits * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        return (logits / temperature).log_softmax(-1)

    logp, logq = log_distribution(hidden), log_distribution(teacher).detach()
    column = targets[:, None]
    return [
        logp.gather(1, column)[:, 0],
        -(logp.exp() * logp).sum(-1),
        (logq.exp() * (logq - logp)).sum(-1),
        logq.gather(1, column)[:, 0],
    ]


@pytest.mark.parametrize("tile", [VOCAB, 4 * VOCAB, 2**23])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", HEADS)
def test_values_and_gradients(
    kind: str, temperature: float, tile: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shadowmask.head, "TILE_ELEMENTS", tile)
    head = make_head(**HEADS[kind])
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    teacher = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(VOCAB, (ROWS,))
    weights = torch.randn(3, ROWS, dtype=torch.float64)
    leaves = [x for x in (hidden, head.weight, head.bias) if x is not None]
    stats = token_stats(hidden, targets, head, temperature, teacher)
    expected = textbook(hidden, targets, head, temperature, teacher)
    for mine, value in zip(stats, expected, strict=True):
        assert float((mine - value).detach().abs().max()) <= FLOAT64
    for use in ((1, 0, 0), (0, 1, 0), (0, 0, 1), (1, 1, 1)):
        coefficients = [u * w for u, w in zip(use, weights, strict=True)]
        gradients = [
            torch.autograd.grad(
                sum((c * x).sum() for c, x in zip(coefficients, source[:3], strict=True)),
                leaves,
                retain_graph=True,
            )
            for source in (stats, expected)
        ]
        for mine, value in zip(*gradients, strict=True):
            assert relative_gap(mine, value) <= GRADIENT_FLOAT64


def test_the_teacher_gets_no_gradient() -> None:
    head = make_head()
    hidden, teacher = (torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True) for _ in range(2))
    stats = token_stats(hidden, torch.zeros(ROWS, dtype=torch.int64), head, 1.0, teacher)
    stats.kl.sum().backward()
    assert teacher.grad is None and hidden.grad is not None
    assert not stats.teacher_logprobs.requires_grad


def test_without_a_teacher_there_is_no_kl() -> None:
    stats = token_stats(torch.randn(2, HIDDEN, dtype=torch.float64), torch.tensor([0, 1]), make_head())
    assert stats.kl is None and stats.teacher_logprobs is None


def test_equal_tracks_have_no_kl_and_no_gradient() -> None:
    hidden = torch.randn(ROWS, HIDDEN, dtype=torch.float64, requires_grad=True)
    stats = token_stats(hidden, torch.zeros(ROWS, dtype=torch.int64), make_head(), 1.0, hidden)
    stats.kl.sum().backward()
    assert float(stats.kl.detach().abs().max()) <= FLOAT64 and float(hidden.grad.abs().max()) <= FLOAT64


def test_bfloat16_heads_give_float32_statistics() -> None:
    head = make_head(torch.bfloat16)
    hidden = torch.randn(3, HIDDEN, dtype=torch.bfloat16)
    assert token_stats(hidden, torch.tensor([0, 1, 2]), head).logprobs.dtype == torch.float32
    assert head_logits(hidden, head, 1.0).dtype == torch.float32


def test_autocast_does_not_narrow_the_head() -> None:
    head = make_head(torch.float32)
    hidden = torch.randn(3, HIDDEN)
    plain = head_logits(hidden, head, 1.0)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(head_logits(hidden, head, 1.0), plain)
        assert not torch.equal((hidden @ head.weight.T).float(), plain), "autocast was not active"


def test_frozen_heads_pass_the_gradient_through() -> None:
    head = make_head()
    head.weight.requires_grad_(False)
    hidden = torch.randn(3, HIDDEN, dtype=torch.float64, requires_grad=True)
    token_stats(hidden, torch.tensor([0, 1, 2]), head).logprobs.sum().backward()
    assert float(hidden.grad.abs().max()) > 0 and head.weight.grad is None
