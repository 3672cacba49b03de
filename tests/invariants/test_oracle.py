"""Brute force against the record: python sets, one query at a time."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shadowmask import NEVER, ShadowMask
from shadowmask.eviction import EVICTORS, LayerView, list_evictors
from shadowmask.sampler import sequence_seeds
from tiny_models import (
    GROUP,
    NUM_SINKS,
    RECENT_WINDOW,
    SEED,
    layer_budgets,
    make_evictor,
    make_prompts,
    rollout,
    shared_model,
    shared_rollout,
)
from tolerances import HAND_COMPUTED

EVICTING = [name for name in list_evictors() if name != "dense"]

# -- sets against evicted_at ----------------------------------------------------------------------


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, list[dict[int, set[int]]]]:
    """Prompt length, total length, and per head what is dropped after each query."""
    total = draw(st.integers(2, 14))
    prompt = draw(st.integers(1, total))
    heads = []
    for _ in range(draw(st.integers(1, 3))):
        moments = draw(st.lists(st.integers(0, total - 1), max_size=4, unique=True))
        drops = {i: set(draw(st.lists(st.integers(0, i), max_size=6))) for i in sorted(moments)}
        heads.append(drops)
    return prompt, total, heads


def simulate(total: int, drops: dict[int, set[int]]) -> list[set[int]]:
    """What every query sees, by carrying the cache along as a set."""
    cache: set[int] = set()
    seen = []
    for i in range(total):
        cache.add(i)
        seen.append(set(cache))
        cache -= drops.get(i, set())
    return seen


def record_of(total: int, drops: dict[int, set[int]]) -> Tensor:
    """``evicted_at`` by its definition: evicting after query i writes i + 1, once."""
    evicted_at = [NEVER] * total
    for i in sorted(drops):
        for key in drops[i]:
            evicted_at[key] = min(evicted_at[key], i + 1)
    return torch.tensor(evicted_at, dtype=torch.int32)


def make_record(prompt: int, total: int, heads: list[dict[int, set[int]]]) -> ShadowMask:
    entry = torch.stack([record_of(total, drops) for drops in heads])[None]
    return ShadowMask.from_entries([entry], [list(range(prompt))], [list(range(total - prompt))])


@given(histories())
def test_visible_is_what_the_sets_hold(history: tuple[int, int, list[dict[int, set[int]]]]) -> None:
    prompt, total, heads = history
    visible = make_record(prompt, total, heads).visible()
    assert visible.shape == (1, len(heads), total, total)
    for head, drops in enumerate(heads):
        for i, seen in enumerate(simulate(total, drops)):
            assert set(visible[0, head, i].nonzero()[:, 0].tolist()) == seen


@given(histories())
def test_mask_algebra(history: tuple[int, int, list[dict[int, set[int]]]]) -> None:
    prompt, total, heads = history
    record = make_record(prompt, total, heads)
    visible = record.visible()[0]
    causal = torch.ones(total, total, dtype=torch.bool).tril()
    assert not bool((visible & ~causal).any()), "a query looks into the future"
    assert bool(visible.diagonal(dim1=1, dim2=2).all()), "a query does not see itself"
    for key in range(total):  # once gone, never back
        column = visible[:, key:, key].int()
        assert bool((column.diff(dim=1) <= 0).all())
    some = torch.tensor([total - 1, 0])
    assert torch.equal(record.visible(some)[0], visible[:, some])


@given(histories())
def test_retained_fraction_is_the_share_of_causal_pairs(
    history: tuple[int, int, list[dict[int, set[int]]]],
) -> None:
    prompt, total, heads = history
    record = make_record(prompt, total, heads)
    seen = available = 0
    for drops in heads:
        for i, cache in enumerate(simulate(total, drops)):
            if prompt <= i < total - 1:  # queries that predict a completion token after the first
                seen += len(cache)
                available += i + 1
    expected = seen / available if available else 1.0
    assert record.retained_fraction() == pytest.approx(expected, abs=HAND_COMPUTED)


@given(histories())
def test_starts_after_prefill_means_dense_prompt_rows(
    history: tuple[int, int, list[dict[int, set[int]]]],
) -> None:
    prompt, total, heads = history
    record = make_record(prompt, total, heads)
    rows = record.visible()[0][:, :prompt, :prompt]
    dense = torch.ones(prompt, prompt, dtype=torch.bool).tril()
    assert record.starts_after_prefill() == bool((rows == dense).all())


def assert_equal_records(a: ShadowMask, b: ShadowMask) -> None:
    assert torch.equal(a.evicted_at, b.evicted_at)
    assert (a.lengths, a.prompt_lengths, a.token_hashes) == (b.lengths, b.prompt_lengths, b.token_hashes)


@settings(deadline=None)
@given(st.lists(histories(), min_size=1, max_size=4), st.data())
def test_cat_slice_save_and_load_round_trip(
    many: list[tuple[int, int, list[dict[int, set[int]]]]], data: st.DataObject
) -> None:
    heads = len(many[0][2])
    singles = [make_record(p, t, (h * heads)[:heads]) for p, t, h in many]
    whole = ShadowMask.cat(singles)
    assert len(whole) == len(singles)
    for single, again in zip(singles, whole, strict=True):
        assert_equal_records(single, again)
    order = data.draw(st.permutations(range(len(singles))))
    picked = whole[order]
    for n, source in enumerate(order):
        assert_equal_records(picked[n], singles[source])
    cut = data.draw(st.integers(0, len(singles)))
    assert_equal_records(ShadowMask.cat([whole[:cut], whole[cut:]]), whole)
    assert_equal_records(whole[-1], singles[-1])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "record.safetensors"
        picked.save(path)
        assert_equal_records(ShadowMask.load(path), picked)
        assert [p.name for p in Path(folder).iterdir()] == [path.name]


# -- the real cache against sets ------------------------------------------------------------------


def spying(name: str, log: list[tuple[int, list[int], Tensor, Tensor]]) -> Any:
    """An evictor of that name that notes (layer, seeds, query positions, kept positions) of evictions."""
    base = EVICTORS[name]

    class Spy(base):  # type: ignore[misc, valid-type]
        def score(self, view: LayerView) -> Tensor:
            self.layer, self.sequences = view.layer, view.seeds.tolist()
            return super().score(view)

        def select(self, scores: Tensor, positions: Tensor, queries: Tensor, *limits: Tensor) -> Tensor:
            keep = super().select(scores, positions, queries, *limits)
            kept = torch.where(keep, positions, -1)
            log.append((self.layer, self.sequences, queries.clone(), kept.clone()))
            return keep

    spy = make_evictor(name)
    spy.__class__ = Spy
    return spy


@pytest.mark.parametrize("evict_every", [None, 1, 5])
@pytest.mark.parametrize("evictor", EVICTING)
def test_the_record_is_what_the_cache_held(evictor: str, evict_every: int | None) -> None:
    log: list[tuple[int, list[int], Tensor, Tensor]] = []
    prompts = make_prompts()
    batch = rollout(shared_model(), spying(evictor, log), evict_every)
    rows = len(batch.completion_ids)
    layers, heads = 2, 2
    budgets = {len(p): layer_budgets(evictor, len(p), evict_every) for p in prompts}
    long = [(p, layer) for p, by_layer in budgets.items() for layer, n in enumerate(by_layer) if p > n]
    prefills, decodes = log[: len(long)], log[len(long) :]
    held: dict[tuple[int, int], dict[tuple[int, int], set[int]]] = {}  # (row, query) -> (layer, head) -> set
    # rows come and go, a sequence is known by its seed
    row_of = {
        seed: n * GROUP + member
        for n, prompt in enumerate(prompts)
        for member, seed in enumerate(sequence_seeds(SEED, prompt, GROUP)[1])
    }
    for layer, _, query, kept in prefills:
        assert kept.shape[0] == 1
        for row in range(rows):
            if len(batch.prompts_per_completion[row]) == int(query) + 1:
                cell = held.setdefault((row, int(query)), {})
                cell |= {(layer, h): set(kept[0, h].tolist()) - {-1} for h in range(heads)}
    for layer, seeds, query, kept in decodes:
        assert kept.shape[0] == len(seeds) <= rows and evict_every is not None
        for n, seed in enumerate(seeds):
            cell = held.setdefault((row_of[seed], int(query[n])), {})
            cell |= {(layer, h): set(kept[n, h].tolist()) - {-1} for h in range(heads)}

    evictions = 0
    for row, entry in enumerate(batch.shadow):
        prompt, total = entry.prompt_lengths[0], entry.lengths[0]
        visible = entry.visible().expand(layers, heads, -1, -1)
        for layer in range(layers):
            for head in range(heads):
                cache: set[int] = set()
                for i in range(total):
                    cache.add(i)
                    assert set(visible[layer, head, i].nonzero()[:, 0].tolist()) == cache, (row, layer, i)
                    if (layer, head) in held.get((row, i), {}):
                        cache = set(held[row, i][layer, head])
                        evictions += 1
                        if not EVICTORS[evictor].ragged_heads:
                            assert len(cache) == min(budgets[prompt][layer], i + 1)
                        assert set(range(min(NUM_SINKS, i + 1))) <= cache
                        assert set(range(max(i + 1 - RECENT_WINDOW, 0), i + 1)) <= cache
                if evict_every is None:
                    assert not any(q >= prompt for r, q in held if r == row)
    assert evictions >= len(long) * GROUP * heads


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("evictor", EVICTING)
def test_exactly_the_budget_survives_each_eviction(evictor: str, evict_every: int | None) -> None:
    """Read from the record alone: alive keys after each scheduled eviction, per layer and head."""
    batch = shared_rollout("llama-gqa", torch.float64, evictor, evict_every)
    for entry in batch.shadow:
        prompt, total = entry.prompt_lengths[0], entry.lengths[0]
        moments = [prompt, *(range(prompt + evict_every, total, evict_every) if evict_every else ())]
        for moment in moments:
            if moment >= total:
                continue
            alive = entry.evicted_at[..., :moment] > moment
            for layer, budget in enumerate(layer_budgets(evictor, prompt, evict_every)):
                left = alive[layer].sum(-1)
                if EVICTORS[evictor].ragged_heads:
                    assert int(left.sum()) == len(left) * min(budget, moment)
                else:
                    assert bool((left == min(budget, moment)).all())
            assert bool(alive[..., :NUM_SINKS].all()) and bool(alive[..., -RECENT_WINDOW:].all())
        # between evictions nothing goes
        assert set(entry.evicted_at.unique().tolist()) - {NEVER} <= set(moments)


def test_evictions_behind_the_end_are_not_recorded() -> None:
    """A sequence that stopped rides along in the batch; what is evicted then hid nothing from it."""
    for entry in shared_rollout("llama-gqa", torch.float64, "snapkv", 5).shadow:
        finite = entry.evicted_at[entry.evicted_at != NEVER]
        assert not len(finite) or int(finite.max()) < entry.lengths[0]
