"""The picture of ``shadowmask eval``: the score against the bytes that keys and values take."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowmask.report.intervals import LEVEL, Interval
from shadowmask.report.matrix import DENSE, Row
from shadowmask.report.plots import save
from shadowmask.report.units import byte_unit

COLORS = ("#1b3a6b", "#e08214", "#5e8c31", "#8e3b7a", "#2a9d8f", "#b03a2e", "#555555")
MARKERS = "osv^Dp*"
LINES = ("-", "--", "-.", ":")


def plot_matrix(rows: Sequence[Row], metric: str, title: str, target: Path) -> list[Path]:
    """Draw one line per evictor, with error bars, and dense as a band. Returns the PNG and the SVG."""
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.subplots()
    unit, divisor = byte_unit(max(row.kv_bytes for row in rows))
    dense = next((row for row in rows if row.name == DENSE), None)
    names = list(dict.fromkeys(row.evictor for row in rows if row.name != DENSE))
    for n, name in enumerate(names):
        points = sorted((row for row in rows if row.evictor == name), key=lambda row: row.kv_bytes)
        style = {
            "color": COLORS[n % len(COLORS)],
            "marker": MARKERS[n % len(MARKERS)],
            "linestyle": LINES[n % len(LINES)],
        }
        _points(axes, points, divisor, label=name, **style)
    if dense:
        axes.axhspan(dense.score.low, dense.score.high, color="black", alpha=0.07)
        _points(axes, [dense], divisor, label=DENSE, color="black", marker="D", linestyle="none")
    axes.set_xlabel(f"keys and values held per sequence, {unit}")
    axes.set_ylabel(f"{metric}, mean and {LEVEL:.0%} interval")
    axes.set_xlim(left=0)
    low = min(row.score.low for row in rows)
    high = max(row.score.high for row in rows)
    if low >= 0 and high <= 1:
        axes.set_ylim(-0.03, 1.03)
    axes.set_title(title, fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    paths = [target.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        save(figure, path)
    return paths


def _points(axes: Axes, rows: Sequence[Row], divisor: int, **style: Any) -> None:
    scores: list[Interval] = [row.score for row in rows]
    errors = [[s.mean - s.low for s in scores], [s.high - s.mean for s in scores]]
    x = [row.kv_bytes / divisor for row in rows]
    # rounding may leave an end a hair on the wrong side
    clipped = [[max(e, 0.0) for e in side] for side in errors]
    axes.errorbar(x, [s.mean for s in scores], yerr=clipped, capsize=3, markersize=5, linewidth=1.3, **style)
