"""The results of ``shadowmask eval``: a JSON file that grows cell by cell, a table, a picture.

    settings    what every cell has in common: model, task, items, sampling
    items       digest and reference answer of every prompt, in order
    cells       by name: the evictor, versions, figures, and every item's answer

A file is only continued under the settings that it was begun with.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.table import Table

from shadowmask.report.intervals import LEVEL, Interval, difference_interval, mean_interval
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.units import format_bytes

DENSE = "dense"
Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One cell's figures, worked out from its items."""

    name: str
    evictor: str
    score: Interval
    reward: Interval
    difference: Interval | None  # to dense, paired; None for dense itself, or before it was run
    kv_bytes: float  # mean of the items
    kv_share: float  # of what the same completions need with nothing evicted
    tokens: float  # of completions, mean


@dataclass
class Matrix:
    """All cells of one evaluation. ``open`` reads what is there, ``add`` writes."""

    path: Path
    settings: Record
    items: list[Record]
    metric: str
    cells: dict[str, Record] = field(default_factory=dict)

    @classmethod
    def open(cls, path: Path, settings: Record, items: list[Record], metric: str) -> Matrix:
        """Begin a file, or go on with one that has the same settings and items.

        Raises:
            ValueError: the file is none of ours, or of other settings; names the first that differs.
        """
        matrix = cls(path, settings, items, metric)
        if not path.exists():
            return matrix
        remedy = "name another file with --save"
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            matrix.cells = dict(stored["cells"])
            other = first_difference(stored["settings"], settings)
            same_items = stored["items"] == items
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} holds no evaluation that could be continued; {remedy}") from error
        if other:
            raise ValueError(f"{path} was begun with {other}; {remedy}")
        if not same_items:
            raise ValueError(f"{path} was begun with other prompts of the same settings; {remedy}")
        return matrix

    def add(self, name: str, cell: Record) -> None:
        """Add a finished cell and write the file: whole or not at all."""
        self.cells[name] = cell
        content = {
            "metric": self.metric,
            "confidence_level": LEVEL,  # the method stands at every figure
            "settings": self.settings,
            "figures": {row.name: asdict(row) for row in self.rows()},
            "cells": self.cells,
            "items": self.items,
        }
        write_atomically(self.path, json.dumps(content, indent=1, allow_nan=False) + "\n")

    def scores(self, name: str, measure: str) -> list[float | None]:
        """One measure of every item in a cell."""
        return [answer["scores"][measure] for answer in self.cells[name]["answers"]]

    def rows(self) -> list[Row]:
        """The figures of every cell, in the order they were run."""
        return [self._row(name, cell) for name, cell in self.cells.items()]

    def _row(self, name: str, cell: Record) -> Row:
        scores, answers = self.scores(name, self.metric), cell["answers"]
        paired = name != DENSE and DENSE in self.cells
        held = sum(answer["kv_bytes"] for answer in answers)
        return Row(
            name=name,
            evictor=cell["evictor"],
            score=mean_interval(scores),
            reward=mean_interval(self.scores(name, "reward")),
            difference=difference_interval(scores, self.scores(DENSE, self.metric)) if paired else None,
            kv_bytes=held / len(answers),
            kv_share=held / sum(answer["kv_bytes_dense"] for answer in answers),
            tokens=sum(len(answer["completion_ids"]) for answer in answers) / len(answers),
        )


def first_difference(stored: Mapping[str, Any], wanted: Mapping[str, Any]) -> str | None:
    """The first setting that differs, as ``name=stored (now wanted)``."""
    for name in {**stored, **wanted}:
        if stored.get(name) != wanted.get(name):
            return f"{name}={stored.get(name)!r} (now {wanted.get(name)!r})"
    return None


def table(rows: list[Row], metric: str) -> Table:
    """The cells as lines: score, difference to dense, bytes."""
    shown = Table(box=None, pad_edge=False, header_style="bold")
    graded = any(row.reward.mean != row.score.mean for row in rows)
    measures = [metric, "reward"] if graded else [metric]
    level = f"{LEVEL:.0%}"
    headers = ["cache", *(f"{name} [{level}]" for name in measures), f"minus dense [{level}]", "KV held"]
    for n, header in enumerate([*headers, "of dense", "tokens"]):
        shown.add_column(header, justify="left" if n == 0 else "right", no_wrap=True)
    for row in rows:
        figures = [str(row.score), str(row.reward)] if graded else [str(row.score)]
        difference = "" if row.difference is None else signed(row.difference)
        shown.add_row(
            row.name,
            *figures,
            difference,
            format_bytes(row.kv_bytes),
            f"{row.kv_share:.2f}x",
            f"{row.tokens:.1f}",
        )
    return shown


def signed(interval: Interval) -> str:
    """A difference with the signs of its ends."""
    return f"{interval.mean:+.3f} [{interval.low:+.3f}, {interval.high:+.3f}]"
