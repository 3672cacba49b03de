"""Masked attention with grouped KV heads: the one place where scores become outputs.

Layouts follow Hugging Face: query ``(batch, heads, query, head_dim)``, key and value
``(batch, kv_heads, key, head_dim)``; query head ``h`` uses KV head ``h // queries_per_kv``. Masks are
per KV head, ``(batch, kv_heads or 1, query, key)``, True = attended.

No row of a mask may be empty. By construction none is: a query always sees its own key, because
``evicted_at[k] > k`` (validated by ``ShadowMask``) and a sliding window is at least 1 wide.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

QUERY_CHUNK = 256  # rows of a mask that exist at one time


@dataclass(frozen=True)
class Scoring:
    """How a layer turns a query-key product into a logit; the same in sampler and learner."""

    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    # a learned logit per query head that takes part in the softmax and has no value (gpt-oss): [heads],
    # or [heads, query] where query heads were folded into the query axis
    sink_logits: Float[Tensor, ...] | None = field(default=None, compare=False)

    @property
    def plain(self) -> bool:
        """Whether SDPA can express it."""
        return self.softcap is None and self.sink_logits is None

    def sink_logits_by_kv_head(self, kv_heads: int) -> Float[Tensor, "kv_heads per_kv"] | None:
        return None if self.sink_logits is None else self.sink_logits.view(kv_heads, -1)

    def logits(self, products: Float[Tensor, ...]) -> Float[Tensor, ...]:
        logits = products * self.scaling
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def masked_attention(
    query: Float[Tensor, "batch heads query head_dim"],
    key: Float[Tensor, "batch kv_heads key head_dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    visible: Bool[Tensor, "#batch #kv_heads query key"] | None,
    scoring: Scoring,
) -> Float[Tensor, "batch heads query value_dim"]:
    """Attention of each query over its visible keys. ``visible=None`` means all keys.

    Keys and values are never repeated per query head: the heads of one KV head become SDPA's head
    axis over keys expanded with stride 0.
    """
    batch, heads, rows, _ = query.shape
    kv_heads = key.shape[1]
    if not scoring.plain:
        return _explicit_attention(query, key, value, visible, scoring)
    grouped = query.reshape(batch * kv_heads, heads // kv_heads, rows, -1)
    keys, values = (
        x.reshape(batch * kv_heads, 1, x.shape[2], x.shape[3]).expand(-1, heads // kv_heads, -1, -1)
        for x in (key, value)
    )
    mask = None
    if visible is not None:
        mask = visible.expand(batch, kv_heads, -1, -1).reshape(batch * kv_heads, 1, rows, -1)
    out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scoring.scaling)
    return out.reshape(batch, heads, rows, -1)


def _explicit_attention(
    query: Float[Tensor, "batch heads query head_dim"],
    key: Float[Tensor, "batch kv_heads key head_dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    visible: Bool[Tensor, "#batch #kv_heads query key"] | None,
    scoring: Scoring,
) -> Float[Tensor, "batch heads query value_dim"]:
    """Same with a tanh before the softmax (Gemma2) or sinks in it (gpt-oss), which SDPA cannot express."""
    grouped = query.unflatten(1, (key.shape[1], -1))
    logits = scoring.logits(grouped @ key.transpose(-1, -2)[:, :, None])
    if visible is not None:
        logits = logits.masked_fill(~visible[:, :, None], torch.finfo(logits.dtype).min)
    wide = torch.promote_types(logits.dtype, torch.float32)
    sinks = scoring.sink_logits
    if sinks is not None:
        sinks = sinks.reshape(*grouped.shape[1:3], -1)
    weights = sink_softmax(logits, sinks, wide).to(value.dtype)
    return (weights @ value[:, :, None]).flatten(1, 2)


def chunked_attention(
    query: Float[Tensor, "batch heads query head_dim"],
    key: Float[Tensor, "batch kv_heads key head_dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    visible: Callable[[int, int], Bool[Tensor, "#batch #kv_heads rows key"]],
    scoring: Scoring,
) -> Float[Tensor, "batch heads query value_dim"]:
    """``masked_attention`` with the mask made for ``QUERY_CHUNK`` queries at a time.

    Args:
        visible: called with a range of query rows, returns their mask.
    """
    rows = query.shape[2]
    chunks = [
        masked_attention(
            query[:, :, start : min(start + QUERY_CHUNK, rows)],
            key,
            value,
            visible(start, min(start + QUERY_CHUNK, rows)),
            scoring,
        )
        for start in range(0, rows, QUERY_CHUNK)
    ]
    return chunks[0] if len(chunks) == 1 else torch.cat(chunks, dim=2)


def causal_attention(
    query: Float[Tensor, "batch heads tokens head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    value: Float[Tensor, "batch kv_heads tokens value_dim"],
    scoring: Scoring,
) -> Float[Tensor, "batch heads tokens value_dim"]:
    """Dense causal attention of a prompt over itself, inside the layer's own sliding window."""
    tokens = query.shape[2]
    window = scoring.sliding_window
    if scoring.plain and (window is None or window >= tokens):
        return F.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=scoring.scaling, enable_gqa=True
        )
    chunks = []
    for start in range(0, tokens, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, tokens)
        first = 0 if window is None else max(start - window + 1, 0)
        rows = torch.arange(start, stop, device=query.device)[:, None]
        columns = torch.arange(first, stop, device=query.device)
        visible = columns <= rows
        if window is not None:
            visible = visible & (columns > rows - window)
        chunks.append(
            masked_attention(
                query[:, :, start:stop],
                key[:, :, first:stop],
                value[:, :, first:stop],
                visible[None, None],
                scoring,
            )
        )
    return torch.cat(chunks, dim=2)


