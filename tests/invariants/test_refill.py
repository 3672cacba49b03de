"""A rollout that has to wait for memory samples what it would have sampled with all rows at once."""

from __future__ import annotations

import re

import pytest
import torch

from shadowmask import RolloutBatch, RolloutEngine, sampler, shadow_logprobs
from shadowmask.eviction import list_evictors
from shadowmask.sampler import Sampler
from tiny_models import MAX_NEW_TOKENS, STOPS, make_evictor, make_model, make_prompts, shared_model
from tolerances import FLOAT64

SIZES = [4, 1, 3, 5]
SCHEDULES = pytest.mark.parametrize("evict_every", [None, 5])


def sample(
    evictor: str = "snapkv",
    evict_every: int | None = None,
    limit: int | None = None,
    family: str = "llama-gqa",
) -> RolloutBatch:
    engine = RolloutEngine(shared_model(family), None, make_evictor(evictor), evict_every, limit)
    return engine.generate(make_prompts(), SIZES, MAX_NEW_TOKENS, seed=3, stop_token_ids=list(STOPS))


def limits(evictor: str = "snapkv", evict_every: int | None = None) -> tuple[int, int]:
    """Bytes that one sequence needs, as the error says, and that all of them together take."""
    with pytest.raises(ValueError, match="kv_memory_limit=1 bytes is too small") as caught:
        sample(evictor, evict_every, limit=1)
    assert "\n" not in str(caught.value)
    (least,) = re.findall(r"one sequence needs (\d+) bytes", str(caught.value))
    return int(least), sample(evictor, evict_every).kv_bytes_peak


def assert_same(waiting: RolloutBatch, together: RolloutBatch) -> None:
    assert waiting.completion_ids == together.completion_ids
    assert torch.equal(waiting.shadow.evicted_at, together.shadow.evicted_at)
    for a, b in zip(waiting.sparse_logprobs, together.sparse_logprobs, strict=True):
        assert float((a - b).abs().max()) <= FLOAT64


@SCHEDULES
@pytest.mark.parametrize("evictor", list_evictors())
def test_waiting_changes_nothing(evictor: str, evict_every: int | None) -> None:
    together = sample(evictor, evict_every)
    least, most = limits(evictor, evict_every)
    assert together.rows == sum(SIZES)
    for share in (0.0, 0.3, 0.7):
        limit = int(least + share * (most - least))
        waiting = sample(evictor, evict_every, limit)
        assert 1 <= waiting.rows < together.rows
        assert waiting.kv_bytes_peak <= limit < together.kv_bytes_peak
        assert_same(waiting, together)


@SCHEDULES
@pytest.mark.parametrize("family", ["gemma3", "gemma2", "llama-mqa", "qwen3-moe"])
def test_waiting_changes_nothing_in_any_family(family: str, evict_every: int | None) -> None:
    together = sample("h2o", evict_every, family=family)
    waiting = sample("h2o", evict_every, limit=together.kv_bytes_peak // 2, family=family)
    assert waiting.rows < together.rows
    assert_same(waiting, together)
    with torch.no_grad():
        replayed = torch.cat(shadow_logprobs(shared_model(family), waiting))
    assert float((replayed - torch.cat(waiting.sparse_logprobs)).abs().max()) <= FLOAT64


@SCHEDULES
def test_one_row_is_enough(evict_every: int | None) -> None:
    least, _ = limits("snapkv", evict_every)
    alone = sample("snapkv", evict_every, limit=least)
    assert alone.rows == 1
    assert_same(alone, sample("snapkv", evict_every))
    with pytest.raises(ValueError, match="too small"):
        sample("snapkv", evict_every, limit=least - 1)


@SCHEDULES
def test_a_prompt_is_read_once_however_long_its_samples_wait(
    evict_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    original = Sampler._prefill

    def counting(self: Sampler, prompt: sampler.Prompt) -> torch.Tensor:
        read.append(prompt.info.length)
        return original(self, prompt)

    monkeypatch.setattr(Sampler, "_prefill", counting)
    least, most = limits("snapkv", evict_every)
    read.clear()
    assert sample("snapkv", evict_every, (least + most) // 2).rows < sum(SIZES)
    assert read == [len(p) for p in make_prompts()]


def test_equal_prompts_are_one_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = RolloutEngine(shared_model(), None, make_evictor("snapkv"))
    twice = engine.generate([make_prompts()[0]] * 2, 2, 6, stop_token_ids=[])
    once = engine.generate([make_prompts()[0]], 4, 6, stop_token_ids=[])
    assert_same(twice, once)
    assert twice.kv_bytes_peak == once.kv_bytes_peak


def test_rows_that_are_free_cost_no_computing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Finished sequences leave: the rows of a step are never more than twice those that sample."""
    rows: list[tuple[int, int]] = []
    original = Sampler._step

    def looking(self: Sampler) -> None:
        rows.append((self.in_use, len(self.seated)))
        original(self)

    monkeypatch.setattr(Sampler, "_step", looking)
    assert_same(sample(), sample(limit=limits()[1] // 2))
    assert all(seated <= in_use <= 2 * seated for in_use, seated in rows)
    assert {in_use for in_use, _ in rows} > {13, rows[-1][0]} and rows[-1][0] < 4


@SCHEDULES
def test_a_device_that_is_looked_at_now_and_then(
    evict_every: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that have stopped go on until somebody looks; nothing of it is kept."""
    at_once = sample(evict_every=evict_every)
    init = Sampler.__post_init__

    def rarely(self: Sampler) -> None:
        init(self)
        self.look_every = 7

    monkeypatch.setattr(Sampler, "__post_init__", rarely)
    for limit in (None, limits("snapkv", evict_every)[0] * 2):
        assert_same(sample(evict_every=evict_every, limit=limit), at_once)


def test_compiling_is_chosen_where_it_pays() -> None:
    engine = RolloutEngine(make_model(), None, make_evictor("snapkv"))
    assert engine.compile == "auto" and not engine._compiles(10_000)
    engine.compile = True
    assert engine._compiles(1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kv_memory_limit": 0}, "kv_memory_limit=0 must be a positive number of bytes"),
        ({"compile": "sometimes"}, "compile='sometimes' must be True, False or 'auto'"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RolloutEngine(make_model(), None, make_evictor("snapkv"), **settings)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
