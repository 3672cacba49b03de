"""Runs as ``shadowmask report`` reads them: whole, still going, or with damaged lines."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from shadowmask.metrics import PARITY_LIMITS
from shadowmask.report.run_folder import RunFolderError

# what differs between seeds of one experiment without making it another one
NOT_THE_EXPERIMENT = ("seed", "data_seed", "output_dir", "run_name", "logging_dir")


@dataclass(frozen=True)
class Run:
    """What one run folder says so far."""

    path: Path
    metrics: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    settings: dict[str, Any]  # resolved, or those of config.yaml for older runs
    versions: dict[str, Any]
    accuracies: dict[str, dict[str, tuple[float, float]]]  # moment -> cache -> mean, standard error
    saved_steps: list[int] = field(default_factory=list)  # with records, for `shadowmask inspect`
    notes: list[str] = field(default_factory=list)  # what could not be read

    @property
    def name(self) -> str:
        return str(self.path)

    @property
    def last_step(self) -> int:
        return max(row["step"] for row in self.metrics)

    @property
    def state(self) -> str:
        """How far the run is, in words."""
        if (self.path / "final").is_dir():
            return f"finished after step {self.last_step}"
        total = self.settings.get("max_steps") or 0
        return f"at step {self.last_step}" + (f" of {total}" if total > 0 else "") + ", not finished"


def read_run(path: Path) -> Run:
    """Read a run folder; a line that is damaged is left out and noted.

    Raises:
        RunFolderError: no such folder, or nothing was logged in it.
    """
    if not path.is_dir():
        raise RunFolderError(f"{str(path)!r} is not a run folder: there is no such folder")
    notes: list[str] = []
    metrics = _lines(path / "metrics.jsonl", notes)
    if not metrics:
        raise RunFolderError(f"{path} has no metrics yet (metrics.jsonl): name the --output_dir of a run")
    settings = _mapping(path / "resolved.json", notes) or _mapping(path / "config.yaml", notes)
    return Run(
        path=path,
        metrics=metrics,
        samples=_lines(path / "samples.jsonl", notes),
        settings=settings,
        versions=_mapping(path / "versions.json", notes),
        accuracies={moment: _accuracies(path, moment, notes) for moment in ("before", "after")},
        saved_steps=sorted(int(p.name[5:].split(".")[0]) for p in (path / "samples").glob("step-*.json.gz")),
        notes=notes,
    )


def _lines(path: Path, notes: list[str]) -> list[dict[str, Any]]:
    """Records of a ``.jsonl`` file that have a step; the others are counted in ``notes``."""
    if not path.is_file():
        return []
    records: list[dict[str, Any]] = []
    bad = []
    lines = path.read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
        except json.JSONDecodeError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("step"), int):
            records.append(record)
        elif line:
            bad.append(number)
    if bad:
        shown = ", ".join(map(str, bad[:5])) + (", ..." if len(bad) > 5 else "")
        notes.append(f"{path}: skipped line{'s' if len(bad) > 1 else ''} {shown} (cut off or not JSON)")
    return records


def _mapping(path: Path, notes: list[str]) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        text = path.read_text(encoding="utf-8")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path}: cannot be read, left out")
        return {}
    return content


def _accuracies(path: Path, moment: str, notes: list[str]) -> dict[str, tuple[float, float]]:
    stored = _mapping(path / f"accuracy_{moment}.json", notes)
    return {
        cache: (values["mean"], values["standard_error"])
        for cache, values in stored.items()
        if isinstance(values, dict) and {"mean", "standard_error"} <= values.keys()
    }


# -- several runs ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """Runs that differ in their seed alone."""

    name: str
    runs: list[Run]

    def band(self, key: str) -> list[tuple[int, float, float, float]]:
        """(step, mean, lowest, highest) of a metric over the seeds, where at least one has it."""
        by_step: dict[int, list[float]] = {}
        for run in self.runs:
            for row in run.metrics:
                if isinstance(value := row.get(key), int | float):
                    by_step.setdefault(row["step"], []).append(float(value))
        return [(s, sum(v) / len(v), min(v), max(v)) for s, v in sorted(by_step.items())]


def experiments(runs: Sequence[Run]) -> list[Experiment]:
    """Group runs whose settings are equal but for the seed and where they were written."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        same = {k: v for k, v in run.settings.items() if k not in NOT_THE_EXPERIMENT}
        # without settings nothing says that two runs belong together
        key = json.dumps(same, sort_keys=True, default=str) if same else run.name
        groups.setdefault(key, []).append(run)
    return [
        Experiment(members[0].name + (f" ({len(members)} seeds)" if len(members) > 1 else ""), members)
        for members in groups.values()
    ]


def differences(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Settings that are not the same in all runs, with each run's value."""
    names = list(dict.fromkeys(name for run in runs for name in run.settings))
    rows = {name: [run.settings.get(name) for run in runs] for name in names}
    return {name: values for name, values in rows.items() if any(v != values[0] for v in values)}


def tolerance_of(settings: Mapping[str, Any]) -> tuple[str, float]:
    """Which statistic of the sampling gap is held against which limit (nats) in a run."""
    name = str(settings.get("dtype") or "float32")
    if settings.get("bf16") or settings.get("fp16"):
        name = "bfloat16" if settings.get("bf16") else "float16"
    limits = {str(dtype).removeprefix("torch."): limit for dtype, limit in PARITY_LIMITS.items()}
    statistic, limit = limits.get(name, limits["float32"])
    return statistic, settings.get("parity_tolerance") or limit