def received_attention(
    query: Float[Tensor, "batch heads tokens head_dim"],
    key: Float[Tensor, "batch kv_heads tokens head_dim"],
    scoring: Scoring,
) -> Float[Tensor, "batch kv_heads tokens"]:
    """Attention each key receives from all queries of a causal prompt, summed over queries and heads.

    Column sums of the softmax, taken over blocks of queries so that no tokens x tokens tensor exists.
    """
    batch, kv_heads, tokens, _ = key.shape
    wide = torch.promote_types(key.dtype, torch.float32)
    total = torch.zeros(batch, kv_heads, tokens, dtype=wide, device=key.device)
    for start in range(0, tokens, QUERY_CHUNK):
        stop = min(start + QUERY_CHUNK, tokens)
        grouped = query[:, :, start:stop].unflatten(1, (kv_heads, -1))
        logits = scoring.logits(grouped @ key[:, :, None, :stop].transpose(-1, -2)).to(wide)
        rows = torch.arange(start, stop, device=key.device)[:, None]
        columns = torch.arange(stop, device=key.device)
        visible = columns <= rows
        if scoring.sliding_window is not None:
            visible = visible & (columns > rows - scoring.sliding_window)
        sinks = scoring.sink_logits_by_kv_head(kv_heads)
        weights = sink_softmax(
            logits.masked_fill(~visible, -torch.inf), None if sinks is None else sinks[..., None]
        )
        total[..., :stop] += weights.sum(dim=(2, 3))
    return total


def sink_softmax(
    logits: Float[Tensor, "*rows key"],
    sinks: Float[Tensor, "*#rows"] | None,
    dtype: torch.dtype | None = None,
) -> Float[Tensor, "*rows key"]:
    """Softmax over keys and one sink per row, whose own share is left out: rows then sum to less than 1."""
    if sinks is None:
        return logits.softmax(dim=-1, dtype=dtype)
    column = sinks.to(logits.dtype).expand(logits.shape[:-1])[..., None]
    return torch.cat([logits, column], dim=-1).softmax(dim=-1, dtype=dtype)[..., :-1]


def additive_mask(visible: Bool[Tensor, ...], query: Float[Tensor, "... head_dim"]) -> Float[Tensor, ...]:
    """0 where attended, the lowest finite number elsewhere, in the dtype that this query attends in."""
    dtype = attention_dtype(query)
    return torch.zeros(visible.shape, dtype=dtype, device=query.device).masked_fill_(
        ~visible, torch.finfo(dtype).min
    )


def attention_dtype(query: Tensor) -> torch.dtype:
    # as autocast does for the learner's SDPA; rotary embeddings leave queries and keys wider
    device = query.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else query.dtype


def has_flash(query: Tensor, value: Tensor, scoring: Scoring) -> bool:
    """Whether torch's CPU kernel takes these tensors: no softcap, keys and values of one size."""
    plain = scoring.softcap is None and query.shape[-1] == value.shape[-1]
    return plain and query.device.type == "cpu" and FLASH_CPU is not None


def partial_attention(
    query: Float[Tensor, "batch kv_heads query head_dim"],
    key: Float[Tensor, "batch kv_heads key head_dim"],
    value: Float[Tensor, "batch kv_heads key value_dim"],
    mask: Float[Tensor, "#batch #kv_heads #query key"] | None,
    scoring: Scoring,
) -> tuple[Float[Tensor, "batch kv_heads query value_dim"], Float[Tensor, "batch kv_heads query"]]:
    """Attention over some of the keys, with the log-sum-exp that ``merge_partials`` weighs it by.

    For sampling only: no gradient. A row may see no key at all: its log-sum-exp is then so low that
    whatever it returns weighs nothing.

    Args:
        mask: from ``additive_mask``.
    """
    dtype = attention_dtype(query)
    query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
    if has_flash(query, value, scoring):
        # the kernel behind SDPA on CPU, which computes the log-sum-exp and keeps it to itself
        if mask is not None:
            mask = mask.expand(query.shape[0], query.shape[1], query.shape[2], -1)
        return FLASH_CPU(query, key, value, 0.0, False, attn_mask=mask, scale=scoring.scaling)
    logits = scoring.logits(query @ key.transpose(-1, -2))
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if mask is not None:
        logits = logits + mask
    lse = logits.logsumexp(dim=-1)
    weights = (logits - lse[..., None]).exp()
    return (weights @ value.to(weights.dtype)).to(value.dtype), lse


def merge_partials(
    first: tuple[Float[Tensor, "*rows value_dim"], Float[Tensor, "*rows"]],
    second: tuple[Float[Tensor, "*rows value_dim"], Float[Tensor, "*rows"]],
) -> Float[Tensor, "*rows value_dim"]:
    """Attention over the union of two disjoint key sets, from the attention over each."""
    (a, lse_a), (b, lse_b) = first, second
    weight = torch.sigmoid(lse_b - lse_a)[..., None]
    return torch.lerp(a.to(weight.dtype), b.to(weight.dtype), weight).to(a.dtype)


def add_sinks(
    partial: tuple[Float[Tensor, "*rows value_dim"], Float[Tensor, "*rows"]], sinks: Float[Tensor, "*#rows"]
) -> tuple[Float[Tensor, "*rows value_dim"], Float[Tensor, "*rows"]]:
    """A partial attention with sinks among its keys: they have weight and no value."""
    out, lse = partial
    sinks = sinks.to(lse.dtype)
    share = torch.sigmoid(lse - sinks)[..., None]
    return (out.to(share.dtype) * share).to(out.dtype), torch.logaddexp(lse, sinks.expand(lse.shape))


FLASH_CPU: Any = getattr(torch.ops.aten, "_scaled_dot_product_flash_attention_for_cpu", None)
