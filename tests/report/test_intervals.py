"""Intervals against published values and against repeated sampling."""

import pytest
import torch

from shadowmask.report.intervals import bootstrap, difference_interval, mean_interval, wilson
from tolerances import UNIFORM_SHARE


def test_wilson_agrees_with_a_published_example():
    # Newcombe 1998 (Statistics in Medicine 17:857), table I, method 3
    for successes, n, low, high in ((81, 263, 0.2553, 0.3662), (0, 20, 0.0, 0.1611), (29, 29, 0.8830, 1.0)):
        found = wilson(successes, n)
        assert (round(found.low, 4), round(found.high, 4)) == (low, high)


def test_the_method_follows_the_scores():
    assert mean_interval([0.0, 1.0, 1.0, None]).method == "Wilson"
    assert mean_interval([0.0, 1.0, 1.0, None]).n == 3
    graded = mean_interval([0.0, 0.5, 1.0])
    assert graded.method == "bootstrap"
    assert graded == mean_interval([0.0, 0.5, 1.0])
    with pytest.raises(ValueError, match="no item was scored"):
        mean_interval([None])


def test_the_bootstrap_covers_as_often_as_it_says():
    torch.manual_seed(0)
    covered = [
        found.low <= 0.5 <= found.high
        for values in torch.rand(400, 60).tolist()
        for found in [bootstrap(values)]
    ]
    assert abs(sum(covered) / len(covered) - 0.95) < UNIFORM_SHARE


def test_pairing_narrows_the_difference():
    reference = [float(n % 2) for n in range(100)]
    scores = [1.0 - value if n < 4 else value for n, value in enumerate(reference)]
    paired = difference_interval(scores, reference)
    assert paired.mean == 0.0
    assert paired.high - paired.low < 0.5 * (wilson(50, 100).high - wilson(50, 100).low)
    shuffled = difference_interval(scores[1:] + scores[:1], reference)  # not the same items: no pairing
    assert shuffled.high - shuffled.low > 2 * (paired.high - paired.low)


def test_only_items_with_both_scores_are_paired():
    assert difference_interval([1.0, None, 0.0], [0.0, 1.0, None]).n == 1
    with pytest.raises(ValueError, match="scored in both"):
        difference_interval([None], [1.0])
