"""A tiny model with a character tokenizer in a folder, data and a reward: what a user would bring."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from tiny_trl import make_tokenizer


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture
def workplace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty directory with data and a reward module, entered as a user would."""
    rows = [{"prompt": "ABCDEFGH" * 3 + "X" * n, "answer": "A"} for n in range(12)]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "tiny_rewards.py").write_text(
        "def count(completions, answer, **kwargs):\n"
        "    return [float(text.count(a)) for text, a in zip(completions, answer)]\n"
        "def short(completions, **kwargs):\n"
        "    return [0.0]\n"
        "def nan(completions, **kwargs):\n"
        "    return [float('nan')] * len(completions)\n"
        "def nothing(completions, **kwargs):\n"
        "    pass\n"
        "def words(completions, **kwargs):\n"
        "    return ['x'] * len(completions)\n"
        "def broken(completions, **kwargs):\n"
        "    raise ValueError('cannot score this')\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def settings(model_folder: Path) -> list[str]:
    """Flags of a training run of a second or two that evicts several times per completion."""
    return [
        *("--model_name_or_path", str(model_folder), "--dataset", "data.jsonl"),
        *("--reward", "tiny_rewards:count", "--output_dir", "run", "--max_steps", "3"),
        *("--per_device_train_batch_size", "8", "--num_generations", "4"),
        *("--max_completion_length", "12", "--evict_every", "4", "--learning_rate", "1e-3"),
        *("--evictor_kwargs", '{"observation_window": 4, "num_sinks": 2}'),
        *("--bf16", "false", "--logging_steps", "1", "--save_steps", "1", "--seed", "3"),
    ]
