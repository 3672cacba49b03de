"""Confidence intervals of means and of paired differences, and which of them was used.

Answers that are right or wrong get Wilson's interval (Wilson 1927), which keeps its coverage near 0 and 1
and for few items. Graded scores and paired differences get a percentile bootstrap over items (Efron 1979).
All are of the items' own sampling alone: other seeds of a training run are not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import torch

LEVEL = 0.95
RESAMPLES = 10_000
SEED = 0
AT_ONCE = 2_000_000  # drawn indices in memory


@dataclass(frozen=True)
class Interval:
    """A mean, its confidence interval at ``LEVEL``, and the items behind it."""

    mean: float
    low: float
    high: float
    n: int
    method: str

    def __str__(self) -> str:
        return f"{self.mean:.3f} [{self.low:.3f}, {self.high:.3f}]"


def mean_interval(scores: Sequence[float | None]) -> Interval:
    """The mean of the items that were scored: Wilson if all are 0 or 1, else bootstrap.

    Raises:
        ValueError: no item was scored.
    """
    values = [score for score in scores if score is not None]
    if not values:
        raise ValueError("no item was scored: the reward left out every completion")
    if set(values) <= {0.0, 1.0}:
        return wilson(sum(values), len(values))
    return bootstrap(values)


def difference_interval(scores: Sequence[float | None], reference: Sequence[float | None]) -> Interval:
    """The mean of ``scores - reference`` over the items that both have, paired. Positive = better.

    Raises:
        ValueError: not as many scores as references, or no item with both.
    """
    pairs = [(a, b) for a, b in zip(scores, reference, strict=True) if a is not None and b is not None]
    if not pairs:
        raise ValueError("no item was scored in both")
    return bootstrap([a - b for a, b in pairs])


def wilson(successes: float, n: int) -> Interval:
    """Wilson's score interval of a share."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    share = successes / n
    centre = (share + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * (share * (1 - share) / n + z * z / (4 * n * n)) ** 0.5
    return Interval(share, max(centre - half, 0.0), min(centre + half, 1.0), n, "Wilson")


def bootstrap(values: Sequence[float]) -> Interval:
    """Percentile bootstrap of the mean, seeded. Equal values give an interval of no width."""
    data = torch.tensor(values, dtype=torch.float64)
    n = len(values)
    generator = torch.Generator().manual_seed(SEED)
    means = []
    for start in range(0, RESAMPLES, step := max(AT_ONCE // n, 1)):
        drawn = torch.randint(n, (min(step, RESAMPLES - start), n), generator=generator)
        means.append(data[drawn].mean(dim=1))
    ends = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(ends).tolist()
    return Interval(float(data.mean()), low, high, n, "bootstrap")
