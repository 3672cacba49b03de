"""Each evictor's scores against an independent, slow computation on random input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AttentionInterface

import slow_reference
from shadowmask import get_evictor
from shadowmask.eviction import EVICTORS, Evictor, LayerView
from shadowmask.eviction.random import mix, uniform
from shadowmask.eviction.snapkv import pool_by_position
from tiny_models import make_evictor, make_prompts, rollout, shared_model
from tiny_views import KV_HEADS, PER_KV, by_position, make_view, slow_weights
from tolerances import FLOAT64, UNIFORM_SHARE


def slow_snapkv(view: LayerView, kernel: int) -> list[dict[int, float]]:
    scores = []
    for kv_head in range(KV_HEADS):
        held = sorted(int(p) for p in view.positions[0, kv_head] if p >= 0)
        received = dict.fromkeys(held, 0.0)
        assert view.window_positions is not None
        for head in range(kv_head * PER_KV, (kv_head + 1) * PER_KV):
            for row in range(view.window_positions.shape[1]):
                if int(view.window_positions[0, row]) < 0:
                    continue
                for position, weight in slow_weights(view, head, row).items():
                    received[position] += weight / PER_KV
        pooled = {}
        for n, position in enumerate(held):
            near = held[max(n - kernel // 2, 0) : n + kernel // 2 + 1]
            pooled[position] = sum(received[p] for p in near) / kernel
        scores.append(pooled)
    return scores


@pytest.mark.parametrize("kernel", [1, 3, 5])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("rules", [{}, {"softcap": 0.7}, {"sliding_window": 6}], ids=str)
def test_snapkv_scores(rules: dict[str, Any], shuffled: bool, kernel: int) -> None:
    view = make_view(14, 4, shuffled, **rules)
    evictor = EVICTORS["snapkv"](budget=8, num_sinks=0, observation_window=4, kernel_size=kernel)
    actual, expected = by_position(evictor.score(view), view), slow_snapkv(view, kernel)
    for mine, slow in zip(actual, expected, strict=True):
        assert mine == pytest.approx(slow, abs=FLOAT64)


def test_snapkv_ignores_rows_of_the_window_that_do_not_exist_yet() -> None:
    full = make_view(5, 3)
    early = make_view(5, 3, window_positions=torch.tensor([[-1, 3, 4]], dtype=torch.int32))
    evictor = EVICTORS["snapkv"](budget=8, num_sinks=0, observation_window=3)
    for mine, slow in zip(by_position(evictor.score(early), early), slow_snapkv(early, 5), strict=True):
        assert mine == pytest.approx(slow, abs=FLOAT64)
    assert not torch.allclose(evictor.score(full), evictor.score(early))


def test_pooling_by_hand() -> None:
    # positions 5 2 - 9 0 in slots; sorted scores 4 (0), 2 (2), 1 (5), 3 (9); kernel 3 divides by 3 always
    positions = torch.tensor([[[5, 2, -1, 9, 0]]])
    pooled = pool_by_position(torch.tensor([[[1.0, 2.0, 99.0, 3.0, 4.0]]]), positions, 3)
    expected = {0: 6 / 3, 2: 7 / 3, 5: 6 / 3, 9: 4 / 3}
    held = {int(p): float(s) for p, s in zip(positions[0, 0], pooled[0, 0], strict=True) if p >= 0}
    assert held == pytest.approx(expected)


@pytest.mark.parametrize(
    "settings", [{"observation_window": 0}, {"kernel_size": 4}, {"kernel_size": 0}], ids=str
)
def test_snapkv_settings_are_checked(settings: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(settings))):
        get_evictor("snapkv", budget=64, **settings)


class Watching(EVICTORS["h2o"]):  # type: ignore[misc]
    """H2O that keeps the views that it scored."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.views: list[tuple[int, Tensor, Tensor, Tensor]] = []

    def score(self, view: LayerView) -> Tensor:
        received = super().score(view)
        self.views.append(
            (view.layer, view.query_positions.clone(), view.positions.clone(), received.clone())
        )
        return received


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_h2o_sums_the_attention_that_a_key_received(family: str) -> None:
    """Against attention weights of the slow model under the record's own masks, summed by column."""
    model = shared_model(family)
    evictor = Watching(budget=12, num_sinks=2, recent_window=4)
    batch = rollout(model, evictor, 5, make_prompts((20,)), group_size=1, stop_token_ids=[])
    slow = slow_reference.make_slow_model(family)
    tokens = batch.prompt_ids[0] + batch.completion_ids[0]
    _, weights = _attention(slow, tokens, batch.shadow[0].visible())
    checked = 0
    for layer, queries, positions, received in evictor.views:
        moment = int(queries[0]) + 1
        if moment > len(tokens) - 1:
            continue
        columns = weights[layer][:, :moment].sum(1)  # (kv_heads, keys)
        for head in range(KV_HEADS):
            for position, value in zip(positions[0, head].tolist(), received[0, head].tolist(), strict=True):
                if position >= 0:
                    assert value == pytest.approx(float(columns[head, position]), abs=FLOAT64)
                    checked += 1
    assert checked > 200 and len({int(q) for _, q, _, _ in evictor.views}) > 4


