"""Packed, gathered and tiled learning equals the slow-and-obvious one: values and gradients."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import shadowmask.attention.kernel
import shadowmask.head
from shadowmask import RolloutBatch, shadow_logprobs, smd_loss
from shadowmask.losses import LOSS_TYPES
from shadowmask.scoring import shadow_stats
from slow_reference import flat_gradient, make_slow_model, slow_smd_loss, slow_tracks
from tiny_models import FAMILIES, WITH_SINKS, make_learner, make_prompts, rollout, shared_rollout
from tolerances import FLOAT64, GRADIENT_DIFFERS, GRADIENT_FLOAT64, GRADIENT_ROUTER, relative_gap

PROMPTS = make_prompts((23, 9, 1))
LAMBDA = 0.3  # large enough for both terms to show in the sum


def small_rollout(family: str, evict_every: int | None, **settings: object) -> RolloutBatch:
    settings = {"group_size": 2, "max_new_tokens": 20} | settings
    return rollout(make_learner(family), "snapkv", evict_every, PROMPTS, **settings)


def advantages_of(batch: RolloutBatch) -> Tensor:
    count = len(batch.completion_ids)
    return torch.randn(count, dtype=torch.float64, generator=torch.Generator().manual_seed(5))


def fast(family: str, batch: RolloutBatch, **settings: object) -> tuple[float, Tensor]:
    model = make_learner(family)
    result = smd_loss(model, batch, advantages_of(batch), **{"distill_coef": LAMBDA} | settings)
    result.loss.backward()
    return float(result.loss.detach()), flat_gradient(model)


def slow(family: str, batch: RolloutBatch, **settings: object) -> tuple[float, Tensor]:
    model = make_slow_model(family)
    defaults = {"distill_coef": LAMBDA, "loss_type": "dapo"}
    loss = slow_smd_loss(model, batch, advantages_of(batch), **defaults | settings)
    loss.backward()
    return float(loss.detach()), flat_gradient(model)


def assert_same(
    actual: tuple[float, Tensor], expected: tuple[float, Tensor], tolerance: float = GRADIENT_FLOAT64
) -> None:
    assert actual[0] == pytest.approx(expected[0], abs=FLOAT64)
    assert relative_gap(actual[1], expected[1]) <= tolerance


def assert_other_gradient(actual: tuple[float, Tensor], expected: tuple[float, Tensor]) -> None:
    assert relative_gap(actual[1], expected[1]) > GRADIENT_DIFFERS


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("family", [*FAMILIES, *WITH_SINKS])
def test_loss_and_gradients_equal_the_slow_reference(family: str, evict_every: int | None) -> None:
    batch = small_rollout(family, evict_every)
    assert batch.shadow.retained_fraction() < 1
    tolerance = GRADIENT_ROUTER if family in ("qwen3-moe", "gpt-oss") else GRADIENT_FLOAT64
    assert_same(fast(family, batch), slow(family, batch), tolerance)


@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_every_loss_type_with_clipping_active(loss_type: str) -> None:
    batch = small_rollout("llama-gqa", 5)
    generator = torch.Generator().manual_seed(2)
    old = [x + 0.4 * torch.randn(len(x), generator=generator).double() for x in batch.sparse_logprobs]
    settings = {"loss_type": loss_type, "old_logprobs": old, "max_completion_length": 20}
    asymmetric = {"clip_low": 0.2, "clip_high": 0.3}
    expected = slow("llama-gqa", batch, **settings, clip=(0.2, 0.3))
    assert_same(fast("llama-gqa", batch, **settings, **asymmetric), expected)
    assert_other_gradient(fast("llama-gqa", batch, **settings, clip_low=9.0, clip_high=9.0), expected)


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2"])
def test_temperature_is_applied_before_the_softmax(family: str) -> None:
    batch = small_rollout(family, 5, temperature=0.6)
    assert_same(fast(family, batch), slow(family, batch))


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "gemma3"])
def test_tiles_and_chunks_change_nothing(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seven rows of logits and five rows of masks at a time, neither dividing the number of tokens."""
    batch = small_rollout(family, 5)
    expected = slow(family, batch)
    vocab = make_learner(family).config.vocab_size
    monkeypatch.setattr(shadowmask.head, "TILE_ELEMENTS", 7 * vocab)
    monkeypatch.setattr(shadowmask.attention.kernel, "QUERY_CHUNK", 5)
    assert len(shadowmask.head._tiles(sum(map(len, batch.completion_ids)), vocab)) > 3
    assert_same(fast(family, batch), expected)
    # and the sampler's own chunks: same rollout
    again = small_rollout(family, 5)
    assert again.completion_ids == batch.completion_ids
    assert bool((again.shadow.evicted_at == batch.shadow.evicted_at).all())


