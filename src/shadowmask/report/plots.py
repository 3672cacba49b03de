"""One picture of a run: reward, the two gaps, memory.

Lines differ in style and marker as well as in colour, so the picture survives a grey printer.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shadowmask.report.units import byte_unit

Metrics = Sequence[Mapping[str, Any]]
Style = dict[str, Any]

DARK: Style = {"color": "#1b3a6b", "linestyle": "-", "marker": "o", "markersize": 3}
LIGHT: Style = {"color": "#e08214", "linestyle": "--", "marker": "s", "markersize": 3}
LIMIT: Style = {"color": "#555555", "linestyle": ":", "linewidth": 1.2}
HELD_OUT_MARKERS = ("D", "^", "v", "P")
SMALLEST_GAP = 1e-9  # a gap of zero has no place on a log scale; draw it at the bottom


def plot_run(
    metrics: Metrics,
    path: str | os.PathLike[str],
    accuracies: Mapping[str, tuple[float, float]] | None = None,
    tolerance: float | None = 1e-4,
) -> None:
    """Draw the four panels of a run into a PNG file.

    Args:
        metrics: the records of `metrics.jsonl`. A panel without any data says so.
        accuracies: held-out accuracy before and after training, by name of the cache.
        tolerance: largest sampling gap that counts as rounding, in nats; `None` draws no line.
    """
    figure = Figure(figsize=(10, 6.5), layout="constrained")
    panels: list[Callable[[Axes], None]] = [
        lambda axes: _reward(axes, metrics, accuracies or {}),
        lambda axes: _sampling_gap(axes, metrics, tolerance),
        lambda axes: _information_gap(axes, metrics),
        lambda axes: _kv_bytes(axes, metrics),
    ]
    for draw, axes in zip(panels, figure.subplots(2, 2).flat, strict=True):
        draw(axes)
        _finish(axes)
    save(figure, Path(path))


def _reward(axes: Axes, metrics: Metrics, accuracies: Mapping[str, tuple[float, float]]) -> None:
    axes.set_title("Reward")
    axes.set_ylabel("mean reward")
    steps, rewards = _series(metrics, "reward")
    if steps:
        axes.plot(steps, rewards, label="sampled, evicted cache", **DARK)
    ends = (0, max(steps, default=1))
    for (name, values), marker in zip(accuracies.items(), HELD_OUT_MARKERS, strict=False):
        style: Style = {"linestyle": "none", "marker": marker, "markersize": 8, "color": "black"}
        axes.plot(ends, values, label=f"held-out greedy, {name} cache", fillstyle="none", **style)
    if accuracies:
        axes.set_ylim(-0.03, 1.05)


def _sampling_gap(axes: Axes, metrics: Metrics, tolerance: float | None) -> None:
    axes.set_title("Sampling gap: sampler vs learner")
    axes.set_ylabel("|Δ log p|, nats")
    for key, name, style in (("max", "max", DARK), ("p99", "99th percentile", LIGHT)):
        steps, values = _series(metrics, f"sampling_gap/{key}")
        if steps:
            axes.plot(steps, [max(value, SMALLEST_GAP) for value in values], label=name, **style)
    if axes.lines:
        axes.set_yscale("log")
        if tolerance is not None:
            axes.axhline(tolerance, label=f"tolerance {tolerance:g}", **LIMIT)


def _information_gap(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("Information gap: what eviction costs")
    axes.set_ylabel("KL(dense ‖ shadow), nats")
    steps, kl = _series(metrics, "information_gap/kl")
    if steps:
        axes.plot(steps, kl, label="KL", **DARK)
    axes.set_ylim(bottom=0)
    steps, agreement = _series(metrics, "information_gap/agreement_p5")
    if steps:
        right = axes.twinx()
        right.set_ylabel("agreement")
        right.set_ylim(0, 1.05)
        right.plot(steps, agreement, **LIGHT)
        axes.plot([], [], label="agreement, 5th percentile (right)", **LIGHT)  # one legend for both


def _kv_bytes(axes: Axes, metrics: Metrics) -> None:
    axes.set_title("KV cache of a rollout batch")
    series = {key: _series(metrics, f"kv/bytes_{key}") for key in ("peak", "dense")}
    unit, divisor = byte_unit(max((v for _, values in series.values() for v in values), default=0))
    axes.set_ylabel(unit)
    for (key, name), style in zip({"peak": "peak", "dense": "dense"}.items(), (DARK, LIGHT), strict=True):
        steps, values = series[key]
        if steps:
            axes.plot(steps, [value / divisor for value in values], label=name, **style)
    axes.set_ylim(bottom=0)


def _finish(axes: Axes) -> None:
    axes.set_xlabel("step")
    axes.grid(alpha=0.3)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if axes.lines:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)


def _series(metrics: Metrics, key: str) -> tuple[list[float], list[float]]:
    """Return steps and values of the records that have this metric."""
    found = [record for record in metrics if record.get(key) is not None]
    return [record["step"] for record in found], [record[key] for record in found]


def save(figure: Figure, path: Path) -> None:
    """Write beside the target and rename: a viewer never meets half a picture."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    os.close(handle)
    try:
        figure.savefig(temporary, format=path.suffix[1:] or "png", dpi=130)
        if path.suffix in ("", ".png"):
            _shrink(temporary)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)


def _shrink(png: str) -> None:
    """256 colours are enough for a plot, at a third of the bytes."""
    from PIL import Image  # comes with matplotlib

    with Image.open(png) as picture:
        small = picture.convert("RGB").quantize(256, dither=Image.Dither.NONE)
    small.save(png, format="png", optimize=True)
