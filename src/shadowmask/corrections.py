"""Off-policy corrections of a learner that sees the full context, as pure functions of two log-probabilities.

A dense learner trains on tokens that the evicting sampler drew. With

    r_t = pi_dense(y_t | x, y_<t) / pi_sparse(y_t | x, y_<t)        (old weights on both sides)

each correction turns the ratios of a batch into weights w_t that multiply the policy term of token t. None
of them knows what was evicted; that is what replaying the record does instead (``method="shadow"``).
Weights are detached by construction: callers pass log-probabilities without gradient.

Published settings are the functions' defaults. TRL's names for the same thing, in its
``vllm_importance_sampling_mode``: ``token_truncate`` (``tis``), ``sequence_mask`` (``mis``),
``token_mask`` (``icepop``); its ``vllm_importance_sampling_clip_max`` is ``cap`` here.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# exp() of a larger log-ratio says nothing any more and can overflow: slime's safety bound
MAX_LOG_RATIO = 20.0


@dataclass(frozen=True)
class Correction:
    """What a correction decided about one batch.

    ``weights`` multiply the policy term; 0 where ``rejected`` and outside the mask. ``rejected`` marks tokens
    of the mask that were discarded (a rejected sequence marks all of its tokens).
    """

    weights: Float[Tensor, "completions tokens"]
    rejected: Bool[Tensor, "completions tokens"]


Rule = Callable[..., Correction]


def log_ratios(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> Float[Tensor, "completions tokens"]:
    """log r_t, clamped to +-20 nats; 0 outside the mask."""
    difference = (learner_logprobs - sparse_logprobs).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
    return difference.masked_fill(~mask, 0.0)


def naive(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> Correction:
    """w_t = 1: the learner takes the tokens for its own. What stock GRPO does with an evicting sampler."""
    return Correction(mask.to(sparse_logprobs.dtype), torch.zeros_like(mask))


def naive_is(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> Correction:
    """w_t = r_t: the importance ratio of every token as it is (only exp's overflow is prevented)."""
    ratio = log_ratios(sparse_logprobs, learner_logprobs, mask).exp()
    return Correction(ratio * mask, torch.zeros_like(mask))


def tis(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    cap: float = 2.0,
) -> Correction:
    """w_t = min(r_t, cap): truncated importance sampling.

    Source: Yao et al. 2025 (https://fengyao.notion.site/off-policy-rl, yaof20/Flash-RL: C = 2).
    """
    ratio = log_ratios(sparse_logprobs, learner_logprobs, mask).exp()
    return Correction(ratio.clamp(max=cap) * mask, torch.zeros_like(mask))


def mis(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    cap: float = 3.0,
) -> Correction:
    """w_t = R [R <= cap] with R = prod_t r_t: masked importance sampling over whole sequences.

    Source: Liu, Li et al. 2025 (https://richardli.xyz/rl-collapse); cap 3 is TRL's default of its
    ``sequence_mask``. Sequences are rejected for a large ratio only; a small one is a small weight.
    """
    total = log_ratios(sparse_logprobs, learner_logprobs, mask).sum(-1, keepdim=True)
    ratio = total.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    rejected = (ratio > cap) & mask
    return Correction((ratio * mask).masked_fill(rejected, 0.0), rejected)


def icepop(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    low: float = 0.5,
    high: float = 5.0,
) -> Correction:
    """w_t = r_t [low <= r_t <= high]: tokens whose ratio leaves the range give no gradient.

    Source: IcePop (https://ringtech.notion.site/icepop); 0.5 and 5 are the defaults of verl, OpenRLHF and
    TRL's ``token_mask`` tests (the post names no values).
    """
    ratio = log_ratios(sparse_logprobs, learner_logprobs, mask).exp()
    rejected = ((ratio < low) | (ratio > high)) & mask
    return Correction((ratio * mask).masked_fill(rejected, 0.0), rejected)


def sparse_rl(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
    veto: float = 1e-4,
    cap: float = 1.5,
    low: float = 0.5,
    high: float = 1.5,
) -> Correction:
    """Sparse-RL: reject sequences and tokens, truncate what stays, and scale the weights to mean 1.

        w_t = min(r_t, cap) / mean(min(r, cap))      mean over all tokens of the batch that count
        w_t = 0  where r_t leaves [low, high], and in a whole sequence if any of its r_t < veto

    Source: arXiv:2601.10079 (sparsity-aware rejection, importance-based reweighting) with the settings of its
    code (lsjia/Sparse-RL, ``mis.yaml``: veto 1e-4, truncation 1.5, rejection range [0.5, 1.5], batch
    normalisation). As in the helper of slime that reads this file, the mean runs over all tokens, rejected
    ones included, and rejected tokens keep their place in the denominators of the loss: a batch that is
    mostly rejected is a small step.
    """
    log_ratio = log_ratios(sparse_logprobs, learner_logprobs, mask)
    ratio = log_ratio.exp()
    vetoed = ((log_ratio < math.log(veto)) & mask).any(-1, keepdim=True)
    rejected = ((ratio < low) | (ratio > high) | vetoed) & mask
    truncated = ratio.clamp(max=cap) * mask
    mean = truncated.sum() / mask.sum().clamp(min=1)
    return Correction((truncated / mean.clamp(min=1e-8)).masked_fill(rejected, 0.0), rejected)


@dataclass(frozen=True)
class Method:
    """What a value of ``--method`` means: who evicts, what the learner sees, how it is corrected."""

    about: str
    evicts: bool = True
    replays: bool = False
    distils: bool = False
    rule: Rule | None = None

    @property
    def settings(self) -> dict[str, float]:
        """Settings of the correction with their published values."""
        if self.rule is None:
            return {}
        parameters = inspect.signature(self.rule).parameters.values()
        return {p.name: p.default for p in parameters if p.default is not p.empty}


METHODS: dict[str, Method] = {
    "smd": Method("replay + lambda KL(dense || shadow)", replays=True, distils=True),
    "shadow": Method("replay alone (lambda = 0)", replays=True),
    "dense": Method("nothing is evicted while training", evicts=False, replays=True),
    "naive": Method("dense learner, ratio 1", rule=naive),
    "naive-is": Method("dense learner, raw importance ratio", rule=naive_is),
    "tis": Method("dense learner, truncated importance sampling", rule=tis),
    "mis": Method("dense learner, sequences masked by their ratio", rule=mis),
    "icepop": Method("dense learner, tokens masked by their ratio", rule=icepop),
    "sparse-rl": Method("dense learner, Sparse-RL's rejection and reweighting", rule=sparse_rl),
}


def get_method(name: str) -> Method:
    """Look a method up.

    Raises:
        ValueError: unknown name.
    """
    if name not in METHODS:
        raise ValueError(f"method={name!r} must be one of {', '.join(METHODS)}")
    return METHODS[name]


def method_settings(name: str, more: Mapping[str, Any]) -> dict[str, float]:
    """Settings of a method's correction: the published ones, with those of ``more`` in their place.

    Raises:
        ValueError: a setting that the method does not have, or a value that is no positive number.
    """
    known = get_method(name).settings
    for key, value in more.items():
        if key not in known:
            have = f"it has {', '.join(known)}" if known else "it has none"
            raise ValueError(f"method_kwargs: method {name!r} has no setting {key!r}; {have}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ValueError(f"method_kwargs: {key}={value!r} of method {name!r} must be a positive number")
    return {**known, **more}


def effective_sample_size(weights: Float[Tensor, " tokens"]) -> float:
    """Kish's (sum w)^2 / (n sum w^2), in [0, 1]: the share of the tokens that the weights leave in effect."""
    if not len(weights):
        return 1.0
    # scaled by the largest, so that squares of large ratios stay finite
    wide = weights.double() / weights.double().abs().max().clamp(min=1e-300)
    squares = wide.square().sum() * len(wide)
    return float(wide.sum().square() / squares) if squares > 0 else 0.0