class WatchingWindow(EVICTORS["snapkv"]):  # type: ignore[misc]
    """SnapKV that keeps the windows of decode-time evictions."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.windows: list[tuple[int, int, Tensor, Tensor]] = []

    def score(self, view: LayerView) -> Tensor:
        window = (view.window_positions[0].clone(), view.window_queries[0].clone())
        self.windows.append((view.layer, int(view.query_positions[0]), *window))
        return super().score(view)


@pytest.mark.parametrize("prompt", [20, 2])
def test_snapkv_looks_at_the_last_queries_while_decoding(prompt: int) -> None:
    """The ring of queries holds the last four, with the queries that the model really had there."""
    evictor = WatchingWindow(budget=8, num_sinks=1, observation_window=4)
    batch = rollout(shared_model(), evictor, 3, make_prompts((prompt,)), group_size=1, stop_token_ids=[])
    slow = slow_reference.make_slow_model("llama-gqa")
    tokens = batch.prompt_ids[0] + batch.completion_ids[0]
    queries, _ = _attention(slow, tokens, batch.shadow[0].visible())
    assert len({moment for _, moment, _, _ in evictor.windows}) > 5
    for layer, moment, positions, window in evictor.windows:
        last = range(max(moment - 3, 0), moment + 1)
        assert sorted(p for p in positions.tolist() if p >= 0) == list(last)
        for row, position in enumerate(positions.tolist()):
            if position >= 0:
                assert float((window[:, row] - queries[layer][:, position]).abs().max()) <= FLOAT64


def _attention(model: Any, tokens: list[int], visible: Tensor) -> tuple[dict[int, Tensor], dict[int, Tensor]]:
    """Per layer: queries (heads, tokens, dim), and the slow attention's weights (kv_heads, query, key),
    summed over each KV head's queries."""
    queries: dict[int, Tensor] = {}
    weights: dict[int, Tensor] = {}

    def noting(module: Any, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        eye = torch.eye(key.shape[2], dtype=key.dtype).expand(1, key.shape[1], -1, -1)
        rows, _ = slow_reference.slow_attention(module, query, key, eye, *args, **kwargs)
        heads = rows[0].transpose(0, 1)  # (heads, query, key): the values were the identity
        queries[module.layer_idx] = query[0]
        weights[module.layer_idx] = heads.unflatten(0, (key.shape[1], -1)).sum(1)
        return slow_reference.slow_attention(module, query, key, value, *args, **kwargs)

    AttentionInterface.register("slow_noting", noting)
    model.set_attn_implementation("slow_noting")
    with torch.no_grad():
        slow_reference.slow_logits(model, tokens, visible)
    return queries, weights


def random_scores(
    seeds: list[int], layer: int = 0, query: int | list[int] = 100, tokens: int = 64, heads: int = 2
) -> Tensor:
    batch = len(seeds)
    view = LayerView(
        layer=layer,
        keys=torch.zeros(batch, heads, tokens, 1),
        values=torch.zeros(batch, heads, tokens, 1),
        positions=torch.arange(tokens).expand(batch, heads, -1),
        query_positions=torch.tensor(query).expand(batch),
        seeds=torch.tensor(seeds),
        scaling=1.0,
    )
    return get_evictor("random", budget=64).score(view)


def test_random_keeps_every_key_equally_often() -> None:
    """Of 32 unprotected keys 8 stay: each in a quarter of 4,000 draws, by every kind of repetition."""
    many = list(range(4000))
    draws = {
        "seeds": random_scores(many, tokens=32, heads=1),
        "layers": torch.cat([random_scores([5], layer=n, tokens=32, heads=10) for n in range(400)]),
        "moments": random_scores([5] * 4000, query=many, tokens=32, heads=1),
        "heads": random_scores([5], tokens=32, heads=4000),
    }
    for kind, scores in draws.items():
        kept = scores.flatten(0, 1).argsort(dim=-1, descending=True)[:, :8]
        assert len(kept) == 4000
        share = torch.bincount(kept.flatten(), minlength=32) / len(kept)
        assert float((share - 0.25).abs().max()) < UNIFORM_SHARE, kind


def test_random_draws_are_independent_of_each_other() -> None:
    first = random_scores([1, 2])
    mine = first[0, 0]
    others = [
        first[1, 0],
        first[0, 1],
        random_scores([1], layer=1)[0, 0],
        random_scores([1], query=101)[0, 0],
    ]
    for other in others:
        assert abs(float(torch.corrcoef(torch.stack([mine, other]))[0, 1])) < 0.5
        assert not bool((mine == other).any())
    assert torch.equal(random_scores([2, 1])[1], first[0]), "neighbours have no say"


def test_mix_is_splitmix64() -> None:
    """The published generator's first outputs for seed 0 (Vigna, splitmix64.c), as signed integers."""
    published = [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4, 0x06C45D188009454F]
    golden = -7046029254386353131
    for n, expected in enumerate(published):
        state = torch.tensor(n) * golden  # mix adds the increment once more
        assert int(mix(state)) % 2**64 == expected


def test_uniform_stays_below_one() -> None:
    extremes = torch.tensor([-1, 0, 2**63 - 1, -(2**63)])
    values = uniform(extremes)
    assert float(values.min()) >= 0 and float(values.max()) < 1
    assert values.tolist() == [1 - 2**-24, 0.0, 0.5 - 2**-24, 0.5]


def test_recent_is_the_position_itself_beyond_the_reach_of_float32() -> None:
    view = make_view(4, 2, positions=torch.tensor([[[2**24, 2**24 + 1, 0, -1]] * KV_HEADS]).int())
    scores = get_evictor("recent", budget=64).score(view)
    assert float(scores[0, 0, 1] - scores[0, 0, 0]) == 1.0


def test_recent_keeps_sinks_and_the_tail() -> None:
    batch = rollout(shared_model(), "recent", None, make_prompts((30,)), group_size=1)
    alive = (batch.shadow[0].evicted_at[..., :30] > 30).nonzero()[:, 2].unique().tolist()
    assert alive == [0, 1, *range(20, 30)]


def test_a_new_evictor_needs_a_name_and_a_score_only() -> None:
    class First(Evictor):
        name = "first"
        default_recent_window = 2

        def score(self, view: LayerView) -> Tensor:
            return -view.positions.double()

    batch = rollout(shared_model(), First(budget=8, num_sinks=1), 4, make_prompts((20,)), group_size=1)
    alive = (batch.shadow[0].evicted_at[..., :20] > 20).nonzero()[:, 2].unique().tolist()
    assert alive == [0, 1, 2, 3, 4, 5, 18, 19]


def test_dense_takes_no_settings() -> None:
    with pytest.raises(ValueError, match="does not take these settings"):
        get_evictor("dense", budget=8)
    assert make_evictor("dense").num_sinks == 0
