"""The three gaps, never one number for all of them.

sampling gap      sparse vs shadow log-probabilities, same weights: engine noise, must stay at it
information gap   shadow vs dense, same weights: what eviction costs
staleness         new vs old weights: what updates have changed since the rollout
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from shadowmask.corrections import effective_sample_size, log_ratios

# Which statistic of the sampling gap (nats) may be how large before it no longer counts as floating-point
# noise, by compute dtype. float32: 1e-4 was set for a 30-layer model; small models stay below 5e-6. In
# half precision single tokens of a deep model differ by rounding alone (30 layers under bfloat16 autocast:
# max 0.15, mean 0.02; all-bfloat16 weights: max 0.2, mean 0.04), so the mean is what is checked; a learner
# that ignored the evictions showed a mean of 0.12 on the same tokens.
PARITY_LIMITS = {
    torch.float64: ("max", 1e-10),
    torch.float32: ("max", 1e-4),
    torch.bfloat16: ("mean", 5e-2),
    torch.float16: ("mean", 5e-2),
}


class ParityError(RuntimeError):
    """Sampler and learner disagree by more than floating point explains."""


def sampling_gap(
    sparse_logprobs: Float[Tensor, " tokens"], shadow_logprobs: Float[Tensor, " tokens"]
) -> dict[str, float]:
    """Absolute difference between what the sampler recorded and what the learner replays, in nats."""
    gap = (sparse_logprobs - shadow_logprobs).abs()
    return {
        "sampling_gap/mean": _mean(gap),
        "sampling_gap/p95": _quantile(gap, 0.95),
        "sampling_gap/p99": _quantile(gap, 0.99),
        "sampling_gap/max": float(gap.max()) if len(gap) else 0.0,
    }


def information_gap(
    shadow_logprobs: Float[Tensor, " tokens"],
    dense_logprobs: Float[Tensor, " tokens"],
    kl: Float[Tensor, " tokens"] | None,
) -> dict[str, float]:
    """What the evicted keys changed: KL(dense || shadow) and agreement on the sampled tokens.

    Without ``kl`` (a dense learner has no shadow track to compare whole distributions with) the KL is left
    out; on sampled tokens the sampler's own log-probabilities are the shadow's.

    Agreement of a token is ``exp(-|log p_shadow - log p_dense|)``, in (0, 1]; its 5th percentile is
    the tail that decides stability according to Sparrow (arXiv:2606.08446), whose own formula is not
    public.
    """
    difference = (shadow_logprobs - dense_logprobs).abs()
    agreement = (-difference).exp()
    return {
        **({} if kl is None else {"information_gap/kl": _mean(kl)}),
        "information_gap/agreement_mean": _mean(agreement) if len(agreement) else 1.0,
        "information_gap/agreement_p5": _quantile(agreement, 0.05) if len(agreement) else 1.0,
        "information_gap/max": float(difference.max()) if len(difference) else 0.0,
    }


def off_policyness(
    sparse_logprobs: Float[Tensor, "completions tokens"],
    learner_logprobs: Float[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> dict[str, float]:
    """Tails of log(pi_learner / pi_sparse), and what importance weighting would leave of the sample.

    Both under the weights of the rollout, on the tokens of ``mask``. ``off_policy/ess`` is the effective
    sample size of the raw token ratios as a share of the tokens: 1 for a learner that replays.
    """
    log_ratio = (learner_logprobs - sparse_logprobs)[mask]
    ratio = log_ratios(sparse_logprobs, learner_logprobs, mask)[mask].exp()
    return {
        "off_policy/log_ratio_min": float(log_ratio.min()) if len(log_ratio) else 0.0,
        "off_policy/log_ratio_p1": _quantile(log_ratio, 0.01),
        "off_policy/log_ratio_p5": _quantile(log_ratio, 0.05),
        "off_policy/log_ratio_max": float(log_ratio.max()) if len(log_ratio) else 0.0,
        "off_policy/ess": effective_sample_size(ratio),
    }


def weight_statistics(
    weights: Float[Tensor, "completions tokens"],
    rejected: Bool[Tensor, "completions tokens"],
    mask: Bool[Tensor, "completions tokens"],
) -> dict[str, float]:
    """What a correction did: shares rejected, effective sample size, and TRL's names for its ratio."""
    used = weights[mask]
    sequences = mask.any(-1)
    lost = (rejected.sum(-1) == mask.sum(-1)) & sequences
    return {
        "correction/rejected_fraction": float(rejected.sum() / mask.sum().clamp(min=1)),
        "correction/rejected_sequences": float(lost.sum() / sequences.sum().clamp(min=1)),
        "correction/ess": effective_sample_size(used),
        "sampling/importance_sampling_ratio/min": float(used.min()) if len(used) else 1.0,
        "sampling/importance_sampling_ratio/mean": _mean(used) if len(used) else 1.0,
        "sampling/importance_sampling_ratio/max": float(used.max()) if len(used) else 1.0,
    }


def staleness_kl(new_logprobs: Float[Tensor, " tokens"], old_logprobs: Float[Tensor, " tokens"]) -> float:
    """k3 estimate of KL(old || new) on tokens sampled by the old weights (Schulman 2020)."""
    log_ratio = new_logprobs - old_logprobs
    return _mean(log_ratio.exp() - 1 - log_ratio)


def check_parity(gap: dict[str, float], dtype: torch.dtype, tolerance: float | None = None) -> None:
    """Raise if the sampling gap is more than noise of this dtype.

    Args:
        tolerance: limit in nats instead of the dtype's own (on the same statistic, see PARITY_LIMITS).

    Raises:
        ParityError: names the gap and the tolerance. NaN counts as exceeding it.
    """
    statistic, limit = PARITY_LIMITS[dtype]
    limit = limit if tolerance is None else tolerance
    found = gap[f"sampling_gap/{statistic}"]
    if not found <= limit:
        raise ParityError(
            f"sampling_gap/{statistic} = {found:.3g} nats exceeds the tolerance {limit:.3g} for "
            f"{str(dtype).removeprefix('torch.')}: the learner is not replaying what the sampler did. "
            "Check that both run in the same dtype and autocast (bf16 on one side only?); "
            "parity_tolerance sets another limit, parity_action='log' only logs"
        )


def _mean(values: Tensor) -> float:
    return float(values.double().mean()) if len(values) else 0.0


def _quantile(values: Tensor, q: float) -> float:
    # kthvalue, not quantile: the latter refuses more than 2**24 values
    if not len(values):
        return 0.0
    rank = min(max(round(q * (len(values) - 1)) + 1, 1), len(values))
    return float(values.float().kthvalue(rank).values)
