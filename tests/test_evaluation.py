"""``evaluate``: paired items whatever the batching, true bytes, and scores that cannot be misread."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from shadowmask import RolloutEngine, ShadowMask
from shadowmask.evaluation import Evaluation, evaluate, held_bytes, held_keys
from shadowmask.record import NEVER
from tiny_models import make_evictor, shared_model
from tiny_trl import make_tokenizer

ITEMS = [{"prompt": "ABCDEFGH" * (1 + n % 3) + "X" * n, "answer": "AB"[n % 2]} for n in range(7)]
TOKEN_BYTES = [2 * 2 * 16 * 8] * 2  # keys and values x 2 KV heads x head_dim 16 x float64, two layers


def letters(completions: list[str], answer: list[str], **_: Any) -> list[float | None]:
    return [float(text.count(letter)) for text, letter in zip(completions, answer, strict=True)]


def answers(evictor: str = "snapkv", evict_every: int | None = None, score=letters, **settings) -> Evaluation:
    limit = settings.pop("kv_memory_limit", None)
    engine = RolloutEngine(shared_model(), make_tokenizer(), make_evictor(evictor), evict_every, limit)
    settings = {"max_new_tokens": 8} | settings
    return evaluate(engine, make_tokenizer(), settings.pop("items", ITEMS), score, **settings)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_answers_depend_neither_on_batches_nor_on_a_memory_limit(temperature: float) -> None:
    whole = answers(temperature=temperature)
    for other in (
        answers(temperature=temperature, batch_size=3),
        answers(temperature=temperature, kv_memory_limit=130_000),
    ):
        assert other.rows < whole.rows == len(ITEMS)
        assert other.answers == whole.answers
    assert answers("recent", temperature=temperature).answers != whole.answers
    if temperature:
        assert answers(temperature=temperature, seed=1).answers != whole.answers


def test_items_keep_their_order_and_their_columns() -> None:
    steps: list[tuple[int, int]] = []
    seen: list[str] = []

    def score(prompts: list[str], answer: list[str], completion_ids: list, **_: Any) -> list[float]:
        seen.extend(prompts)
        assert len(answer) == len(prompts) == len(completion_ids)
        return [float(len(prompt)) for prompt in prompts]

    done = answers(score=score, batch_size=3, progress=lambda *step: steps.append(step))
    assert seen == [item["prompt"] for item in ITEMS]
    assert done.scores() == [len(item["prompt"]) for item in ITEMS]
    assert [answer.prompt_tokens for answer in done.answers] == [len(item["prompt"]) for item in ITEMS]
    assert steps == [(3, 7), (6, 7), (7, 7)]


def test_scores_by_name_and_abstentions() -> None:
    def two(completions: list[str], **_: Any) -> dict[str, list[float | None]]:
        return {"first": [1.0] * len(completions), "second": [None] * len(completions)}

    done = answers(score=two)
    assert done.scores("first") == [1.0] * 7
    assert done.scores("second") == [None] * 7


def test_bytes_are_those_of_the_keys_that_stay() -> None:
    dense, evicted = answers("dense"), answers()
    for a, b in zip(dense.answers, evicted.answers, strict=True):
        held = a.prompt_tokens + max(len(a.completion_ids) - 1, 1)  # the last token is never fed
        assert a.kv_bytes == a.kv_bytes_dense == held * sum(TOKEN_BYTES)
        kept = min(b.prompt_tokens, 12) + max(len(b.completion_ids) - 1, 1)
        assert b.kv_bytes == kept * sum(TOKEN_BYTES)
    assert sum(a.kv_bytes for a in evicted.answers) < sum(a.kv_bytes_dense for a in evicted.answers)
    bounded = answers(evict_every=2, max_new_tokens=16)
    assert max(a.kv_bytes for a in bounded.answers) <= (12 + 2) * sum(TOKEN_BYTES)


def test_held_keys_agree_with_the_mask() -> None:
    evicted_at = torch.tensor([[[NEVER, 4, 6, NEVER, NEVER, 7, NEVER, NEVER]]], dtype=torch.int32)
    record = ShadowMask(evicted_at, (8,), (4,), ("",))
    visible = record.visible(torch.arange(4, 7)).sum(-1)  # queries 4..6; token 7 is never fed
    assert held_keys(record).tolist() == visible.double().mean(1).tolist() == [[4.0, 5.0, 5.0]]
    assert held_bytes(record, [10, 100]) == 550  # one record for both layers, the layers of two sizes


def test_the_model_is_left_in_the_mode_it_was_in() -> None:
    model = shared_model()
    for mode in (True, False):
        model.train(mode)
        answers(items=ITEMS[:1], max_new_tokens=1)
        assert model.training is mode


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"items": []}, "no held-out rows"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"score": lambda **_: [1.0]}, "the reward returned 1 values for 7"),
        ({"score": lambda **_: {"f1": [float("nan")] * 7}}, "the f1 returned nan"),
    ],
)
def test_what_cannot_be_evaluated_is_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        answers(**settings)