def test_prompts_in_any_order_and_uneven_groups() -> None:
    batch = small_rollout("llama-gqa", 5, group_size=[3, 1, 2])
    assert_same(fast("llama-gqa", batch), slow("llama-gqa", batch))


def test_lambda_zero_is_plain_grpo_on_the_shadow_track() -> None:
    batch = small_rollout("llama-gqa", 5)
    plain = fast("llama-gqa", batch, distill_coef=0.0)
    assert_same(plain, slow("llama-gqa", batch, distill_coef=0.0))
    assert_other_gradient(fast("llama-gqa", batch), plain)


@pytest.mark.parametrize("evict_every", [None, 5])
def test_no_gradient_reaches_the_teacher(evict_every: int | None) -> None:
    """Distillation alone, against a reference whose teacher is detached, and one whose is not."""
    batch = small_rollout("llama-gqa", evict_every)
    model = make_learner("llama-gqa")
    zeros = torch.zeros(len(batch.completion_ids), dtype=torch.float64)
    smd_loss(model, batch, zeros, distill_coef=1.0).loss.backward()
    gradients = []
    for detach in (True, False):
        reference = make_slow_model("llama-gqa")
        slow_smd_loss(reference, batch, zeros, 1.0, "dapo", detach_teacher=detach).backward()
        gradients.append(flat_gradient(reference))
    assert relative_gap(flat_gradient(model), gradients[0]) <= GRADIENT_FLOAT64
    assert relative_gap(flat_gradient(model), gradients[1]) > GRADIENT_DIFFERS


@pytest.mark.parametrize("evict_every", [None, 5])
def test_token_statistics_equal_the_textbook(evict_every: int | None) -> None:
    batch = small_rollout("gemma2", evict_every, temperature=1.3)
    with torch.no_grad():
        stats = shadow_stats(make_learner("gemma2"), batch, teacher=True)
        reference = make_slow_model("gemma2")
        tracks = [slow_tracks(reference, batch, n) for n in range(len(batch.completion_ids))]
    shadow, dense = (torch.cat(track) for track in zip(*tracks, strict=True))
    column = torch.tensor([t for c in batch.completion_ids for t in c])[:, None]
    expected = {
        "logprobs": shadow.gather(1, column)[:, 0],
        "entropy": -(shadow.exp() * shadow).sum(-1),
        "kl": (dense.exp() * (dense - shadow)).sum(-1),
        "teacher_logprobs": dense.gather(1, column)[:, 0],
    }
    for name, values in expected.items():
        assert float((getattr(stats, name) - values).abs().max()) <= FLOAT64, name
    assert float(expected["kl"].min()) >= -FLOAT64 and float(expected["kl"].max()) > GRADIENT_DIFFERS


def test_gradient_of_the_log_probabilities_themselves() -> None:
    batch = small_rollout("qwen3", 5)
    model, reference = make_learner("qwen3"), make_slow_model("qwen3")
    torch.cat(shadow_logprobs(model, batch)).sum().backward()
    for n, completion in enumerate(batch.completion_ids):
        shadow, _ = slow_tracks(reference, batch, n)
        shadow.gather(1, torch.tensor(completion)[:, None]).sum().backward()
    assert relative_gap(flat_gradient(model), flat_gradient(reference)) <= GRADIENT_FLOAT64


def test_smd_loss_refuses_advantages_that_do_not_fit() -> None:
    batch = shared_rollout()
    count = len(batch.completion_ids)
    for wrong in (torch.zeros(count - 1), torch.full((count,), torch.nan)):
        with pytest.raises(ValueError, match="advantages"):
            smd_loss(make_learner(), batch, wrong)
