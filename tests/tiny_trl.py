"""Tiny trainers: a two-layer model, a character tokenizer, a reward that counts letters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from shadowmask.trl import SMDConfig, SMDTrainer
from tiny_models import make_model

MAX_COMPLETION = 16
GROUP = 4


def make_tokenizer() -> PreTrainedTokenizerFast:
    """64 tokens: padding, EOS (id 1, as the models have it) and one per character from space to ]."""
    characters = ["<pad>", "<eos>"] + [chr(code) for code in range(32, 94)]
    vocabulary = {character: n for n, character in enumerate(characters)}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_dataset(rows: int = 12) -> Dataset:
    """Ragged prompts, longer and shorter than the budget."""
    return Dataset.from_dict({"prompt": ["ABCDEFGH" * (1 + n % 3) + "X" * (n // 3) for n in range(rows)]})


def letters(completions: list[str], **_: Any) -> list[float]:
    """Rewards vary within every group, so no advantage is zero throughout."""
    return [sum(ord(c) % 7 for c in completion) / 20 for completion in completions]


def make_config(folder: Path, **settings: Any) -> SMDConfig:
    defaults: dict[str, Any] = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 8,
        "num_generations": GROUP,
        "max_completion_length": MAX_COMPLETION,
        "max_steps": 3,
        "learning_rate": 1e-3,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "budget": 10,
        "evict_every": 5,
        "evictor_kwargs": {"observation_window": 4, "num_sinks": 2},
        "gradient_checkpointing": False,
        "dataloader_pin_memory": False,
    }
    if settings.get("evictor", "snapkv") != "snapkv":
        defaults["evictor_kwargs"] = {"num_sinks": 2, "recent_window": 4}
    if settings.get("evictor") == "dense":
        defaults |= {"budget": None, "evict_every": None, "evictor_kwargs": None}
    return SMDConfig(**defaults | settings)


def make_trainer(
    folder: Path,
    model: PreTrainedModel | str | None = None,
    reward: Callable[..., list[float]] | list[Callable[..., list[float]]] = letters,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> SMDTrainer:
    model = make_model(dtype=torch.float32) if model is None else model
    arguments = {"train_dataset": make_dataset(), "processing_class": make_tokenizer()} | (options or {})
    return SMDTrainer(model, reward, make_config(folder, **settings), **arguments)


def saved_model(folder: Path, family: str = "llama-gqa") -> str:
    """A model on disk, for what TRL loads by name (the reference model, when beta is positive)."""
    make_model(family, torch.float32).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return str(folder)


def history(trainer: SMDTrainer, key: str) -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def gradient(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
