"""Samples made by hand: eviction at known moments, text that tries to break pages and columns."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from shadowmask.record import NEVER
from shadowmask.report.sample import Restored, Sample

NASTY = [
    "</script><img src=x onerror=alert(1)>",
    "<b>&amp;",
    "{{data}}",
    "\n",
    "",
    "🙂",
    "日本語",
    '"\\',
    " the",
    "\u2028",
]


def make_record(layers: int, heads: int, prompt: int, completion: int, every: int | None = None) -> Tensor:
    """Half of the prompt's keys lost after prefill, others in every head; some more while decoding."""
    tokens = prompt + completion
    generator = torch.Generator().manual_seed(layers * heads)
    record = torch.full((layers, heads, tokens), NEVER, dtype=torch.int32)
    lost = torch.rand(layers, heads, prompt, generator=generator) < 0.5
    lost[..., 0] = False
    lost[..., 2] = True  # a token that no head keeps
    record[..., :prompt][lost] = prompt
    for moment in range(prompt + every, tokens, every) if every else ():
        more = (torch.rand(layers, heads, tokens, generator=generator) < 0.2) & (record == NEVER)
        more[..., 0] = more[..., moment - 1 :] = False
        record[more] = moment
    return record


def make_sample(
    prompt: int = 20,
    completion: int = 6,
    layers: int = 3,
    heads: int = 2,
    every: int | None = 2,
    **changes: Any,
) -> Sample:
    tokens = prompt + completion
    generator = torch.Generator().manual_seed(tokens)
    shadow = -torch.rand(completion, generator=generator)
    kl = torch.linspace(0.1, 1, completion).roll(2)
    spans = [(0, prompt // 2), (prompt // 2, prompt)]
    removed = torch.stack([kl * 0.5, kl * 0])
    settings: dict[str, Any] = {
        "title": "a <sample>",
        "token_ids": list(range(tokens)),
        "pieces": [NASTY[k % len(NASTY)] for k in range(tokens)],
        "prompt_length": prompt,
        "evicted_at": make_record(layers, heads, prompt, completion, every),
        "sparse_logprobs": shadow + 1e-7,
        "shadow_logprobs": shadow,
        "dense_logprobs": shadow / 2,
        "kl": kl,
        "reward": 0.5,
        "facts": {"model": "tiny </script>", "evictor": "SnapKV(budget=4)"},
        "restored": Restored(spans, removed),
    }
    return Sample(**settings | changes)
