"""Means over seeds, and differences to the baseline that are paired by seed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

RESAMPLES = 10_000
CONFIDENCE = 0.95
SEED = 0  # of the bootstrap: the same results give the same interval


@dataclass(frozen=True)
class Summary:
    """Mean and sample standard deviation over seeds; ``None`` where one value has no spread."""

    mean: float
    sd: float | None
    seeds: int


@dataclass(frozen=True)
class Difference:
    """Mean of paired differences with its percentile bootstrap interval; none for fewer than 3 pairs."""

    mean: float
    low: float | None
    high: float | None
    pairs: int


def summarise(values: Sequence[float]) -> Summary | None:
    """``None`` without any value."""
    if not values:
        return None
    return Summary(
        statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None, len(values)
    )


def paired_difference(ours: Mapping[int, float], theirs: Mapping[int, float]) -> Difference | None:
    """Difference over the seeds that both have, ``ours - theirs``; ``None`` without a common seed.

    The interval resamples seeds, so it covers the spread of training and of held-out prompts alike (both
    follow the seed). With five seeds it is rough: read it as a range, not as a test.
    """
    differences = [ours[seed] - theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]
    if not differences:
        return None
    low = high = None
    if len(differences) >= 3:
        rng = random.Random(SEED)
        means = sorted(
            statistics.fmean(rng.choices(differences, k=len(differences))) for _ in range(RESAMPLES)
        )
        tail = (1 - CONFIDENCE) / 2
        low, high = means[round(tail * (RESAMPLES - 1))], means[round((1 - tail) * (RESAMPLES - 1))]
    return Difference(statistics.fmean(differences), low, high, len(differences))
