"""Suites of cells that are stand-ins, see ``compare/conftest.py``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shadowmask.compare.suite import Suite, make_suite


def suite_of(rates: dict[str, Any] | None = None, seeds: int = 3) -> Suite:
    """Arms dense, naive and smd; ``rates`` maps an arm to the learning rate that decides what it does."""
    arms = {arm: {"method": arm, "learning_rate": rate} for arm, rate in (rates or {}).items()}
    grid = [{"task": "t", "cache": "c", "arm": ["dense", "naive", "smd"], "seed": list(range(seeds))}]
    content = {
        "train": {"learning_rate": 0.1},
        "tasks": {"t": {"task": "recall"}},
        "caches": {"c": {"evictor": "random", "compression_ratio": 0.5}},
        "arms": arms,
        "grid": grid,
    }
    return make_suite(content, "fake")


def started(folder: Path) -> list[str]:
    """The method and seed of every cell that was started, in order."""
    path = folder / "started.txt"
    return path.read_text().splitlines() if path.is_file() else []
