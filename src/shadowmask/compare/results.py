"""What a cell leaves behind: one small JSON file, written when the cell is over, never before.

<output>/cells/chain/snapkv50/smd/seed0.json     status, settings, accuracies, curves
<output>/running/...                              the run folder of a cell that is not over
<output>/log.jsonl                                every start and end, never rewritten
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowmask.compare.suite import NO_CACHE, Cell
from shadowmask.report.run_folder import read_records, write_atomically

DONE, DIVERGED = "done", "diverged"
POINTS = 25  # of every curve; a point is the mean of the steps that it stands for

CURVES = (
    "reward",
    "loss",
    "grad_norm",
    "gradient/group_variance",
    "gradient/group_noise",
    "sampling_gap/max",
    "information_gap/kl",
    "information_gap/agreement_p5",
    "off_policy/log_ratio_min",
    "off_policy/log_ratio_p1",
    "off_policy/log_ratio_p5",
    "off_policy/log_ratio_max",
    "off_policy/ess",
    "correction/rejected_fraction",
    "correction/ess",
    "smd/lambda",
    "smd/distill_kl",
    "kv/budget_scale",
    "entropy",
)


@dataclass(frozen=True)
class Result:
    """A finished cell. ``before`` and ``after`` map a cache to its held-out accuracy."""

    task: str
    cache: str
    arm: str
    seed: int
    status: str
    settings: dict[str, Any]
    before: dict[str, float]
    after: dict[str, float]
    items: int
    curves: dict[str, list[list[float]]]  # metric -> [step, value] pairs
    seconds: float
    note: str = ""


def result_path(output: Path, cell: Cell) -> Path:
    return output / "cells" / f"{cell.name}.json"


def read_result(output: Path, cell: Cell) -> Result | None:
    """The result of a finished cell; ``None`` if it is not finished.

    Raises:
        ValueError: it was made with other settings, or the file is damaged.
    """
    path = result_path(output, cell)
    if not path.is_file():
        return None
    try:
        result = Result(**json.loads(path.read_text()))
    except (json.JSONDecodeError, TypeError) as error:
        raise ValueError(f"{path} is damaged ({error}); remove it to run the cell again") from error
    changed = sorted(
        key
        for key in result.settings.keys() | cell.settings.keys()
        if result.settings.get(key) != cell.settings.get(key)
    )
    if changed:
        raise ValueError(
            f"{path} was made with another {', '.join(changed)} than the suite says; give another --output, "
            "or remove the file to run the cell again"
        )
    return result


def write_result(output: Path, cell: Cell, result: Result) -> None:
    text = json.dumps(result.__dict__, separators=(",", ":"), allow_nan=False)
    write_atomically(result_path(output, cell), text + "\n")


def collect(cell: Cell, folder: Path, status: str, seconds: float, note: str = "") -> Result:
    """Read a run folder down to what the comparison needs."""
    before, _ = _accuracies(folder / "accuracy_before.json")
    after, items = _accuracies(folder / "accuracy_after.json")
    for accuracies in (before, after):
        own = accuracies.pop("evicted", None)  # what a run calls the cache of its rollouts
        if own is not None and cell.cache != NO_CACHE:
            accuracies[cell.cache] = own
    metrics = read_records(folder / "metrics.jsonl")
    curves = {key: thin(metrics, key) for key in CURVES}
    return Result(
        *(cell.task, cell.cache, cell.arm, cell.seed, status, cell.settings, before, after, items),
        curves={key: points for key, points in curves.items() if points},
        seconds=round(seconds, 1),
        note=note,
    )


def diverged(folder: Path) -> bool:
    """True if a logged loss or gradient was no finite number (the run folder stores such as null)."""
    rows = read_records(folder / "metrics.jsonl")
    return any(row.get(key, 0.0) is None for row in rows for key in ("loss", "grad_norm"))


def thin(metrics: list[dict[str, Any]], key: str) -> list[list[float]]:
    """A curve of at most ``POINTS`` points: means over equal stretches, at the last step of each."""
    found = [(row["step"], row[key]) for row in metrics if row.get(key) is not None]
    size = max(1, math.ceil(len(found) / POINTS))
    stretches = [found[n : n + size] for n in range(0, len(found), size)]
    return [[part[-1][0], float(f"{sum(v for _, v in part) / len(part):.6g}")] for part in stretches]


def _accuracies(path: Path) -> tuple[dict[str, float], int]:
    if not path.is_file():
        return {}, 0
    stored = json.loads(path.read_text())
    items = min((values["prompts"] for values in stored.values()), default=0)
    return {name: round(values["mean"], 6) for name, values in stored.items()}, items
