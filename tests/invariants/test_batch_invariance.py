"""What a sequence samples and keeps depends neither on its neighbours nor on its place in the batch."""

from __future__ import annotations

import pytest
import torch

from shadowmask import RolloutBatch
from shadowmask.eviction import list_evictors
from tiny_models import GROUP, MAX_NEW_TOKENS, make_prompts, rollout, shared_model, shared_rollout
from tolerances import FLOAT64, WRONG_RECORD

PROMPTS = make_prompts()


def assert_same_sequence(a: RolloutBatch, n: int, b: RolloutBatch, m: int) -> None:
    assert a.completion_ids[n] == b.completion_ids[m]
    assert torch.equal(a.shadow[n].evicted_at, b.shadow[m].evicted_at)
    assert a.shadow[n].token_hashes == b.shadow[m].token_hashes
    assert float((a.sparse_logprobs[n] - b.sparse_logprobs[m]).abs().max()) <= FLOAT64


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("evictor", list_evictors())
def test_alone_or_among_others(evictor: str, evict_every: int | None) -> None:
    together = shared_rollout("llama-gqa", torch.float64, evictor, evict_every)
    for n, prompt in enumerate(PROMPTS):
        alone = rollout(shared_model(), evictor, evict_every, [prompt])
        for member in range(GROUP):
            assert_same_sequence(together, n * GROUP + member, alone, member)


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "qwen3-moe"])
def test_any_place_in_the_batch(family: str, evict_every: int | None) -> None:
    forward = shared_rollout(family, torch.float64, "random", evict_every)
    backward = rollout(shared_model(family), "random", evict_every, PROMPTS[::-1])
    for n in range(len(PROMPTS)):
        for member in range(GROUP):
            other = (len(PROMPTS) - 1 - n) * GROUP + member
            assert_same_sequence(forward, n * GROUP + member, backward, other)


@pytest.mark.parametrize("evictor", list_evictors())
def test_group_sizes_as_a_list(evictor: str) -> None:
    """A larger group goes on where a smaller one stops; every member is the one it was."""
    sizes = [3, 1, 2, 3]
    batch = rollout(shared_model(), evictor, 5, group_size=sizes)
    even = shared_rollout("llama-gqa", torch.float64, evictor, 5)
    assert batch.group_sizes == sizes and len(batch.completion_ids) == sum(sizes)
    assert batch.prompts_per_completion == [p for p, k in zip(PROMPTS, sizes, strict=True) for _ in range(k)]
    start = 0
    for n, size in enumerate(sizes):
        for member in range(size):
            assert_same_sequence(batch, start + member, even, n * GROUP + member)
        start += size


def test_one_group_or_the_same_prompt_several_times() -> None:
    prompt = PROMPTS[0]
    group = rollout(shared_model(), "snapkv", 5, [prompt], group_size=4)
    repeated = rollout(shared_model(), "snapkv", 5, [prompt, prompt], group_size=2)
    for n in range(4):
        assert_same_sequence(group, n, repeated, n)


def test_samples_of_one_prompt_differ() -> None:
    batch = rollout(shared_model(), "snapkv", 5, [PROMPTS[0], PROMPTS[1], PROMPTS[0]], group_size=2)
    mine = [batch.completion_ids[n] for n in (0, 1, 4, 5)]
    assert len({tuple(c) for c in mine}) == len(mine)


@pytest.mark.parametrize("evictor", list_evictors())
def test_a_seed_repeats_and_another_does_not(evictor: str) -> None:
    first = shared_rollout("llama-gqa", torch.float64, evictor, 5)
    torch.rand(7)  # the global generator has no say
    again = rollout(shared_model(), evictor, 5)
    assert again.completion_ids == first.completion_ids
    assert torch.equal(again.shadow.evicted_at, first.shadow.evicted_at)
    assert all(torch.equal(a, b) for a, b in zip(again.sparse_logprobs, first.sparse_logprobs, strict=True))
    assert rollout(shared_model(), evictor, 5, seed=4).completion_ids != first.completion_ids


def test_a_longer_limit_continues_the_same_completion() -> None:
    short = rollout(shared_model(), "snapkv", 5, max_new_tokens=10)
    full = shared_rollout("llama-gqa", torch.float64, "snapkv", 5)
    for a, b in zip(short.completion_ids, full.completion_ids, strict=True):
        assert a == b[:10]


def test_sampling_follows_the_distribution() -> None:
    """First tokens of many samples against their probabilities: a chi-square that a bias would blow up."""
    model = shared_model()
    samples = 600
    batch = rollout(model, "dense", None, [PROMPTS[1]], group_size=samples, max_new_tokens=1)
    with torch.no_grad():
        probabilities = model(torch.tensor([PROMPTS[1]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(torch.tensor([c[0] for c in batch.completion_ids]), minlength=64).double()
    expected = probabilities * samples
    likely = expected >= 5  # the usual rule for the statistic to be chi-square
    assert int(likely.sum()) > 10
    statistic = float(((counts - expected).square() / expected)[likely].sum())
    freedom = int(likely.sum())
    # mean = freedom, variance = 2 freedom: five standard deviations
    assert statistic < freedom + 5 * (2 * freedom) ** 0.5


def test_log_probabilities_are_those_of_the_tokens_drawn() -> None:
    batch = shared_rollout("llama-gqa", torch.float64, "dense")
    for prompt, completion, logprobs in zip(
        batch.prompts_per_completion, batch.completion_ids, batch.sparse_logprobs, strict=True
    ):
        with torch.no_grad():
            logits = shared_model()(torch.tensor([prompt + completion])).logits[0]
        rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
        direct = rows.gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert float((direct - logprobs).abs().max()) <= FLOAT64
        off_by_one = logits[len(prompt) :].log_softmax(-1).gather(1, torch.tensor(completion)[:, None])[:, 0]
        assert float((off_by_one - logprobs).abs().max()) > WRONG_RECORD
        assert len(completion) <= MAX_NEW_TOKENS
