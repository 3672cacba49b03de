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
    reward: Callable[..., Sequence[float]],
    evictor: Evictor,
    evict_every: int | None,
    max_new_tokens: int,
) -> Accuracy:
    """Answer every row greedily with this evictor's cache and average the reward.

    Args:
        rows: with a string ``prompt`` and the columns that ``reward`` takes.
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
            batch = engine.generate(
                [row["prompt"] for row in part], max_new_tokens=max_new_tokens, temperature=0.0
            )
            completions = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
            columns = {name: [row[name] for row in part] for name in part[0] if name != "prompt"}
            rewards += reward(completions=completions, **columns)
    finally:
        model.train(training)
    scores = torch.tensor(rewards, dtype=torch.float64)
    spread = float(scores.std() / len(scores) ** 0.5) if len(scores) > 1 else 0.0
    return Accuracy(float(scores.mean()), spread, len(scores))
