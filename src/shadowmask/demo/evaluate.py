"""Held-out accuracy: greedy completions under an evictor, scored by the task's own reward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowmask.eviction import Evictor
from shadowmask.rollout import RolloutEngine

BATCH = 32  # prompts that decode together


@dataclass(frozen=True)
class Accuracy:
    """Mean reward of greedy completions, with the standard error over prompts."""

    mean: float
    standard_error: float
    prompts: int

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.standard_error:.3f}"


def greedy_accuracy(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: Sequence[dict[str, Any]],
    reward: Callable[..., Sequence[float | None]],
    evictor: Evictor,
    evict_every: int | None,
    max_new_tokens: int,
) -> Accuracy:
    """Answer every row greedily with this evictor's cache and average the reward.

    Args:
        rows: with a ``prompt`` (text or chat messages) and the columns that ``reward`` takes.
        reward: in TRL's signature; completions for which it returns ``None`` are left out.

    Raises:
        ValueError: no rows, or a reward of another length than the completions.
    """
    if not rows:
        raise ValueError("there are no held-out rows to evaluate on")
    engine = RolloutEngine(model, tokenizer, evictor, evict_every)
    training = model.training
    model.eval()
    rewards: list[float] = []
    try:
        for start in range(0, len(rows), BATCH):
            part = rows[start : start + BATCH]
            prompts = [encode_prompt(tokenizer, row["prompt"]) for row in part]
            batch = engine.generate(prompts, max_new_tokens=max_new_tokens, temperature=0.0)
            texts = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
            completions = [
                text if isinstance(row["prompt"], str) else [{"role": "assistant", "content": text}]
                for text, row in zip(texts, part, strict=True)
            ]
            columns = {name: [row[name] for row in part] for name in part[0] if name != "prompt"}
            scores = reward(
                prompts=[row["prompt"] for row in part],
                completions=completions,
                completion_ids=batch.completion_ids,
                **columns,
            )
            if len(scores) != len(part):
                raise ValueError(f"the reward returned {len(scores)} values for {len(part)} completions")
            rewards += [score for score in scores if score is not None]
    finally:
        model.train(training)
    if not rewards:
        raise ValueError("the reward left out every held-out completion")
    values = torch.tensor(rewards, dtype=torch.float64)
    spread = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
    return Accuracy(float(values.mean()), spread, len(values))


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("the prompts are chat messages, but this tokenizer has no chat template")
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
