"""The slow-and-obvious twin of the learner: one completion at a time, explicit T x T masks, full logits.

Shares nothing with the package but ``ShadowMask.visible`` (which ``test_oracle`` checks by itself):
another attention function, no packing, no tiles, formulas as they stand in papers.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from shadowmask import RolloutBatch, ShadowMask
from tiny_models import make_model

NAME = "slow_reference"


def slow_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    slow_masks: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    assert slow_masks is not None and not dropout
    masks = slow_masks[module.layer_idx if len(slow_masks) > 1 else 0]
    heads, tokens = query.shape[1], query.shape[2]
    per_kv = heads // key.shape[1]
    outputs = []
    for head in range(heads):
        kv_head = head // per_kv
        scores = query[0, head] @ key[0, kv_head].T * scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        visible = masks[kv_head if len(masks) > 1 else 0].clone()
        if sliding_window is not None:
            for i in range(tokens):
                visible[i, : max(i - sliding_window + 1, 0)] = False
        scores = scores.masked_fill(~visible, -torch.inf)
        weights = scores.exp()
        total = weights.sum(-1, keepdim=True) + (0 if s_aux is None else s_aux[head].exp())
        outputs.append(weights / total @ value[0, kv_head])
    return torch.stack(outputs, dim=1)[None], None


def make_slow_model(family: str, seed: int = 0, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """The same weights as ``make_model``'s, with the slow attention."""
    AttentionInterface.register(NAME, slow_attention)
    model = make_model(family, dtype, seed)
    model.set_attn_implementation(NAME)
    return model


def slow_logits(model: PreTrainedModel, tokens: list[int], visible: Tensor) -> Tensor:
    """Logits of every query of one sequence, under explicit masks (layers, kv_heads, query, key)."""
    outputs = model(
        input_ids=torch.tensor([tokens]),
        attention_mask=torch.ones(1, 1, 1, 1, dtype=torch.bool),
        position_ids=torch.arange(len(tokens))[None],
        use_cache=False,
        slow_masks=visible,
    )
    return outputs.logits[0]


def slow_tracks(
    model: PreTrainedModel, batch: RolloutBatch, n: int, detach_teacher: bool = True
) -> tuple[Tensor, Tensor]:
    """Log-distributions (completion tokens x vocabulary) of the shadow and the dense track."""
    prompt, completion = batch.prompts_per_completion[n], batch.completion_ids[n]
    rows = slice(len(prompt) - 1, len(prompt) + len(completion) - 1)
    tracks = []
    for record in (batch.shadow[n], ShadowMask.dense([prompt], [completion])):
        logits = slow_logits(model, prompt + completion, record.visible())[rows]
        tracks.append((logits / batch.temperature).log_softmax(-1))
    return tracks[0], tracks[1].detach() if detach_teacher else tracks[1]


def slow_smd_loss(
    model: PreTrainedModel,
    batch: RolloutBatch,
    advantages: Tensor,
    distill_coef: float,
    loss_type: str,
    old_logprobs: list[Tensor] | None = None,
    clip: tuple[float, float] = (0.2, 0.2),
    max_completion_length: int = 1,
    detach_teacher: bool = True,
) -> Tensor:
    policy_sums, kl_sums, lengths = [], [], []
    for n, completion in enumerate(batch.completion_ids):
        shadow, dense = slow_tracks(model, batch, n, detach_teacher)
        policy_sum = kl_sum = torch.zeros((), dtype=shadow.dtype)
        for t, token in enumerate(completion):
            logprob = shadow[t, token]
            old = logprob.detach() if old_logprobs is None else old_logprobs[n][t]
            ratio = (logprob - old).exp()
            clipped = ratio.clamp(1 - clip[0], 1 + clip[1])
            policy_sum = policy_sum - torch.min(ratio * advantages[n], clipped * advantages[n])
            kl_sum = kl_sum + (dense[t].exp() * (dense[t] - shadow[t])).sum()
        policy_sums.append(policy_sum)
        kl_sums.append(kl_sum)
        lengths.append(len(completion))
    count = len(lengths)

    def average(sums: list[Tensor]) -> Tensor:
        if loss_type == "grpo":
            return torch.stack([s / length for s, length in zip(sums, lengths, strict=True)]).sum() / count
        divisor = {
            "bnpo": sum(lengths),
            "dapo": sum(lengths),
            "dr_grpo": count * max_completion_length,
        }[loss_type]
        return torch.stack(sums).sum() / divisor

    return average(policy_sums) + distill_coef * average(kl_sums)


def flat_gradient(model: PreTrainedModel) -> Tensor:
    """All gradients in one vector, zeros where there is none."""
    return torch.cat(
        [(torch.zeros_like(p) if p.grad is None else p.grad).flatten() for p in model.parameters()]
    )
