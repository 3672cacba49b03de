"""Figures of a comparison: curves with seed bands, and bars over the arms.

One panel per task and training cache. Arms differ in line style as well as in colour; a band is one standard
deviation over seeds to both sides.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowmask.compare.results import Result
from shadowmask.compare.suite import NO_CACHE, Suite
from shadowmask.compare.tables import DENSE, by_seed, select
from shadowmask.report.plots import save

LINES = ("-", "--", "-.", ":")
CURVES = {
    "learning_curves": ("reward", "sampled reward, training cache", False),
    "agreement": ("information_gap/agreement_p5", "agreement with dense, 5th percentile", False),
    "entropy": ("entropy", "entropy of the sampled policy (nats)", False),
    "gradient_noise": ("gradient/group_noise", "gradient variance over groups / signal", True),
    "rejection": ("correction/rejected_fraction", "share of tokens rejected", False),
    "off_policy": ("off_policy/ess", "effective sample size of raw ratios", False),
}

Panel = tuple[str, str]


def draw_all(suite: Suite, results: Sequence[Result], folder: Path) -> list[Path]:
    """Draw every figure that has something to show; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    panels = [
        (task, cache)
        for task in suite.order("task")
        for cache in suite.order("cache")
        if cache != NO_CACHE and any((r.task, r.cache) == (task, cache) for r in results)
    ]
    if not panels:
        return []
    drawn = []
    for name, (key, label, logarithmic) in CURVES.items():
        if any(result.curves.get(key) for result in results):
            figure = _grid(len(panels))
            for axes, panel in zip(figure.axes, panels, strict=False):
                _curves(axes, suite, results, panel, key)
                axes.set_ylabel(label, fontsize="small")
                if logarithmic and axes.lines:
                    axes.set_yscale("log")
            drawn.append(_finish(figure, panels, folder / f"{name}.png"))
    figure = _grid(len(panels))
    for axes, panel in zip(figure.axes, panels, strict=False):
        _bars(axes, suite, results, panel)
    drawn.append(_finish(figure, panels, folder / "final_accuracy.png"))
    return drawn


def _grid(count: int) -> Figure:
    columns = min(count, 2)
    rows = -(-count // columns)
    figure = Figure(figsize=(5.8 * columns, 2.9 * rows + 0.6), layout="constrained")
    figure.subplots(rows, columns, squeeze=False)
    return figure


def _finish(figure: Figure, panels: Sequence[Panel], path: Path) -> Path:
    for axes, (task, cache) in zip(figure.axes, panels, strict=False):
        axes.set_title(f"{task}, {cache}", fontsize="medium")
        axes.grid(alpha=0.3)
    for axes in figure.axes[len(panels) :]:
        axes.set_visible(False)
    handles: dict[str, Artist] = {}  # one legend for all panels, below them
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(str(label), handle)
    if handles:
        figure.legend(
            list(handles.values()), list(handles), loc="outside lower center", ncols=9, fontsize="x-small"
        )
    save(figure, path)
    return path


def _curves(axes: Axes, suite: Suite, results: Sequence[Result], panel: Panel, key: str) -> None:
    task, cache = panel
    axes.set_xlabel("step")
    for number, arm in enumerate(suite.order("arm")):
        mine = select(results, task, cache, arm) or select(results, task, NO_CACHE, arm)
        curves = [_points(r, key) for r in mine if len(r.curves.get(key, ())) > 1]
        steps = sorted(set.intersection(*map(set, curves))) if curves else []
        if not steps:
            continue
        colour = matplotlib.color_sequences["tab10"][number % 10]
        values = [[curve[step] for curve in curves] for step in steps]
        means = [statistics.fmean(v) for v in values]
        axes.plot(steps, means, LINES[number // 3 % 4], color=colour, label=arm, linewidth=1.3)
        if len(curves) > 1:
            spread = [statistics.stdev(v) for v in values]
            low = [m - s for m, s in zip(means, spread, strict=True)]
            high = [m + s for m, s in zip(means, spread, strict=True)]
            axes.fill_between(steps, low, high, color=colour, alpha=0.1, linewidth=0)


def _points(result: Result, key: str) -> dict[int, float]:
    return {int(step): value for step, value in result.curves[key]}


def _bars(axes: Axes, suite: Suite, results: Sequence[Result], panel: Panel) -> None:
    """Held-out accuracy under the panel's cache and dense, every seed as a dot."""
    task, cache = panel
    arms = [
        (arm, mine)
        for arm in suite.order("arm")
        if (mine := select(results, task, cache, arm) or select(results, task, NO_CACHE, arm))
    ]
    labels = "evaluated under the training cache", "evaluated dense"
    for offset, (name, colour) in enumerate(((cache, "#1b3a6b"), (DENSE, "#e08214"))):
        for place, (_, mine) in enumerate(arms):
            values = list(by_seed(mine, name).values())
            if values:
                x = place + 0.4 * offset - 0.2
                label = None if place else labels[offset]
                axes.bar(x, statistics.fmean(values), 0.38, color=colour, alpha=0.6, label=label)
                axes.plot([x] * len(values), values, ".", color="black", markersize=3)
    axes.set_xticks(range(len(arms)), [arm for arm, _ in arms], rotation=60, ha="right", fontsize="x-small")
    axes.set_ylim(0, 1.05)
    axes.set_ylabel("held-out accuracy", fontsize="small")
