"""From hidden states to log-probabilities, entropy and KL, a tile of logits at a time.

    logp = log softmax(logits / temperature),   H = -sum p logp,   KL = sum q (log q - logp)

``q`` is the teacher (dense track), ``p`` the student (shadow track). The logits of a tile of rows are
made, reduced and dropped; the backward pass makes them again. One student tile serves all three
quantities. Memory is bounded by the tile, whatever the number of tokens.

Gradients with respect to the logits z / temperature:
    d logp_y = onehot(y) - p,    dH = -p (logp + H),    dKL = p - q
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.few_rows import linear_from_weight, pays
from shadowmask.models import OutputHead, wide_dtype

TILE_ELEMENTS = 2**23  # logits that exist at one time per track: 32 MB in float32


class TokenStats(NamedTuple):
    """Per scored token, in nats. ``kl`` and ``teacher_logprobs`` are ``None`` without a teacher."""

    logprobs: Float[Tensor, " targets"]
    entropy: Float[Tensor, " targets"]
    kl: Float[Tensor, " targets"] | None
    teacher_logprobs: Float[Tensor, " targets"] | None


def head_logits(
    hidden: Float[Tensor, "rows hidden"], head: OutputHead, temperature: float
) -> Float[Tensor, "rows vocab"]:
    """Logits of the distribution that is sampled from, in float32 or wider."""
    return _Projection(head.weight, head.bias, head.scale, head.softcap, temperature)(hidden)[0]


def token_stats(
    hidden: Float[Tensor, "targets hidden"],
    targets: Int[Tensor, " targets"],
    head: OutputHead,
    temperature: float = 1.0,
    teacher_hidden: Float[Tensor, "targets hidden"] | None = None,
) -> TokenStats:
    """Log-probability of each target, entropy, and forward KL(teacher || student) if a teacher is given.

    The teacher side gets no gradient: neither its hidden states nor the head as it projects them.
    """
    outputs = _TiledHead.apply(
        hidden,
        head.weight,
        head.bias,
        targets,
        None if teacher_hidden is None else teacher_hidden.detach(),
        head,
        temperature,
    )
    return TokenStats(*outputs)


class _TiledHead(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        teacher_hidden: Tensor | None,
        head: OutputHead,
        temperature: float,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        ctx.set_materialize_grads(False)  # what nobody differentiates costs nothing in the backward pass
        ctx.settings = (head.scale, head.softcap, temperature)
        ctx.save_for_backward(hidden, weight, bias, targets, teacher_hidden)
        wide = wide_dtype(weight.dtype)
        rows = hidden.shape[0]
        logprobs, entropy = (hidden.new_empty(rows, dtype=wide) for _ in range(2))
        kl = teacher_logprobs = None
        if teacher_hidden is not None:
            kl, teacher_logprobs = (hidden.new_empty(rows, dtype=wide) for _ in range(2))
        project = _Projection(weight, bias, head.scale, head.softcap, temperature)
        for tile in _tiles(rows, weight.shape[0]):
            logp = project(hidden[tile])[0].log_softmax(dim=-1)
            column = targets[tile, None]
            logprobs[tile] = logp.gather(-1, column)[:, 0]
            entropy[tile] = -torch.linalg.vecdot(logp.exp(), logp)
            if teacher_hidden is not None and kl is not None and teacher_logprobs is not None:
                teacher = project(teacher_hidden[tile])[0].log_softmax(dim=-1)
                teacher_logprobs[tile] = teacher.gather(-1, column)[:, 0]
                kl[tile] = torch.linalg.vecdot(teacher.exp(), teacher.sub_(logp))
        if teacher_logprobs is not None:
            ctx.mark_non_differentiable(teacher_logprobs)
        return logprobs, entropy, kl, teacher_logprobs

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        grad_kl = grads[2]
        hidden, weight, bias, targets, teacher_hidden = ctx.saved_tensors
        project = _Projection(weight, bias, *ctx.settings)
        wide = wide_dtype(weight.dtype)
        needs_weight, needs_bias = (
            ctx.needs_input_grad[1],
            bias is not None and ctx.needs_input_grad[2],
        )
        grad_hidden = torch.zeros(hidden.shape, dtype=wide, device=hidden.device)
        grad_weight = torch.zeros(weight.shape, dtype=wide, device=weight.device) if needs_weight else None
        grad_bias = torch.zeros(bias.shape, dtype=wide, device=bias.device) if needs_bias else None
        for tile in _tiles(hidden.shape[0], weight.shape[0]):
            logits, derivative = project(hidden[tile])
            logp = logits.log_softmax(dim=-1)
            teacher = None
            if grad_kl is not None and teacher_hidden is not None:
                teacher = project(teacher_hidden[tile])[0]
            upstream = [None if g is None else g[tile, None] for g in grads[:3]]
            grad = _grad_logits(logp, targets[tile], upstream, teacher)
            if isinstance(derivative, Tensor) or derivative != 1:
                grad *= derivative
            grad = grad.to(weight.dtype)
            grad_hidden[tile] = grad @ weight
            if grad_weight is not None:
                _add_product(grad_weight, grad.T, hidden[tile].to(weight.dtype))
            if grad_bias is not None:
                grad_bias += grad.sum(dim=0)
        return (
            grad_hidden.to(hidden.dtype),
            None if grad_weight is None else grad_weight.to(weight.dtype),
            None if grad_bias is None else grad_bias.to(bias.dtype),
            None,
            None,
            None,
            None,
        )


def _grad_logits(
    logp: Float[Tensor, "tile vocab"],
    targets: Int[Tensor, " tile"],
    upstream: Sequence[Float[Tensor, "tile 1"] | None],
    teacher: Float[Tensor, "tile vocab"] | None,
) -> Float[Tensor, "tile vocab"]:
    """``g_logp (1[target] - p) - g_H p (logp + H) + g_KL (p - q)`` with as few passes over it as possible."""
    grad_logprobs, grad_entropy, grad_kl = upstream
    p = logp.exp()
    factor = torch.zeros_like(p[:, :1])  # of p, the same for a whole row
    if grad_logprobs is not None:
        factor = factor - grad_logprobs
    if grad_kl is not None:
        factor = factor + grad_kl
    if grad_entropy is not None:
        entropy = -torch.linalg.vecdot(p, logp)[:, None]
        grad = p.mul_(factor - grad_entropy * (logp + entropy))
    else:
        grad = p.mul_(factor)
    if grad_logprobs is not None:
        grad.scatter_add_(-1, targets[:, None], grad_logprobs)
    if grad_kl is not None and teacher is not None:
        grad.sub_(teacher.softmax(dim=-1).mul_(grad_kl))
    return grad


def _add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    else:
        total += left @ right


class _Projection:
    """Logits of rows, and the derivative of what comes after the matrix product.

    The product runs in the head's own dtype whatever the autocast: rounding logits to bfloat16 would
    be the largest part of the gap between sampler and learner.
    """

    def __init__(
        self,
        weight: Tensor,
        bias: Tensor | None,
        scale: float,
        softcap: float | None,
        temperature: float,
    ) -> None:
        self.weight, self.bias = weight, bias
        self.scale, self.softcap, self.temperature = scale, softcap, temperature

    def __call__(self, hidden: Tensor) -> tuple[Tensor, Tensor | float]:
        hidden = hidden.to(self.weight.dtype)
        with torch.autocast(hidden.device.type, enabled=False):
            if pays(hidden.shape[0], self.weight):
                logits = linear_from_weight(hidden, self.weight, self.bias)
            else:
                logits = F.linear(hidden, self.weight, self.bias)
        logits = logits.to(wide_dtype(logits.dtype))
        if self.scale != 1:  # most heads scale by one: a pass over all logits that nobody needs
            logits = logits * self.scale
        derivative: Tensor | float = self.scale / self.temperature
        if self.softcap is not None:
            capped = torch.tanh(logits / self.softcap)
            derivative = derivative * (1 - capped.square())
            logits = self.softcap * capped
        return (logits if self.temperature == 1 else logits / self.temperature), derivative


def _tiles(rows: int, vocab: int) -> list[slice]:
    height = max(TILE_ELEMENTS // vocab, 1)
    return [slice(start, min(start + height, rows)) for start in range(0, rows, height)]
