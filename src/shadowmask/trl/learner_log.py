"""What the learner logs of a scored batch, and which side of a metric is its worst."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.head import TokenStats
from shadowmask.metrics import information_gap, staleness_kl


def learner_metrics(
    stats: TokenStats,
    sparse_logprobs: Float[Tensor, " tokens"],
    old_logprobs: Float[Tensor, " tokens"] | None,
    replays: bool,
) -> dict[str, float]:
    """Staleness and information gap of one scored batch.

    Args:
        stats: of the learner, with the dense track if it replays.
        old_logprobs: the learner's under the weights of the rollout; ``None`` if they still are the same.
        replays: the sampler's log-probabilities are the learner's old ones, up to noise. Otherwise the
            learner is dense: its old ones against the sampler's are the information gap.
    """
    learner = stats.logprobs.detach()
    old = learner if old_logprobs is None else old_logprobs
    metrics = {"staleness/kl": staleness_kl(learner, sparse_logprobs if replays else old)}
    if stats.kl is not None and stats.teacher_logprobs is not None:
        return metrics | information_gap(learner, stats.teacher_logprobs, stats.kl.detach())
    return metrics | information_gap(sparse_logprobs, old, None)


def worst_side(name: str) -> str | None:
    """``"max"``, ``"min"``, or ``None`` for a metric whose mean over batches and processes is meant."""
    if name.startswith(("sampling_gap/", "information_gap/")):
        if name.endswith("/agreement_p5"):
            return "min"
        return "max" if name.endswith(("/max", "/p99")) else None
    if name.startswith(("off_policy/", "sampling/")):
        if name.endswith("max"):
            return "max"
        return "min" if name.endswith(("min", "_p1", "_p5")) else None
    return None
