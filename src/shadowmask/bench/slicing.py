"""Eviction and learner as they are usually written first: the keys that stay are gathered into new tensors.

What the paper's claim of "no allocation spike" is measured against (arXiv:2605.06850; `docs/evidence.md`).
Correct, which a test holds against the replay, and deliberately plain: no sharing within a group, full
vocabulary, one completion at a time.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

KV = list[tuple[Tensor, Tensor]]
"""Keys and values of each layer, ``[kv_heads, tokens, head_dim]``."""


def make_cache(model: nn.Module, tokens: int, sequences: int) -> KV:
    """A dense cache of random keys and values, as a prefill of so many tokens leaves it."""
    config: Any = model.config
    heads = config.num_key_value_heads
    dim = config.hidden_size // config.num_attention_heads
    shape = (sequences, heads, tokens, dim)
    return [(torch.randn(shape), torch.randn(shape)) for _ in range(config.num_hidden_layers)]


def evict_copy(cache: KV, keep: list[Int[Tensor, "1 heads kept"]]) -> KV:
    """Build the whole smaller cache, then let the old one go: both exist at the end."""
    smaller = [(_gather(k, kept), _gather(v, kept)) for (k, v), kept in zip(cache, keep, strict=True)]
    cache.clear()
    return smaller


def evict_by_layer(cache: KV, keep: list[Int[Tensor, "1 heads kept"]]) -> KV:
    """Replace layer by layer: one layer exists twice."""
    for layer, kept in enumerate(keep):
        key, value = cache[layer]
        cache[layer] = (_gather(key, kept), _gather(value, kept))
        del key, value
    return cache


def kept_keys(
    evicted_at: Int[Tensor, "layers heads tokens"], prompt: int
) -> list[Int[Tensor, "1 heads kept"]]:
    """Positions of the prompt's keys that the completion saw; every head of a layer keeps the same number."""
    kept = []
    for layer in evicted_at[:, :, :prompt]:
        kept.append(torch.stack([(head > prompt).nonzero().flatten() for head in layer])[None])
    return kept


def sliced_logprobs(
    model: nn.Module,
    prompt: Int[Tensor, " prompt"],
    completion: Int[Tensor, " completion"],
    keep: list[Int[Tensor, "1 heads kept"]],
    temperature: float = 1.0,
) -> tuple[Float[Tensor, " completion"], Float[Tensor, "completion vocab"]]:
    """Log-probabilities of a completion after an eviction at the end of the prompt, with gradient.

    The prompt is run with a cache that is part of the graph, the kept keys are gathered from it, the
    completion attends to those.

    Returns:
        Log-probability of each token; the whole distribution, as logarithms.
    """
    from transformers import DynamicCache

    first = model(prompt[None], use_cache=True, logits_to_keep=1)
    cache = DynamicCache()
    for index, (layer, kept) in enumerate(zip(first.past_key_values.layers, keep, strict=True)):
        cache.update(_gather(layer.keys, kept), _gather(layer.values, kept), index)
    logits = first.logits
    if len(completion) > 1:
        positions = torch.arange(len(prompt), len(prompt) + len(completion) - 1)
        rest = model(completion[None, :-1], cache=cache, position_ids=positions[None])
        logits = torch.cat([logits, rest.logits], dim=1)
    every = F.log_softmax(logits[0] / temperature, dim=-1)
    return every.gather(1, completion[:, None])[:, 0], every


@torch.no_grad()
def dense_distribution(
    model: nn.Module, prompt: Int[Tensor, " prompt"], completion: Int[Tensor, " completion"]
) -> Float[Tensor, "completion vocab"]:
    """What the same weights say with the full context: a second forward, full vocabulary."""
    logits = model(torch.cat([prompt, completion[:-1]])[None], logits_to_keep=len(completion)).logits[0]
    return F.log_softmax(logits, dim=-1)


def _gather(tensor: Float[Tensor, "batch heads tokens dim"], kept: Int[Tensor, "1 heads kept"]) -> Tensor:
    index = kept[..., None].expand(tensor.shape[0], -1, -1, tensor.shape[3])
    return tensor.gather(2, index)
