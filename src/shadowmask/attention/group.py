"""A group's completions attend to their common prompt keys without a copy of them per completion.

    attention over [prompt | own] = merge(attention over prompt, attention over own)

The rows of all completions are the rows of one product with the prompt's kept keys; each completion's
rows attend causally to themselves. The two parts are merged by their log-sum-exps. In the backward pass
each part gets the *merged* output and log-sum-exp: its softmax weights are then those of the whole row,
and the gradients of the parts add up to that of attention over the union (as in ring attention,
arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from shadowmask.attention.kernel import (
    FLASH_CPU,
    Scoring,
    attention_dtype,
    has_flash,
    merge_partials,
)

_FLASH_CPU_BACKWARD: Any = getattr(
    torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu_backward", None
)


def can_share(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether this device has a kernel that returns its log-sum-exp and differentiates from one."""
    if scoring.sink_logits is not None:
        return False  # the backward pass below knows no sinks
    return has_flash(query, value, scoring) and _FLASH_CPU_BACKWARD is not None


def group_attention(
    own: tuple[
        Float[Tensor, "heads rows head_dim"],
        Float[Tensor, "kv_heads rows head_dim"],
        Float[Tensor, "kv_heads rows value_dim"],
    ],
    prompt: tuple[Float[Tensor, "kv_heads kept head_dim"], Float[Tensor, "kv_heads kept value_dim"]],
    lengths: Sequence[int],
    scaling: float,
) -> Float[Tensor, "heads rows value_dim"]:
    """Every row sees all given prompt keys and, causally, the rows of its own completion.

    Args:
        own: queries, keys and values of the completions' rows, one completion after another.
        prompt: keys and values.
        lengths: rows of each completion.
    """
    dtype = attention_dtype(own[0])
    query, key, value, prompt_key, prompt_value = (x.to(dtype) for x in (*own, *prompt))
    return _GroupAttention.apply(
        query, prompt_key, prompt_value, key, value, [n for n in lengths if n], scaling
    )


class _GroupAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        prompt_key: Tensor,
        prompt_value: Tensor,
        own_key: Tensor,
        own_value: Tensor,
        lengths: list[int],
        scaling: float,
    ) -> Tensor:
        grouped = query.unflatten(0, (prompt_key.shape[0], -1))  # (kv_heads, per_kv, rows, head_dim)
        prompt = FLASH_CPU(grouped, *_spread(grouped, prompt_key, prompt_value), 0.0, False, scale=scaling)
        pieces = [
            FLASH_CPU(q, *_spread(q, k, v), 0.0, True, scale=scaling)
            for q, k, v in _split(lengths, [grouped], [own_key, own_value])
        ]
        own, lse_own = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        out = merge_partials(prompt, (own, lse_own))
        lse = torch.logaddexp(prompt[1], lse_own)
        ctx.save_for_backward(query, prompt_key, prompt_value, own_key, own_value, out, lse)
        ctx.settings = lengths, scaling
        return out.flatten(0, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        query, prompt_key, prompt_value, own_key, own_value, out, lse = ctx.saved_tensors
        lengths, scaling = ctx.settings
        grouped = query.unflatten(0, (prompt_key.shape[0], -1))
        grad = grads[0].unflatten(0, (prompt_key.shape[0], -1)).contiguous()
        keys = _spread(grouped, prompt_key, prompt_value)
        grad_query, *grad_prompt = _FLASH_CPU_BACKWARD(
            grad, grouped, *keys, out, lse, 0.0, False, scale=scaling
        )
        pieces = [
            _FLASH_CPU_BACKWARD(g, q, *_spread(q, k, v), o, e, 0.0, True, scale=scaling)
            for q, g, o, e, k, v in _split(lengths, [grouped, grad, out, lse], [own_key, own_value])
        ]
        own_query, *grad_own = (torch.cat(parts, dim=2) for parts in zip(*pieces, strict=True))
        # keys are common to the query heads of a KV head
        grad_keys = (x.sum(dim=1) for x in (*grad_prompt, *grad_own))
        return ((grad_query + own_query).flatten(0, 1), *grad_keys, None, None)


def _spread(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Views of keys and values, once for each query head of their KV head."""
    per_kv = query.shape[1]
    return key[:, None].expand(-1, per_kv, -1, -1), value[:, None].expand(-1, per_kv, -1, -1)


def _split(lengths: list[int], per_query_head: list[Tensor], per_kv_head: list[Tensor]) -> Any:
    """One completion's part of each tensor after another; their rows are axis 2 and axis 1."""
    parts = [x.split(lengths, dim=2) for x in per_query_head]
    parts += [x.split(lengths, dim=1) for x in per_kv_head]
    return zip(*parts, strict=True)
