"""Held-out accuracy before and after a run: greedy answers under an evictor, in one number."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowmask.evaluation import Score, evaluate
from shadowmask.eviction import Evictor
from shadowmask.rollout import RolloutEngine


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
    reward: Score,
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
    engine = RolloutEngine(model, tokenizer, evictor, evict_every)
    done = evaluate(engine, tokenizer, rows, reward, max_new_tokens=max_new_tokens)
    rewards = [score for score in done.scores() if score is not None]
    if not rewards:
        raise ValueError("the reward left out every held-out completion")
    values = torch.tensor(rewards, dtype=torch.float64)
    spread = float(values.std() / len(values) ** 0.5) if len(values) > 1 else 0.0
    return Accuracy(float(values.mean()), spread, len(values))
