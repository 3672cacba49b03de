"""How many rows fit: against counting windows and trying every number of rows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shadowmask.cache import CachePlan, KVCache, OwnedSlotCache, PromptInfo, SharedPromptCache
from shadowmask.eviction import get_evictor
from shadowmask.planning import fit_memory, parse_bytes, plan_cache, prompts_at_once

SIZES = st.lists(st.integers(1, 6), min_size=1, max_size=8)
LAYERS = [40, 24]  # bytes of a token in each layer


@given(SIZES, st.integers(1, 60))
def test_prompts_at_once_counts_the_worst_window(sizes: list[int], rows: int) -> None:
    owners = [n for n, size in enumerate(sizes) for _ in range(size)]
    windows = [set(owners[start : start + rows]) for start in range(len(owners))]
    assert prompts_at_once(sizes, rows) == max(map(len, windows))


def make_plan(sizes: list[int], evict_every: int | None) -> CachePlan:
    prompts = [PromptInfo(10 + 7 * n, 12, 0) for n in range(len(sizes))]
    evictor = get_evictor("recent", budget=12, recent_window=2)
    return plan_cache(evictor, evict_every, prompts, sizes, max_new_tokens=9)


def needed(plan: CachePlan, cache: type[KVCache]) -> int:
    return cache.bytes_needed(plan, LAYERS) + plan.longest_prompt * max(LAYERS)


@given(SIZES, st.integers(1, 20_000), st.booleans())
def test_the_plan_fits_and_one_row_more_would_not(sizes: list[int], limit: int, owned: bool) -> None:
    cache: type[KVCache] = OwnedSlotCache if owned else SharedPromptCache
    whole = make_plan(sizes, 4 if owned else None)
    try:
        fitted = fit_memory(whole, sizes, cache, LAYERS, limit)
    except ValueError as error:
        least = int(str(error).split("one sequence needs ")[1].split()[0])
        assert least > limit
        assert fit_memory(whole, sizes, cache, LAYERS, least).rows in (1, whole.rows)
        return
    assert needed(fitted, cache) <= limit or fitted.rows == 1
    if fitted.rows < whole.rows:
        assert fitted.waiting and needed(whole, cache) > limit
        if fitted.rows + 1 < whole.rows:
            bigger = fit_memory(whole, sizes, cache, LAYERS, limit + needed(whole, cache) // 2)
            assert bigger.rows >= fitted.rows
    else:
        assert fitted == whole


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("8GB", 8 * 10**9),
        ("8 gb", 8 * 10**9),
        ("512MiB", 512 * 2**20),
        ("1.5g", 1_500_000_000),
        ("4096", 4096),
        (4096, 4096),
        ("2e9", 2 * 10**9),
        ("100B", 100),
        ("3Ti", 3 * 2**40),
    ],
)
def test_bytes_as_people_write_them(text: str | int, count: int) -> None:
    assert parse_bytes(text) == count


@pytest.mark.parametrize("text", ["", "GB", "8 parsecs", "-1GB", "0", "1.2.3", "8ib", ".", "8i"])
def test_what_is_no_number_of_bytes(text: str) -> None:
    with pytest.raises(ValueError, match="not a number of bytes"):
        parse_bytes(text)
