"""GRPO terms and the SMD objective.

    max  E[ L_GRPO(pi(y|x, M)) - lambda KL( sg[pi(y|x)] || pi(y|x, M) ) ]       (SMD, arXiv:2605.06850)

M is the shadow mask. Both tracks share their weights; the dense side carries no gradient. The KL runs
over the whole vocabulary and is averaged over tokens exactly like the policy term, so lambda does not
change its meaning with batch size, accumulation or ``loss_type``. (The paper does not say how it
averages; its public code has no KL.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from shadowmask.metrics import information_gap, sampling_gap
from shadowmask.rollout import RolloutBatch
from shadowmask.scoring import shadow_stats

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


@dataclass(frozen=True)
class SMDLoss:
    """``loss`` has the gradient; the rest is detached, for logging."""

    loss: Float[Tensor, ""]
    policy_loss: Float[Tensor, ""]
    distill_kl: Float[Tensor, ""]
    metrics: dict[str, float]


def group_advantages(
    rewards: Float[Tensor, " completions"],
    group_sizes: Sequence[int],
    scale: str = "group",
) -> Float[Tensor, " completions"]:
    """Reward minus its group's mean, over the standard deviation of its group (GRPO, arXiv:2402.03300).

    Args:
        scale: ``"group"``, ``"batch"`` or ``"none"``: whose standard deviation divides, as in TRL.
    """
    if scale not in ("group", "batch", "none"):
        raise ValueError(f"scale={scale!r}: must be 'group', 'batch' or 'none'")
    if sum(group_sizes) != len(rewards):
        raise ValueError(f"{len(rewards)} rewards for groups of {list(group_sizes)}")
    if not bool(torch.isfinite(rewards).all()):
        raise ValueError(f"rewards contain values that are not finite: {rewards.tolist()}")
    groups = rewards.split(list(group_sizes))
    centred = torch.cat([group - group.mean() for group in groups])
    if scale == "none":
        return centred
    spread = rewards.std() if len(rewards) > 1 else rewards.new_zeros(())
    stds = [spread if scale == "batch" else (g.std() if len(g) > 1 else g.new_zeros(())) for g in groups]
    per_row = torch.cat([s.expand(len(g)) for s, g in zip(stds, groups, strict=True)])
    return centred / (per_row + 1e-4)


def clipped_policy_loss(
    logprobs: Float[Tensor, "completions tokens"],
    old_logprobs: Float[Tensor, "completions tokens"],
    advantages: Float[Tensor, " completions"],
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Float[Tensor, "completions tokens"]:
    """Per-token PPO-clip term, to be minimised: -min(r A, clip(r, 1 - low, 1 + high) A)."""
    ratio = torch.exp(logprobs - old_logprobs)
    weight = advantages[:, None]
    return -torch.min(ratio * weight, ratio.clamp(1 - clip_low, 1 + clip_high) * weight)


def aggregate(
    per_token: Float[Tensor, "completions tokens"],
    mask: Shaped[Tensor, "completions tokens"],
    loss_type: str,
    max_completion_length: int | None = None,
    num_items: Float[Tensor, ""] | float | None = None,
) -> Float[Tensor, ""]:
    """Average per-token terms as TRL's ``loss_type`` of that name does.

    Args:
        mask: nonzero where a token counts (bool, or integers as TRL has them).
        max_completion_length: the constant length that ``dr_grpo`` divides by.
        num_items: tokens of the whole batch for ``dapo``; by default those of ``mask``.
    """
    masked = per_token * mask
    per_row = mask.sum(-1).clamp(min=1.0)
    if loss_type in ("grpo", "sapo"):
        return (masked.sum(-1) / per_row).mean()
    if loss_type == "bnpo":
        return masked.sum() / mask.sum().clamp(min=1.0)
    if loss_type == "dr_grpo":
        if max_completion_length is None:
            raise ValueError("loss_type='dr_grpo' needs max_completion_length")
        return masked.sum() / (len(per_token) * max_completion_length)
    if loss_type in ("dapo", "cispo", "vespo"):
        return masked.sum() / (mask.sum().clamp(min=1.0) if num_items is None else num_items)
    if loss_type == "luspo":
        return masked.sum(-1).mean()
    raise ValueError(f"unknown loss_type {loss_type!r}: one of {', '.join(LOSS_TYPES)}")


def smd_loss(
    model: nn.Module,
    batch: RolloutBatch,
    advantages: Float[Tensor, " completions"],
    distill_coef: float = 0.1,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    loss_type: str = "dapo",
    old_logprobs: Sequence[Float[Tensor, " _completion"]] | None = None,
    max_completion_length: int | None = None,
) -> SMDLoss:
    """The SMD loss of one rollout batch, ready for ``loss.backward()``.

    Args:
        model: the policy; prepared by ``prepare_model`` (the rollout engine did it).
        advantages: one per completion, see ``group_advantages``.
        distill_coef: lambda; 0 gives plain GRPO on the shadow track (the dense track still runs,
            without gradient, for the metrics).
        old_logprobs: log-probabilities that the importance ratio divides by; by default the current
            ones, detached, which is right for the first update after a rollout.

    Raises:
        RecordError: the record is not of these tokens or this model.
        ValueError: ``advantages`` does not have one finite value per completion, ``old_logprobs`` not
            one per token, or ``loss_type`` is not in ``LOSS_TYPES``.
    """
    if advantages.shape != (len(batch.completion_ids),) or not bool(torch.isfinite(advantages).all()):
        raise ValueError(
            f"advantages {tuple(advantages.shape)} must hold one finite value for each of "
            f"{len(batch.completion_ids)} completions"
        )
    if loss_type not in LOSS_TYPES:
        raise ValueError(f"loss_type={loss_type!r}: one of {', '.join(LOSS_TYPES)} (others: see SMDTrainer)")
    if old_logprobs is not None and [len(x) for x in old_logprobs] != [len(c) for c in batch.completion_ids]:
        raise ValueError("old_logprobs must hold one value for each token of each completion")
    stats = shadow_stats(model, batch, teacher=True)
    assert stats.kl is not None and stats.teacher_logprobs is not None
    lengths = [len(completion) for completion in batch.completion_ids]
    logprobs, kl = (
        pad_sequence(list(x.split(lengths)), batch_first=True) for x in (stats.logprobs, stats.kl)
    )
    mask = torch.arange(logprobs.shape[1], device=logprobs.device) < torch.tensor(
        lengths, device=logprobs.device
    ).unsqueeze(1)
    old = logprobs.detach()
    if old_logprobs is not None:
        old = pad_sequence(list(old_logprobs), batch_first=True).to(logprobs)
    terms = clipped_policy_loss(logprobs, old, advantages.to(logprobs), clip_low, clip_high)
    policy_loss = aggregate(terms, mask, loss_type, max_completion_length)
    distill_kl = aggregate(kl, mask, loss_type, max_completion_length)
    sparse = torch.cat(batch.sparse_logprobs).to(stats.logprobs)
    metrics = {
        **sampling_gap(sparse, stats.logprobs.detach()),
        **information_gap(stats.logprobs.detach(), stats.teacher_logprobs, stats.kl.detach()),
    }
    loss = policy_loss + distill_coef * distill_kl if distill_coef else policy_loss
    return SMDLoss(loss, policy_loss.detach(), distill_kl.detach(), metrics)
