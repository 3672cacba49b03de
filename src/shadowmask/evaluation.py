"""Answers to held-out prompts under any evictor: what each scores, and what its keys and values weigh.

Items keep their order and their prompts, and sampling is seeded by the prompt itself, so two evaluations
of the same items are paired whatever their evictors, batch sizes and memory limits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from shadowmask.record import ShadowMask
from shadowmask.rollout import RolloutBatch, RolloutEngine

BATCH = 32  # prompts that are handed to the engine together

Scores = Sequence[float | None]
Score = Callable[..., Scores | Mapping[str, Scores]]
"""A reward in TRL's signature, or a function that returns several of them by name."""
Progress = Callable[[int, int], None]
"""Called after every batch with the items done and the items in all."""


@dataclass(frozen=True)
class Answer:
    """One item's completion, what it scored, and the bytes of its keys and values."""

    completion: str
    completion_ids: list[int]
    prompt_tokens: int
    scores: dict[str, float | None]  # by the name of the measure; None = the reward abstained
    kv_bytes: int  # most that its own keys and values take while it decodes, all layers
    kv_bytes_dense: int  # the same with nothing evicted


@dataclass(frozen=True)
class Evaluation:
    """The answers to all items, in the order of the items."""

    answers: list[Answer]
    kv_bytes_peak: int  # most that was allocated at one time, for `rows` sequences together
    rows: int  # sequences that decoded at one time

    def scores(self, measure: str = "reward") -> list[float | None]:
        """One measure of every item."""
        return [answer.scores[measure] for answer in self.answers]


def evaluate(
    engine: RolloutEngine,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Mapping[str, Any]],
    score: Score,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    seed: int = 0,
    batch_size: int = BATCH,
    progress: Progress | None = None,
) -> Evaluation:
    """Answer every item once with the engine's evictor and score the answers.

    Args:
        items: with a ``prompt`` (text or chat messages) and the columns that ``score`` takes.
        score: called with ``prompts``, ``completions``, ``completion_ids`` and the items' columns. Without
            names its values are called ``reward``.
        temperature: 0 is greedy.
        batch_size: prompts that decode together, unless the engine's ``kv_memory_limit`` lets some wait.

    Raises:
        ValueError: no items, or a score of another length than the completions.
    """
    if not items:
        raise ValueError("there are no held-out rows to evaluate on")
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size} must be at least 1")
    answers: list[Answer] = []
    peak = rows = 0
    training = engine.model.training
    engine.model.eval()
    try:
        layer_bytes = engine.bytes_of_layer()
        for start in range(0, len(items), batch_size):
            part = items[start : start + batch_size]
            prompts = [encode_prompt(tokenizer, item["prompt"]) for item in part]
            batch = engine.generate(
                prompts, max_new_tokens=max_new_tokens, temperature=temperature, seed=seed
            )
            answers += _answers(batch, tokenizer, part, score, layer_bytes)
            peak, rows = max(peak, batch.kv_bytes_peak), max(rows, batch.rows)
            if progress:
                progress(len(answers), len(items))
    finally:
        engine.model.train(training)
    return Evaluation(answers, peak, rows)


def _answers(
    batch: RolloutBatch,
    tokenizer: PreTrainedTokenizerBase,
    items: Sequence[Mapping[str, Any]],
    score: Score,
    layer_bytes: Sequence[int],
) -> list[Answer]:
    texts = tokenizer.batch_decode(batch.completion_ids, skip_special_tokens=True)
    scores = _scores(score, items, texts, batch.completion_ids)
    return [
        Answer(
            completion=text,
            completion_ids=ids,
            prompt_tokens=len(prompt),
            scores={name: values[n] for name, values in scores.items()},
            kv_bytes=held_bytes(batch.shadow[n], layer_bytes),
            kv_bytes_dense=held_bytes(ShadowMask.dense([prompt], [ids]), layer_bytes),
        )
        for n, (text, ids, prompt) in enumerate(
            zip(texts, batch.completion_ids, batch.prompts_per_completion, strict=True)
        )
    ]


def _scores(
    score: Score, items: Sequence[Mapping[str, Any]], texts: Sequence[str], ids: list[list[int]]
) -> dict[str, list[float | None]]:
    completions = [
        text if isinstance(item["prompt"], str) else [{"role": "assistant", "content": text}]
        for text, item in zip(texts, items, strict=True)
    ]
    columns = {name: [item[name] for item in items] for name in items[0] if name != "prompt"}
    prompts = [item["prompt"] for item in items]
    scores = score(prompts=prompts, completions=completions, completion_ids=ids, **columns)
    named = scores if isinstance(scores, Mapping) else {"reward": scores}
    for name, values in named.items():
        if len(values) != len(items):
            raise ValueError(f"the {name} returned {len(values)} values for {len(items)} completions")
        for value in values:
            if value is not None and not math.isfinite(value):
                raise ValueError(f"the {name} returned {value} for a completion")
    return {name: [None if v is None else float(v) for v in values] for name, values in named.items()}


def held_bytes(record: ShadowMask, layer_bytes: Sequence[int]) -> int:
    """Most bytes that one sequence's keys and values take while it decodes.

    Counted from the record: the keys that its decoding queries had in the cache, those outside a sliding
    window included. The full prompt of one layer, which exists while the prompt is read, is not.

    Args:
        layer_bytes: keys and values of one token, layer by layer.
    """
    held = held_keys(record)  # layers or 1
    of_layer = torch.tensor(layer_bytes, dtype=torch.float64, device=held.device)
    return round(float((held * of_layer[:, None]).sum(dim=0).max()))


def held_keys(record: ShadowMask) -> Tensor:
    """Keys in the cache at every query after the prompt, mean of the KV heads: ``[layers or 1, queries]``.

    A completion of one token is never decoded on; its entry is what stays for the next query.
    """
    prompt, length = record.prompt_lengths[0], record.lengths[0]
    queries = torch.arange(prompt, max(length - 1, prompt + 1))
    gone = record.evicted_at.cpu().long().flatten(0, 1).sort(dim=-1).values
    evicted: Int[Tensor, "entries queries"] = torch.searchsorted(
        gone, queries.expand(gone.shape[0], -1).contiguous(), right=True
    )
    held = queries + 1 - evicted
    return held.view(record.num_layers, record.num_kv_heads, -1).double().mean(dim=1)


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: str | list[dict[str, Any]]) -> list[int]:
    """Token ids of a prompt: text as it is, chat messages through the tokenizer's template."""
    if isinstance(prompt, str):
        return tokenizer(prompt)["input_ids"]
    if tokenizer.chat_template is None:
        raise ValueError("the prompts are chat messages, but this tokenizer has no chat template")
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return tokenizer(text, add_special_tokens=False)["input_ids"]
