"""Sharing a group's prompt keys changes where they lie, not what anybody attends to."""

from __future__ import annotations

import pytest
import torch

from shadowmask import RolloutBatch, RolloutEngine, prepare_model, shadow_logprobs
from shadowmask.attention import kernel
from shadowmask.attention.kernel import (
    Scoring,
    additive_mask,
    masked_attention,
    merge_partials,
    partial_attention,
)
from shadowmask.eviction import EVICTORS
from tiny_models import MAX_NEW_TOKENS, layer_budgets, make_evictor, make_model, make_prompts
from tolerances import BFLOAT16, FLOAT32, FLOAT64

NEVER_DUE = 10_000  # a decode-time schedule that evicts nothing: every row owns its slots, unshared
PARITY = {torch.float64: FLOAT64, torch.float32: FLOAT32}


def sample(
    family: str, evictor: str, dtype: torch.dtype, every: int | None, sizes: list[int]
) -> RolloutBatch:
    engine = RolloutEngine(make_model(family, dtype), None, make_evictor(evictor), every)
    # budgets of layers may depend on the schedule as well, where a prompt is short
    horizons = [[layer_budgets(evictor, len(p), n) for n in (None, NEVER_DUE)] for p in make_prompts()]
    same = [n for n, (prompt_only, decoding) in enumerate(horizons) if prompt_only == decoding]
    assert 0 in same
    prompts, sizes = [make_prompts()[n] for n in same], [sizes[n] for n in same]
    return engine.generate(prompts, group_size=sizes, max_new_tokens=MAX_NEW_TOKENS, seed=5)


@pytest.mark.parametrize("sizes", [[3, 3, 3, 3], [1, 4, 2, 3]], ids=["equal", "ragged"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("family", ["llama-gqa", "llama-mqa", "gemma2", "gemma3"])
def test_shared_and_owned_slots_sample_the_same(family: str, dtype: torch.dtype, sizes: list[int]) -> None:
    shared, owned = (sample(family, "snapkv", dtype, every, sizes) for every in (None, NEVER_DUE))
    assert shared.completion_ids == owned.completion_ids
    assert torch.equal(shared.shadow.evicted_at, owned.shadow.evicted_at)
    assert shared.shadow.retained_fraction() < 1
    for ours, theirs in zip(shared.sparse_logprobs, owned.sparse_logprobs, strict=True):
        assert (ours - theirs).abs().max() <= PARITY[dtype]
    assert shared.kv_bytes_unshared == owned.kv_bytes_unshared == owned.kv_bytes_dense
    assert shared.kv_bytes_dense < owned.kv_bytes_dense
    assert shared.kv_bytes_peak < owned.kv_bytes_peak


@pytest.mark.parametrize("evictor", sorted(EVICTORS))
def test_every_evictor_keeps_the_same_keys_shared(evictor: str) -> None:
    shared, owned = (
        sample("llama-gqa", evictor, torch.float64, every, [2] * 4) for every in (None, NEVER_DUE)
    )
    assert torch.equal(shared.shadow.evicted_at, owned.shadow.evicted_at)
    assert shared.completion_ids == owned.completion_ids


def parts(softcap: float | None, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    query, key, value = (torch.randn(2, 3, n, 8, dtype=dtype) for n in (4, 11, 11))
    visible = torch.rand(2, 3, 4, 11) > 0.4
    visible[..., 0, :5] = False  # a row that sees nothing of the first part
    visible[..., 7] = True
    return {"query": query, "key": key, "value": value, "visible": visible}


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
def test_merged_parts_are_attention_over_the_whole(softcap: float | None, dtype: torch.dtype) -> None:
    x = parts(softcap, dtype)
    scoring = Scoring(0.3, softcap)
    whole = masked_attention(x["query"], x["key"], x["value"], x["visible"], scoring)
    first, second = _both(x, scoring)
    assert (merge_partials(first, second) - whole).abs().max() <= PARITY[dtype]
    unweighted = merge_partials(*((out, torch.zeros_like(lse)) for out, lse in (first, second)))
    assert (unweighted - whole).abs().max() > 100 * FLOAT32  # the log-sum-exp does matter


def _both(x: dict[str, torch.Tensor], scoring: Scoring) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [
        partial_attention(
            x["query"],
            x["key"][:, :, s],
            x["value"][:, :, s],
            additive_mask(x["visible"][..., s], x["query"]),
            scoring,
        )
        for s in (slice(0, 5), slice(5, 11))
    ]


@pytest.mark.parametrize("plain", [False, True], ids=["kernel", "plain"])
def test_a_part_that_sees_nothing_weighs_nothing(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if plain:
        monkeypatch.setattr(kernel, "FLASH_CPU", None)
    x = parts(None, torch.float64)
    x["visible"][..., :5] = False
    scoring = Scoring(0.3)
    empty, rest = _both(x, scoring)
    assert torch.equal(merge_partials(empty, rest), rest[0])
    assert torch.equal(merge_partials(rest, empty), rest[0])


def test_without_that_kernel_sampling_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What other devices run: the log-sum-exp worked out in plain torch."""
    fast = sample("llama-gqa", "snapkv", torch.float64, None, [2] * 4)
    monkeypatch.setattr(kernel, "FLASH_CPU", None)
    plain = sample("llama-gqa", "snapkv", torch.float64, None, [2] * 4)
    assert plain.completion_ids == fast.completion_ids
    for ours, theirs in zip(plain.sparse_logprobs, fast.sparse_logprobs, strict=True):
        assert (ours - theirs).abs().max() <= FLOAT64


@pytest.mark.parametrize("every", [None, 5])
def test_autocast_reaches_every_part(every: int | None) -> None:
    """Rotary embeddings leave queries and keys in float32 under autocast, values come in bfloat16."""
    with torch.autocast("cpu", torch.bfloat16):
        batch = sample("llama-gqa", "snapkv", torch.float32, every, [2] * 4)
        model = prepare_model(make_model("llama-gqa", torch.float32))
        with torch.no_grad():
            shadow = shadow_logprobs(model, batch)
    gaps = torch.cat([(a - b).abs() for a, b in zip(shadow, batch.sparse_logprobs, strict=True)])
    assert gaps.mean() <= BFLOAT16


def test_the_kernel_behind_sdpa_still_returns_its_log_sum_exp() -> None:
    """Private in torch: if it changes, ``partial_attention`` must be looked at again."""
    query, key, value = (torch.randn(2, 3, n, 8) for n in (4, 11, 11))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, False, scale=0.3
    )
    logits = query @ key.transpose(-1, -2) * 0.3
    assert (lse - logits.logsumexp(-1)).abs().max() <= FLOAT32
    assert (out - logits.softmax(-1) @ value).abs().max() <= FLOAT32
