"""A budget that grows when too many tokens lose their keys.

Sparrow (arXiv:2606.08446) finds that the lower tail of per-token agreement between the evicted and the dense
policy decides whether training is stable, and keeps its 5th percentile above a floor by a schedule. Here the
measurement closes the loop: the kept share grows by a quarter after a step below the floor, and shrinks
slowly, never below what was configured, while there is room.
"""

from __future__ import annotations

import json
from pathlib import Path

GROWTH = 1.25
SHRINKAGE = 0.97
MARGIN = 0.05  # agreement above the floor from which the budget shrinks again

STATE = "budget.json"


class BudgetController:
    """``scale`` multiplies the configured budget; 1 is the configured one."""

    def __init__(self, floor: float) -> None:
        self.floor = floor
        self.scale = 1.0

    def update(self, agreement_p5: float) -> float:
        """Follow the step's worst 5th percentile of agreement; returns the new scale."""
        if agreement_p5 < self.floor:
            self.scale *= GROWTH
        elif agreement_p5 > self.floor + MARGIN:
            self.scale = max(1.0, self.scale * SHRINKAGE)
        return self.scale

    def save(self, folder: Path) -> None:
        (folder / STATE).write_text(json.dumps({"scale": self.scale}) + "\n")

    def load(self, folder: Path) -> None:
        """Take the scale of a checkpoint.

        Raises:
            ValueError: it was written by a run without this controller.
        """
        if not (folder / STATE).is_file():
            raise ValueError(f"checkpoint {folder} has no {STATE}: agreement_floor was not set in that run")
        self.scale = float(json.loads((folder / STATE).read_text())["scale"])
