"""From rollouts to samples: scored under both tracks, in text, with what restoring lost tokens would do."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from shadowmask.metrics import check_parity, sampling_gap
from shadowmask.packing import pack
from shadowmask.record import NEVER, ShadowMask
from shadowmask.report.sample import Restored, Sample
from shadowmask.rollout import RolloutBatch
from shadowmask.scoring import score_packed

ENTRIES_AT_ONCE = 2**25  # of the variants' records: 128 MB
TOKENS_AT_ONCE = 8192
SENTENCE_ENDS = (".", "!", "?", "\n", "。", "\uff01", "\uff1f")


@torch.no_grad()
def make_samples(
    model: nn.Module,
    tokenizer: Any,
    batch: RolloutBatch,
    rows: Sequence[int],
    titles: Sequence[str],
    facts: Mapping[str, str],
    rewards: Sequence[float | None] | None = None,
) -> list[Sample]:
    """Score some completions of a rollout under the shadow and the dense track.

    Args:
        model: prepared, with the weights that sampled.
        rows: indices of the completions.
        rewards: of these rows, in the same order.
    """
    prompts = [batch.prompts_per_completion[row] for row in rows]
    completions = [batch.completion_ids[row] for row in rows]
    shadow = batch.shadow[list(rows)]
    stats = score(model, prompts, completions, shadow, batch.temperature)
    columns = [part.split([len(c) for c in completions]) for part in stats]
    return [
        Sample(
            title=titles[n],
            token_ids=[*prompts[n], *completions[n]],
            pieces=[*token_pieces(tokenizer, prompts[n]), *token_pieces(tokenizer, completions[n])],
            prompt_length=len(prompts[n]),
            evicted_at=shadow[n].evicted_at.cpu(),
            sparse_logprobs=batch.sparse_logprobs[row].cpu().float(),
            shadow_logprobs=columns[0][n],
            dense_logprobs=columns[1][n],
            kl=columns[2][n],
            temperature=batch.temperature,
            reward=None if rewards is None else rewards[n],
            facts=dict(facts),
        )
        for n, row in enumerate(rows)
    ]


@torch.no_grad()
def rescore(model: nn.Module, sample: Sample) -> Sample:
    """The sample scored again by this model, after checking that the model is the one that sampled it.

    Raises:
        RecordError: the model has other layers or KV heads.
        ParityError: its log-probabilities are not those that the sampler recorded.
    """
    logprobs, dense, kl = score(
        model, [sample.prompt_ids], [sample.completion_ids], sample.shadow, sample.temperature
    )
    check_parity(sampling_gap(sample.sparse_logprobs, logprobs), next(model.parameters()).dtype)
    return dataclasses.replace(sample, shadow_logprobs=logprobs, dense_logprobs=dense, kl=kl)


@torch.no_grad()
def restore(model: nn.Module, sample: Sample, most: int) -> Sample:
    """Add what giving back each evicted span of the prompt would change, for at most ``most`` spans.

    Every span is a variant of the record in which its tokens are never evicted. The variants share one
    prompt, so they are scored like a group of completions.
    """
    lost = (sample.evicted_at < len(sample.token_ids)).any(dim=0).any(dim=0)
    spans = [
        span
        for span in split_spans(sample.pieces[: sample.prompt_length], most)
        if bool(lost[slice(*span)].any())
    ]
    if not spans:
        return sample
    answers = max(len(sample.completion_ids), 1)
    at_once = max(min(ENTRIES_AT_ONCE // sample.evicted_at.numel(), TOKENS_AT_ONCE // answers), 1)
    parts = []
    for start in range(0, len(spans), at_once):
        entries = []
        for first, last in spans[start : start + at_once]:
            entry = sample.evicted_at.clone()
            entry[..., first:last] = NEVER
            entries.append(entry)
        prompts, completions = [sample.prompt_ids] * len(entries), [sample.completion_ids] * len(entries)
        shadow = ShadowMask.from_entries(entries, prompts, completions)
        kl = score(model, prompts, completions, shadow, sample.temperature)[2]
        parts.append(sample.kl - kl.reshape(len(entries), -1))
    return dataclasses.replace(sample, restored=Restored(spans, torch.cat(parts)))


def score(
    model: nn.Module,
    prompts: list[list[int]],
    completions: list[list[int]],
    shadow: ShadowMask,
    temperature: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities under the shadow and the dense track, and the KL, as float32 on the CPU."""
    packed = pack(prompts, completions, next(model.parameters()).device)
    stats = score_packed(model, packed, shadow, temperature, teacher=True)
    assert stats.kl is not None and stats.teacher_logprobs is not None
    shadow_logprobs, dense, kl = (x.cpu().float() for x in (stats.logprobs, stats.teacher_logprobs, stats.kl))
    return shadow_logprobs, dense, kl


def split_spans(pieces: Sequence[str], most: int) -> list[tuple[int, int]]:
    """Cut a text into at most ``most`` spans (start, end) that end with a sentence where they can."""
    target = -(-len(pieces) // most)
    spans, start = [], 0
    for k, piece in enumerate(pieces):
        long_enough = k + 1 - start >= max(target, 2)
        ends = piece.rstrip(" ").endswith(SENTENCE_ENDS) if piece.strip(" ") else False
        if (long_enough and ends) or k + 1 - start >= 3 * max(target, 4):
            spans.append((start, k + 1))
            start = k + 1
    if start < len(pieces):
        spans.append((start, len(pieces)))
    return spans


def token_pieces(tokenizer: Any, ids: Sequence[int]) -> list[str]:
    """The text that each token adds; joined, the text of them all.

    A token that ends inside a character adds nothing, the one that ends it adds all of it. Tokens are
    decoded behind their predecessors: some tokenizers drop the space in front of a lone token.
    """
    pieces: list[str] = []
    before: list[int] = []  # tokens of the last complete piece
    pending: list[int] = []
    for token in ids:
        pending.append(token)
        known, text = (_decode(tokenizer, part) for part in (before, before + pending))
        piece = text[len(known) :] if text.startswith(known) else _decode(tokenizer, pending)
        if piece.endswith("\ufffd") and len(pending) < 4:
            pieces.append("")
            continue
        pieces.append(piece)
        before, pending = pending, []
    if pending:
        pieces[-1] = _decode(tokenizer, pending)
    return pieces


def _decode(tokenizer: Any, ids: Sequence[int]) -> str:
    return tokenizer.decode(list(ids), clean_up_tokenization_spaces=False) if ids else ""
