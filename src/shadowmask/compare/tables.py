"""The table of a comparison: one row per task, training cache and arm, over seeds."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shadowmask.compare.results import DIVERGED, Result
from shadowmask.compare.statistics import Difference, Summary, paired_difference, summarise
from shadowmask.compare.suite import NO_CACHE, Suite

DENSE = "dense"  # the evaluation cache that evicts nothing


@dataclass(frozen=True)
class Row:
    """What the seeds of one task, training cache and arm give.

    ``own`` is held-out accuracy under the training cache, ``dense`` under the full one. The differences are
    to the baseline's model under the same cache, paired by seed. Diverged seeds are counted, and enter with
    what their broken model still answers, or 0: leaving them out would flatter an unstable method.
    """

    task: str
    cache: str
    arm: str
    seeds: int
    diverged: int
    own: Summary | None
    dense: Summary | None
    own_difference: Difference | None
    dense_difference: Difference | None
    tail: dict[str, float]  # last point of some curves, mean over seeds


TAILS = (
    "information_gap/agreement_p5",
    "off_policy/log_ratio_min",
    "off_policy/ess",
    "correction/rejected_fraction",
    "gradient/group_noise",
)


def accuracy(result: Result, cache: str) -> float | None:
    """Held-out accuracy under a cache; what diverged and cannot answer scores 0."""
    found = result.after.get(cache)
    return 0.0 if found is None and result.status == DIVERGED else found


def own_cache(result: Result) -> str:
    """The name under which a model was evaluated with the cache of its rollouts."""
    return DENSE if result.cache == NO_CACHE else result.cache


def make_rows(suite: Suite, results: Sequence[Result]) -> list[Row]:
    """Rows in the order of the suite; only those that have a result."""
    return [
        _row(task, cache, arm, suite, results)
        for task in suite.order("task")
        for cache in suite.order("cache")
        for arm in suite.order("arm")
        if select(results, task, cache, arm)
    ]


def select(results: Iterable[Result], task: str, cache: str | None, arm: str) -> list[Result]:
    """The seeds of one row, in their order."""
    found = [r for r in results if (r.task, r.arm) == (task, arm) and cache in (None, r.cache)]
    return sorted(found, key=lambda result: result.seed)


def rival(results: Sequence[Result], task: str, cache: str, arm: str) -> list[Result]:
    """The seeds that an arm is compared with: trained under the same cache, or under none."""
    return select(results, task, cache, arm) or select(results, task, NO_CACHE, arm)


def by_seed(results: Iterable[Result], cache: str) -> dict[int, float]:
    """Accuracy under an evaluation cache, for the seeds that have it."""
    values = {result.seed: accuracy(result, cache) for result in results}
    return {seed: value for seed, value in values.items() if value is not None}


def _row(task: str, cache: str, arm: str, suite: Suite, results: Sequence[Result]) -> Row:
    mine = select(results, task, cache, arm)
    theirs = rival(results, task, cache, suite.baseline)
    own = own_cache(mine[0])
    is_baseline = arm == suite.baseline
    return Row(
        *(task, cache, arm, len(mine), sum(r.status == DIVERGED for r in mine)),
        own=summarise(list(by_seed(mine, own).values())),
        dense=summarise(list(by_seed(mine, DENSE).values())),
        own_difference=None if is_baseline else paired_difference(by_seed(mine, own), by_seed(theirs, own)),
        dense_difference=None
        if is_baseline
        else paired_difference(by_seed(mine, DENSE), by_seed(theirs, DENSE)),
        tail={key: value for key in TAILS if (value := _last(mine, key)) is not None},
    )


def _last(results: Sequence[Result], key: str) -> float | None:
    ends = [result.curves[key][-1][1] for result in results if result.curves.get(key)]
    return sum(ends) / len(ends) if ends else None


@dataclass(frozen=True)
class PairRow:
    """One arm minus another that was trained under the same cache or under none, paired by seed."""

    task: str
    cache: str
    arm: str
    other: str
    own: Difference | None
    dense: Difference | None


def make_pairs(suite: Suite, results: Sequence[Result]) -> list[PairRow]:
    """The pairs that the suite asks for, where both arms have results."""
    return [
        PairRow(
            *(task, cache, arm, other),
            own=paired_difference(by_seed(ours, own_cache(ours[0])), by_seed(theirs, own_cache(ours[0]))),
            dense=paired_difference(by_seed(ours, DENSE), by_seed(theirs, DENSE)),
        )
        for task in suite.order("task")
        for arm, other in suite.pairs
        for cache in suite.order("cache")
        if (ours := select(results, task, cache, arm)) and (theirs := rival(results, task, cache, other))
    ]


def matrix(suite: Suite, results: Sequence[Result], task: str) -> list[dict[str, Any]]:
    """Train-cache x eval-cache: mean accuracy of every arm under every cache of the suite."""
    rows = []
    for cache in suite.order("cache"):
        for arm in suite.order("arm"):
            mine = select(results, task, cache, arm)
            if mine:
                means = {
                    name: found.mean
                    for name in (DENSE, *suite.caches)
                    if (found := summarise(list(by_seed(mine, name).values())))
                }
                rows.append({"cache": cache, "arm": arm, "seeds": len(mine), "accuracy": means})
    return rows


def as_json(suite: Suite, results: Sequence[Result], failed: Mapping[str, str]) -> dict[str, Any]:
    """Everything that the table says, for programs."""
    return {
        "suite": suite.name,
        "cells": len(suite.cells),
        "finished": len(results),
        "diverged": [f"{r.task}/{r.cache}/{r.arm}/seed{r.seed}" for r in results if r.status == DIVERGED],
        "failed": dict(failed),
        "baseline": suite.baseline,
        "rows": [dataclasses.asdict(row) for row in make_rows(suite, results)],
        "pairs": [dataclasses.asdict(row) for row in make_pairs(suite, results)],
        "matrix": {task: matrix(suite, results, task) for task in suite.order("task")},
        "seconds": round(sum(result.seconds for result in results), 1),
    }


def as_markdown(suite: Suite, results: Sequence[Result], failed: Mapping[str, str]) -> str:
    """The comparison as a page: what ran, the table, the matrix per task."""
    items = sorted({result.items for result in results if result.items})
    lines = [
        f"# {suite.name}",
        "",
        f"{len(results)} of {len(suite.cells)} cells finished, "
        f"{sum(r.status == DIVERGED for r in results)} diverged, {len(failed)} failed. Held-out prompts per "
        f"cell: {', '.join(map(str, items)) or 'none'}, greedy. Mean ± standard deviation over seeds; "
        f"differences are to `{suite.baseline}` under the same evaluation cache, paired by seed, with a 95 % "
        "bootstrap interval.",
        "",
    ]
    lines += [f"- failed: `{name}`: {error}" for name, error in failed.items()]
    rows, pairs = make_rows(suite, results), make_pairs(suite, results)
    for task in suite.order("task"):
        lines += [f"## {task}", "", *_table([row for row in rows if row.task == task], suite.baseline), ""]
        lines += _pair_lines([row for row in pairs if row.task == task])
        lines += _matrix_lines(suite, matrix(suite, results, task))
    return "\n".join(lines).rstrip() + "\n"


def _table(rows: Sequence[Row], baseline: str) -> list[str]:
    head = (
        *("training cache", "arm", "seeds", "diverged", "own cache", f"minus {baseline}", "dense cache"),
        *(f"minus {baseline}", "agreement p5", "rejected", "gradient noise"),
    )
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for row in rows:
        cells = (
            *(row.cache, row.arm, str(row.seeds), str(row.diverged or "")),
            *(_summary(row.own), _difference(row.own_difference)),
            *(_summary(row.dense), _difference(row.dense_difference)),
            *(
                f"{row.tail[key]:.3g}" if key in row.tail else ""
                for key in (
                    "information_gap/agreement_p5",
                    "correction/rejected_fraction",
                    "gradient/group_noise",
                )
            ),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _pair_lines(rows: Sequence[PairRow]) -> list[str]:
    if not rows:
        return []
    lines = [
        "One arm minus another, paired by seed:",
        "",
        "| difference | training cache | own cache | dense cache |",
        f"|{'---|' * 4}",
    ]
    for row in rows:
        own, dense = _difference(row.own), _difference(row.dense)
        lines.append(f"| {row.arm} - {row.other} | {row.cache} | {own} | {dense} |")
    return [*lines, ""]


def _matrix_lines(suite: Suite, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    caches = (DENSE, *suite.caches)
    lines = [
        "Accuracy by training cache (rows) and evaluation cache (columns):",
        "",
        f"| training cache | arm | {' | '.join(caches)} |",
        f"|{'---|' * (len(caches) + 2)}",
    ]
    for row in rows:
        values = [f"{row['accuracy'][name]:.3f}" if name in row["accuracy"] else "" for name in caches]
        lines.append(f"| {row['cache']} | {row['arm']} | {' | '.join(values)} |")
    return [*lines, ""]


def _summary(found: Summary | None) -> str:
    if found is None:
        return ""
    return f"{found.mean:.3f}" + ("" if found.sd is None else f" ± {found.sd:.3f}")


def _difference(found: Difference | None) -> str:
    if found is None:
        return ""
    interval = "" if found.low is None else f" [{found.low:+.3f}, {found.high:+.3f}]"
    return f"{found.mean:+.3f}{interval}"
