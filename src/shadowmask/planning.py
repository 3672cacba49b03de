"""How many sequences decode at one time: as many as the memory that the user allows for keys and values."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

from shadowmask.cache import CachePlan, KVCache, PromptInfo
from shadowmask.eviction.base import Evictor

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {f"{unit}i": 1024**n for n, unit in enumerate("kmgt", start=1)}


def parse_bytes(text: str | int) -> int:
    """Read a number of bytes as people write it: ``"8GB"``, ``"512 MiB"``, ``"1.5e9"``, 4096.

    Raises:
        ValueError: not a positive number of bytes.
    """
    found = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)\s*([kmgt]?i?)b?", str(text).strip().lower())
    if found and found[1].count(".") < 2 and found[1] != "." and found[2] != "i":
        count = int(float(found[1]) * _UNITS[found[2]])
        if count > 0:
            return count
    raise ValueError(f"{text!r} is not a number of bytes: write it like 8GB, 512MiB or 4000000000")


def plan_cache(
    evictor: Evictor,
    evict_every: int | None,
    prompts: Sequence[PromptInfo],
    sizes: Sequence[int],
    max_new_tokens: int,
) -> CachePlan:
    """A cache in which all sequences decode together.

    Args:
        sizes: completions of each prompt.
    """
    kept = [prompt.kept for prompt in prompts]  # by layer, or one number for all
    longest = max(prompt.length for prompt in prompts)
    grown = [[n + max_new_tokens for n in by_layer] for by_layer in kept]
    if evict_every is not None:
        grown = [
            [min(n, budget + evict_every) for n, budget in zip(by_layer, prompt.budgets, strict=True)]
            for by_layer, prompt in zip(grown, prompts, strict=True)
        ]
    return CachePlan(
        rows=sum(sizes),
        prompts=len(prompts),
        group=max(sizes),
        kept=tuple(map(max, *kept)) if len(kept) > 1 else kept[0],
        new_tokens=max(max_new_tokens - 1, 1),  # the last token of a completion is never fed
        slots=tuple(map(max, *grown)) if len(grown) > 1 else tuple(grown[0]),
        tokens=longest + max_new_tokens,
        longest_prompt=longest,
        ragged_prompts=len(set(kept)) > 1,
        ragged_heads=evictor.ragged_heads,
        waiting=False,
        observation_window=evictor.observation_window,
        accumulates_attention=evictor.accumulates_attention,
    )


def fit_memory(
    plan: CachePlan,
    sizes: Sequence[int],
    cache: type[KVCache],
    bytes_of_layer: Sequence[int],
    kv_memory_limit: int,
) -> CachePlan:
    """Take rows away until keys and values stay within the limit, one layer's full prompt included.

    Args:
        bytes_of_layer: keys and values of one token in each layer.
        kv_memory_limit: bytes.

    Raises:
        ValueError: not even one sequence fits; says how many bytes it needs.
    """

    def candidate(rows: int) -> CachePlan:
        waiting = rows < plan.rows
        # one prompt more than fit the rows, so that stragglers of an old one do not hold up the next
        held = min(prompts_at_once(sizes, rows) + waiting, len(sizes))
        return replace(plan, rows=rows, prompts=held, group=min(plan.group, rows), waiting=waiting)

    def needed(candidate: CachePlan) -> int:
        return cache.bytes_needed(candidate, bytes_of_layer) + candidate.longest_prompt * max(bytes_of_layer)

    def fits(rows: int) -> bool:
        return needed(candidate(rows)) <= kv_memory_limit

    if fits(plan.rows):
        return plan
    if plan.rows == 1 or not fits(1):
        # a few short sequences side by side can need less than one with room to follow up
        least = min(needed(plan), needed(candidate(1)))
        raise ValueError(
            f"kv_memory_limit={kv_memory_limit} bytes is too small: one sequence needs "
            f"{least} bytes (prompts of up to {plan.longest_prompt} tokens). Raise the limit, "
            "evict more, or shorten prompts or completions"
        )
    # with fewer rows than sequences a larger cache always needs more
    return candidate(bisect_left(range(1, plan.rows), True, key=lambda rows: not fits(rows)))


def prompts_at_once(sizes: Sequence[int], rows: int) -> int:
    """Most prompts that ``rows`` sequences in a row can belong to, prompts having ``sizes`` sequences."""
    ends = list(accumulate(sizes))
    # the worst window begins with the last sequence of a prompt
    return max(bisect_left(ends, min(end - 1 + rows, ends[-1])) - n + 1 for n, end in enumerate(ends))
