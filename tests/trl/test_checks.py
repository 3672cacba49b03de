"""Settings that cannot be replayed and bad input are refused, each in one clear line."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from shadowmask import UnsupportedModelError
from shadowmask.trl.checks import checked_rewards, refuse_unsupported
from tiny_models import make_model
from tiny_trl import letters, make_config, make_trainer

REFUSED: list[dict[str, Any]] = [
    {"top_k": 20},
    {"top_p": 0.9},
    {"min_p": 0.1},
    {"repetition_penalty": 1.1},
    {"temperature": 0.0},
    {"use_transformers_continuous_batching": True},
    {"generation_kwargs": {"top_k": 5}},
    {"cache_implementation": "static"},
]


@pytest.mark.parametrize("setting", REFUSED, ids=lambda setting: next(iter(setting)))
def test_settings_that_cannot_be_replayed_are_refused(setting: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=next(iter(setting))) as caught:
        make_trainer(tmp_path, **setting)
    assert "\n" not in str(caught.value)


def test_vllm_is_refused_before_it_is_looked_for(tmp_path: Path) -> None:
    config = make_config(tmp_path)
    config.use_vllm = True
    with pytest.raises(ValueError, match="use_vllm=True: rollouts are made by shadowmask's own engine"):
        refuse_unsupported(config, {})


@pytest.mark.parametrize("option", ["rollout_func", "tools", "environment_factory"])
def test_multi_turn_options_are_refused(option: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=f"{option} is not supported"):
        make_trainer(tmp_path, options={option: [lambda: None] if option == "tools" else lambda: None})


def test_neutral_values_are_accepted(tmp_path: Path) -> None:
    neutral = {"top_k": 0, "top_p": 1.0, "min_p": None, "repetition_penalty": 1.0}
    refuse_unsupported(make_config(tmp_path, **neutral), {"tools": None, "rollout_func": None})


def test_an_empty_dataset_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="train_dataset is empty"):
        make_trainer(tmp_path, options={"train_dataset": Dataset.from_dict({"prompt": []})})


BAD_REWARDS = {
    "too few": (lambda completions, **_: [0.0] * (len(completions) - 1), "returned 7 values for 8"),
    "too many": (lambda completions, **_: [0.0] * (len(completions) + 1), "returned 9 values for 8"),
    "nan": (lambda completions, **_: [0.0] * 7 + [math.nan], "returned nan for completion 7"),
    "infinite": (lambda completions, **_: [math.inf] + [0.0] * 7, "returned inf for completion 0"),
}


@pytest.mark.parametrize("kind", BAD_REWARDS)
def test_a_bad_reward_names_the_function(kind: str, tmp_path: Path) -> None:
    function, message = BAD_REWARDS[kind]
    function.__name__ = "my_reward"
    with pytest.raises(ValueError, match=f"'my_reward' {message}"):
        make_trainer(tmp_path, reward=[letters, function]).train()


def test_a_bad_asynchronous_reward_is_named_too(tmp_path: Path) -> None:
    async def slow_reward(completions: list[str], **_: Any) -> list[float]:
        return [math.nan] * len(completions)

    with pytest.raises(ValueError, match="'slow_reward' returned nan"):
        make_trainer(tmp_path, reward=slow_reward).train()


def test_none_leaves_a_completion_out() -> None:
    function = checked_rewards(lambda completions, **_: [None, 1.0])
    assert function(completions=["a", "b"]) == [None, 1.0]


def test_checked_rewards_keep_name_and_form() -> None:
    assert checked_rewards(letters).__name__ == "letters"
    assert [f.__name__ for f in checked_rewards([letters])] == ["letters"]
    assert checked_rewards("some/reward-model") == "some/reward-model"


def test_an_unsupported_model_is_refused_at_construction(tmp_path: Path) -> None:
    config = GPT2Config(vocab_size=64, n_embd=32, n_layer=1, n_head=2, attn_pdrop=0.1, eos_token_id=1)
    with pytest.raises(UnsupportedModelError, match="GPT2LMHeadModel is not supported"):
        make_trainer(tmp_path, GPT2LMHeadModel(config))


CONFIG_ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"evictor": "snapvk"}, "Did you mean 'snapkv'"),
    ({"budget": 5}, "below num_sinks=2"),
    ({"budget": None, "compression_ratio": 1.0}, r"outside \[0, 1\)"),
    ({"budget": None, "compression_ratio": -0.1}, r"outside \[0, 1\)"),
    ({"compression_ratio": 0.5}, "exactly one of budget and compression_ratio"),
    ({"evictor_kwargs": "{not json"}, "is not JSON"),
    ({"evictor_kwargs": {"windw": 3}}, "does not take these settings"),
    ({"parity_action": "warn"}, "must be one of raise, log"),
    ({"distill_coef": -0.1}, "must not be negative"),
    ({"evict_every": 0}, "must be at least 1"),
    ({"evictor": "dense", "budget": 8}, "evicts nothing"),
]


@pytest.mark.parametrize(("settings", "message"), CONFIG_ERRORS, ids=lambda value: str(value)[:40])
def test_wrong_settings_fail_in_the_config(settings: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        make_config(tmp_path, **settings)


def test_half_of_the_prompt_is_evicted_by_default(tmp_path: Path) -> None:
    evictor = make_config(tmp_path, budget=None).make_evictor()
    assert evictor.compression_ratio == 0.5 and evictor.budget_for(100) == 50
    as_text = '{"num_sinks": 3, "observation_window": 4}'
    assert make_config(tmp_path, evictor_kwargs=as_text).make_evictor().num_sinks == 3


def test_a_float64_model_stays_float64(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(dtype=torch.float64), max_steps=1)
    trainer.train()
    assert next(trainer.model.parameters()).dtype == torch.float64
