"""The learner's view of rollouts: both tracks, packed, log-probabilities with gradient.

shadow track   pi(y | x, M): the record replayed                         (gradient)
dense track    pi(y | x):    same weights, full context, the teacher      (no gradient)
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor, nn

from shadowmask.attention.interface import run_decoder
from shadowmask.attention.replay import ReplaySession, TeacherSession
from shadowmask.head import TokenStats, token_stats
from shadowmask.models import decoder, num_layers, output_head
from shadowmask.packing import PackedBatch, pack
from shadowmask.record import RecordError, ShadowMask
from shadowmask.rollout import RolloutBatch

Probe = Callable[[Tensor, Tensor], None]
"""Called in the backward pass with the last hidden states of the scored rows and their gradient."""


def score_packed(
    model: nn.Module,
    packed: PackedBatch,
    shadow: ShadowMask,
    temperature: float = 1.0,
    teacher: bool | nn.Module = False,
    probe: Probe | None = None,
) -> TokenStats:
    """Score every completion token under the shadow track, and under the dense one if asked.

    Args:
        model: prepared by ``prepare_model``.
        shadow: entry ``n`` belongs to completion ``n`` of the pack; tokens are *not* checked here.
        temperature: what the sampler divided its logits by.
        teacher: add the dense track: forward KL(dense || shadow) over the whole vocabulary and the
            dense log-probabilities, both without gradient into the dense side. ``True``: by the same
            weights; a model of the same architecture: by its weights.
        probe: sees ``(hidden, gradient)``, both ``[targets, hidden]``, when the backward pass gets there.
    """
    if len(shadow) != len(packed.completion_lengths):
        raise RecordError(
            f"the record has {len(shadow)} entries for {len(packed.completion_lengths)} completions"
        )
    own_teacher = teacher is True
    session = ReplaySession(packed, shadow, remember_prompts=own_teacher)
    layers = num_layers(model)
    # KV heads are checked where a layer attends: its config may tell another number (JetMoe)
    shadow.check_model(layers, session.num_kv_heads_recorded)
    hidden = run_decoder(decoder(model), packed.input_ids, packed.position_ids, session, layers)[0]
    teacher_hidden = teacher_head = None
    if own_teacher:
        teacher_hidden = _teacher_hidden(model, packed, session, hidden)
    elif isinstance(teacher, nn.Module):
        teacher_hidden, teacher_head = _dense_hidden(teacher, packed), output_head(teacher)
    # index_select, not indexing: its gradient is summed in one order, so that runs repeat exactly
    rows = hidden.index_select(0, packed.target_rows)
    if probe is not None and rows.requires_grad:
        values = rows.detach()
        rows.register_hook(lambda gradient: probe(values, gradient))
    return token_stats(
        rows,
        packed.targets,
        output_head(model),
        temperature,
        None if teacher_hidden is None else teacher_hidden[packed.target_rows],
        teacher_head,
    )


@torch.no_grad()
def _teacher_hidden(
    model: nn.Module, packed: PackedBatch, session: ReplaySession, hidden: Tensor
) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of the dense track. Prompt rows are the shadow track's own if those were dense."""
    layers = num_layers(model)
    if not session.dense_prompt_rows:
        return _dense_hidden(model, packed)
    rows = packed.completion_token_rows()
    combined = hidden.detach().clone()
    if len(rows):
        combined[rows] = run_decoder(
            decoder(model),
            packed.input_ids[:, rows],
            packed.position_ids[:, rows],
            TeacherSession(packed, session.take_prompts()),
            layers,
        )[0].to(combined.dtype)
    return combined


@torch.no_grad()
def _dense_hidden(model: nn.Module, packed: PackedBatch) -> Float[Tensor, "tokens hidden"]:
    """Hidden states of a model that sees everything."""
    dense = ReplaySession(packed, _never_evicted(packed))
    return run_decoder(decoder(model), packed.input_ids, packed.position_ids, dense, num_layers(model))[0]


def _never_evicted(packed: PackedBatch) -> ShadowMask:
    prompts: list[list[int]] = [[]] * len(packed.completion_lengths)
    for group in packed.groups:
        for n in group.members:
            prompts[n] = [0] * group.prompt_length
    return ShadowMask.dense(prompts, [[0] * length for length in packed.completion_lengths])


def shadow_stats(model: nn.Module, batch: RolloutBatch, teacher: bool = False) -> TokenStats:
    """``score_packed`` on a whole rollout batch, after checking that the record is of its tokens."""
    if batch.shadow is None:
        raise RecordError("the rollout batch has no shadow mask: it cannot be replayed")
    prompts = batch.prompts_per_completion
    batch.shadow.check_tokens(prompts, batch.completion_ids)
    packed = pack(prompts, batch.completion_ids, next(model.parameters()).device)
    return score_packed(model, packed, batch.shadow, batch.temperature, teacher)


def shadow_logprobs(model: nn.Module, batch: RolloutBatch) -> list[Float[Tensor, " _completion"]]:
    """Log-probabilities of the sampled tokens with the shadow mask replayed, with gradient.

    One tensor per completion, aligned with ``batch.sparse_logprobs`` and equal to it up to
    floating point: the learner's policy is the sampler's policy.

    Raises:
        RecordError: the record is missing or belongs to other tokens or another model.
    """
    stats = shadow_stats(model, batch)
    return list(stats.logprobs.split([len(c) for c in batch.completion_ids]))


def dense_logprobs(model: nn.Module, batch: RolloutBatch) -> list[Float[Tensor, " _completion"]]:
    """Log-probabilities of the sampled tokens under the full context (the naive learner's), with gradient."""
    prompts = batch.prompts_per_completion
    packed = pack(prompts, batch.completion_ids, next(model.parameters()).device)
    dense = ShadowMask.dense(prompts, batch.completion_ids)
    stats = score_packed(model, packed, dense, batch.temperature)
    return list(stats.logprobs.split([len(c) for c in batch.completion_ids]))
