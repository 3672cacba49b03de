"""Means, paired differences and intervals by hand; the page and the figures of a whole comparison."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from compare_fakes import suite_of
from shadowmask.compare.figures import draw_all
from shadowmask.compare.results import DIVERGED, Result
from shadowmask.compare.statistics import paired_difference, summarise
from shadowmask.compare.tables import as_json, as_markdown, make_pairs, make_rows
from tolerances import HAND_COMPUTED


def result(arm: str, seed: int, dense: float, own: float, status: str = "done") -> Result:
    cache = "dense" if arm == "dense" else "c"
    curves = {
        "reward": [[1, 0.1], [2, 0.2 + seed / 10]],
        "gradient/group_noise": [[1, 3.0], [2, 2.0]],
        "correction/rejected_fraction": [[1, 0.0], [2, 0.25]],
    }
    after = {} if status == DIVERGED else {"dense": dense, "c": own, "evicted": own}
    return Result("t", cache, arm, seed, status, {}, {}, after, 200, curves, 1.0)


RESULTS = [
    *(result("dense", seed, 0.9 + seed / 100, 0.5) for seed in range(3)),
    *(result("naive", seed, 0.8, 0.4) for seed in range(3)),
    result("smd", 0, 0.9, 0.6),
    result("smd", 1, 0.9, 0.8),
    result("smd", 2, 0.0, 0.0, DIVERGED),
]


def test_summaries_by_hand() -> None:
    found = summarise([1.0, 2.0, 6.0])
    assert found is not None and (found.mean, found.seeds) == (3.0, 3)
    assert found.sd == pytest.approx(7**0.5, abs=HAND_COMPUTED)
    one = summarise([2.0])
    assert one is not None and one.sd is None
    assert summarise([]) is None


def test_differences_are_paired_by_seed() -> None:
    found = paired_difference({0: 0.5, 1: 0.7, 2: 0.9, 7: 0.0}, {2: 0.8, 1: 0.6, 0: 0.4})
    assert found is not None and found.pairs == 3
    assert found.mean == pytest.approx(0.1, abs=HAND_COMPUTED)
    # unpaired the spread would be 0.2; every pair differs by the same
    assert found.low == pytest.approx(0.1, abs=HAND_COMPUTED) == found.high
    assert paired_difference({0: 1.0}, {1: 1.0}) is None
    two = paired_difference({0: 1.0, 1: 2.0}, {0: 0.0, 1: 0.0})
    assert two is not None and two.low is None, "two pairs make no interval"


def test_the_interval_covers_the_spread_and_repeats() -> None:
    ours = {n: float(n) for n in range(5)}
    theirs = dict.fromkeys(range(5), 0.0)
    found = paired_difference(ours, theirs)
    assert found is not None and found.low is not None and found.high is not None
    assert 0.0 <= found.low < 1.5 < 2.5 < found.high <= 4.0
    assert paired_difference(ours, theirs) == found


def test_rows_compare_with_the_baseline_under_the_same_cache() -> None:
    rows = {row.arm: row for row in make_rows(suite_of(), RESULTS)}
    naive = rows["naive"]
    assert naive.own_difference is not None and naive.dense_difference is not None
    assert naive.own_difference.mean == pytest.approx(-0.1, abs=HAND_COMPUTED)
    assert naive.dense_difference.mean == pytest.approx(0.8 - 0.91, abs=HAND_COMPUTED)
    assert rows["dense"].own_difference is None
    assert naive.tail["gradient/group_noise"] == 2.0


def test_a_diverged_seed_counts_as_zero_and_is_named() -> None:
    rows = {row.arm: row for row in make_rows(suite_of(), RESULTS)}
    assert rows["smd"].diverged == 1 and rows["smd"].seeds == 3
    assert rows["smd"].own is not None
    assert rows["smd"].own.mean == pytest.approx((0.6 + 0.8 + 0.0) / 3, abs=HAND_COMPUTED)
    found = as_json(suite_of(), RESULTS, {"t/c/x/seed0": "on fire"})
    assert found["diverged"] == ["t/c/smd/seed2"] and found["failed"] == {"t/c/x/seed0": "on fire"}
    json.dumps(found, allow_nan=False)


def test_pairs_compare_arms_of_one_cache() -> None:
    suite = dataclasses.replace(suite_of(), pairs=(("smd", "naive"), ("smd", "dense"), ("naive", "smd")))
    rows = {(row.arm, row.other): row for row in make_pairs(suite, RESULTS)}
    forth, back = rows["smd", "naive"], rows["naive", "smd"]
    over_dense = rows["smd", "dense"].own
    assert over_dense is not None, "trained under no cache, evaluated under that of smd"
    assert over_dense.mean == pytest.approx((0.6 + 0.8 + 0.0) / 3 - 0.5, abs=HAND_COMPUTED)
    assert forth.own is not None and back.own is not None and forth.dense is not None
    assert forth.own.mean == pytest.approx((0.2 + 0.4 - 0.4) / 3, abs=HAND_COMPUTED)
    assert forth.dense.mean == pytest.approx((0.1 + 0.1 - 0.8) / 3, abs=HAND_COMPUTED)
    assert back.own.mean == pytest.approx(-forth.own.mean, abs=HAND_COMPUTED)
    assert "| smd - naive | c | +0.067 [-0.400, +0.400] |" in as_markdown(suite, RESULTS, {})
    assert len(as_json(suite, RESULTS, {})["pairs"]) == 3


def test_the_page_says_it_all() -> None:
    page = as_markdown(suite_of(), RESULTS, {"t/c/x/seed0": "on fire"})
    assert "9 of 9 cells finished, 1 diverged, 1 failed" in page
    assert "`t/c/x/seed0`: on fire" in page
    assert "| c | naive | 3 |  | 0.400 ± 0.000 | -0.100 [-0.100, -0.100] |" in page
    assert "| training cache | arm | dense | c |" in page
    assert as_markdown(suite_of(), [], {}).startswith("# fake")


def test_figures_are_drawn(tmp_path: Path) -> None:
    files = draw_all(suite_of(), RESULTS, tmp_path)
    names = {path.stem for path in files}
    assert names == {"learning_curves", "gradient_noise", "rejection", "final_accuracy"}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in files)
    assert draw_all(suite_of(), [], tmp_path) == []
