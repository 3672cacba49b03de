"""The pocket models: a recipe that repeats, learns, and says so when it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shadowmask.demo.evaluate import greedy_accuracy
from shadowmask.demo.model import load_saved
from shadowmask.demo.pocket import (
    PocketError,
    PocketRecipe,
    encode,
    exact_share,
    make_model,
    make_tokenizer,
    pocket_model_path,
    pretrain,
)
from shadowmask.eviction import get_evictor
from shadowmask.tasks.chain import ChainTask
from shadowmask.tasks.recall import RecallTask

SMALL = PocketRecipe(
    hidden_size=32,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    intermediate_size=48,
    max_steps=12,
    batch_size=8,
    check_every=4,
    check_rows=16,
    stop_at=0.0,
)
TASK = ChainTask(num_facts=4, num_hops=2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SHADOWMASK_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def test_a_model_is_built_once_and_remembers_how(cache: Path) -> None:
    seen: list[int] = []
    path = pocket_model_path(TASK, SMALL, lambda step, loss, accuracy: seen.append(step))
    assert seen == [4], "stop_at is reached at the first check"
    assert pocket_model_path(TASK, SMALL, lambda *_: seen.append(-1)) == path and seen == [4]
    stored = json.loads((path / "pocket.json").read_text())
    assert stored["task"]["num_facts"] == 4 and stored["history"][0]["step"] == 4
    other = pocket_model_path(TASK, replace(SMALL, seed=1))
    assert other != path


def test_a_recipe_gives_the_same_weights_twice() -> None:
    tokenizer = make_tokenizer(TASK)
    models = []
    for _ in range(2):
        model = make_model(len(tokenizer), tokenizer, SMALL)
        pretrain(model, tokenizer, TASK, SMALL)
        models.append(model)
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.equal(a, b)


def test_not_learning_is_an_error_that_says_how_far_it_came() -> None:
    with pytest.raises(PocketError, match=r"max_steps=12, below stop_at=0\.9"):
        pocket_model_path(TASK, replace(SMALL, stop_at=0.9))


@pytest.mark.parametrize("task", [TASK, RecallTask(num_facts=3, num_fillers=0)])
def test_the_tokenizer_reads_and_writes_what_the_task_does(task: ChainTask | RecallTask) -> None:
    tokenizer = make_tokenizer(task)
    for row in task.dataset("eval", 5, seed=7):
        text = row["prompt"] + task.target(row)
        ids = tokenizer(text)["input_ids"]
        assert tokenizer.decode(ids) == text
        assert tokenizer.pad_token_id not in ids
        answer = [*tokenizer(task.target(row))["input_ids"], tokenizer.eos_token_id]
        written = tokenizer.decode(answer, skip_special_tokens=True)
        assert task.reward([written], [row["answer"]]) == [1.0]


def test_the_measured_share_is_what_greedy_decoding_gets() -> None:
    tokenizer = make_tokenizer(TASK)
    model = make_model(len(tokenizer), tokenizer, SMALL)
    pretrain(model, tokenizer, TASK, SMALL)
    rows = TASK.dataset("eval", 24, seed=5)
    share = exact_share(model, *encode(tokenizer, TASK, rows))
    found = greedy_accuracy(model, tokenizer, rows, TASK.reward, get_evictor("dense"), None, 3)
    assert found.mean == pytest.approx(share)


def test_a_saved_model_loads_with_its_tokenizer() -> None:
    model, tokenizer = load_saved(pocket_model_path(TASK, SMALL), torch.float32)
    assert model.config.vocab_size == len(tokenizer) and tokenizer.eos_token == "<eos>"
