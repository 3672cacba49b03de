"""What a reader of a run should be told without having to find it in the curves."""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any

from shadowmask.corrections import get_method
from shadowmask.report.runs import Run, tolerance_of

CUT_SHARE = 0.9  # completions cut at the limit from which a reward says more about length than answers
NEAR = 0.5  # share of the tolerance from which the sampling gap is worth a look
JUMP = 10  # times the median gradient norm
REJECTED_SHARE = 0.5


def warnings_of(run: Run) -> list[str]:
    """Sentences about what is wrong or easily misread, most serious first; none if all is well."""
    found = [warning for check in CHECKS for warning in check(run)]
    return [*found, *run.notes]


def _gap(run: Run) -> list[str]:
    if not get_method(run.settings.get("method", "smd")).replays:
        return []  # a dense learner: the gap is what the method corrects, not noise
    statistic, limit = tolerance_of(run.settings)
    rows = _have(run, f"sampling_gap/{statistic}")
    if not rows:
        return []
    worst = max(rows, key=lambda row: row[f"sampling_gap/{statistic}"])
    value = worst[f"sampling_gap/{statistic}"]
    if value > limit:
        return [
            f"sampling_gap/{statistic} was {value:.2g} nats at step {worst['step']}, above its tolerance "
            f"{limit:g}: the learner did not replay what the sampler did (bf16 on one side only?)"
        ]
    if value > NEAR * limit:
        return [
            f"sampling_gap/{statistic} reached {value:.2g} nats at step {worst['step']}, near its tolerance "
            f"{limit:g}: above it the run stops"
        ]
    return []


def _no_variance(run: Run) -> list[str]:
    rows = [row for row in _have(run, "frac_reward_zero_std") if row["frac_reward_zero_std"] > 0]
    if not rows:
        return []
    worst = max(rows, key=lambda row: (row["frac_reward_zero_std"], row["step"]))
    share, groups = worst["frac_reward_zero_std"], _groups(run)
    many = f"{round(share * groups)} of {groups}" if groups else f"{share:.0%} of the"
    line = f"{many} groups had no reward variance at step {worst['step']}: nothing to learn from"
    if len(rows) > 1:
        mean = sum(row["frac_reward_zero_std"] for row in rows) / len(_have(run, "frac_reward_zero_std"))
        line += f" ({len(rows)} steps had such groups; {mean:.0%} of all groups)"
    return [line]


def _groups(run: Run) -> int | None:
    """Groups of a rollout, where the settings tell."""
    settings = run.settings
    generations, device = settings.get("num_generations"), settings.get("per_device_train_batch_size")
    if not generations or not device:
        return None
    total = settings.get("generation_batch_size") or device * (settings.get("steps_per_generation") or 1)
    return total // generations or None


def _nothing_evicted(run: Run) -> list[str]:
    rows = _have(run, "kv/retained_fraction")
    if not rows or min(row["kv/retained_fraction"] for row in rows) < 1:
        return []
    if "dense" in str(run.settings.get("evictor", "")).lower():
        return []
    return [
        "nothing was evicted: the budget is at least as large as the prompts, or sinks + recent window are"
    ]


def _cut(run: Run) -> list[str]:
    rows = _have(run, "completions/clipped_ratio")
    cut = [row for row in rows if row["completions/clipped_ratio"] >= CUT_SHARE]
    if not cut:
        return []
    limit = run.settings.get("max_completion_length")
    word = "all" if all(row["completions/clipped_ratio"] >= 1 for row in cut) else f"{CUT_SHARE:.0%} or more"
    return [
        f"{word} completions were cut at the limit{f' of {limit} tokens' if limit else ''} in {len(cut)} of "
        f"{len(rows)} steps: raise max_completion_length, or the reward is of unfinished answers"
    ]


def _gradient(run: Run) -> list[str]:
    lines = []
    lost = [row["step"] for row in run.metrics if "grad_norm" in row and row["grad_norm"] is None]
    if lost:
        lines.append(f"the gradient norm was not finite at step {lost[0]} ({len(lost)} steps)")
    rows = _have(run, "grad_norm")
    if not rows:
        return lines
    usual = median(row["grad_norm"] for row in rows)
    worst = max(rows, key=lambda row: row["grad_norm"])
    if usual > 0 and worst["grad_norm"] > JUMP * usual:
        lines.append(
            f"the gradient norm jumped to {worst['grad_norm']:.3g} at step {worst['step']}, "
            f"{worst['grad_norm'] / usual:.0f} times its median"
        )
    still = [row["step"] for row in rows if row["grad_norm"] == 0]
    if still:
        lines.append(f"the gradient was zero at {len(still)} of {len(rows)} steps, first at step {still[0]}")
    return lines


def _rejected(run: Run) -> list[str]:
    key = "correction/rejected_fraction"
    rows = [row for row in _have(run, key) if row[key] > REJECTED_SHARE]
    if not rows:
        return []
    worst = max(rows, key=lambda row: row[key])
    return [
        f"{worst[key]:.0%} of the tokens were rejected at step {worst['step']}: little is left to learn from"
    ]


def _have(run: Run, key: str) -> list[dict[str, Any]]:
    return [row for row in run.metrics if isinstance(row.get(key), int | float)]


CHECKS: tuple[Callable[[Run], list[str]], ...] = (
    _gap,
    _nothing_evicted,
    _gradient,
    _rejected,
    _no_variance,
    _cut,
)
