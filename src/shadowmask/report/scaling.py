"""The picture of ``shadowmask bench scaling``: speed and bytes over lengths, groups and compression."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from shadowmask.bench.workload import SWEEPS, Workload
from shadowmask.report.plots import DARK, LIGHT, LIMIT, save

LABELS = {
    "prompt_length": "prompt length, tokens",
    "group_size": "group size",
    "compression_ratio": "fraction of the prompt's keys removed",
}


def plot_scaling(figures: Mapping[str, Mapping[str, float]], workload: Workload, target: Path) -> list[Path]:
    """Draw one column per sweep: times as ratios above, KV bytes below. Returns the PNG and the SVG."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    axes = figure.subplots(2, len(SWEEPS))
    for column, (axis, values) in enumerate(SWEEPS.items()):
        points = [figures[f"scaling_point {axis}={value}"] for value in values]
        _times(axes[0, column], axis, values, points)
        _bytes(axes[1, column], axis, values, points)
    axes[0, 0].set_ylabel("times faster")
    axes[1, 0].set_ylabel("MB")
    figure.suptitle(
        f"P={workload.prompt_length}, C={workload.completion_length}, G={workload.group_size}, "
        f"{workload.compression_ratio:.0%} removed where not swept; shape {workload.shape}"
    )
    paths = [target.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in paths:
        save(figure, path)
    return paths


Points = list[Mapping[str, float]]


def _times(axes: Axes, axis: str, values: tuple[float, ...], points: Points) -> None:
    for over, under, name, style in (
        ("generate_seconds", "rollout_seconds", "rollout: generate / ours", DARK),
        ("unpacked_seconds", "packed_seconds", "learner: unpacked / packed", LIGHT),
    ):
        axes.plot(values, [point[over] / point[under] for point in points], label=name, **style)
    axes.axhline(1.0, **LIMIT)
    axes.set_ylim(bottom=0)
    _finish(axes, axis, values)


def _bytes(axes: Axes, axis: str, values: tuple[float, ...], points: Points) -> None:
    dotted = {"color": "#555555", "linestyle": ":", "marker": "^", "markersize": 3}
    for key, name, style in (
        ("kv_bytes_peak", "KV, ours", DARK),
        ("kv_bytes_dense", "dense, prompt shared by its group", LIGHT),
        ("kv_bytes_unshared", "dense, as generate holds it", dotted),
    ):
        axes.plot(values, [point[key] / 1e6 for point in points], label=name, **style)
    axes.set_yscale("log")
    _finish(axes, axis, values)


def _finish(axes: Axes, axis: str, values: tuple[float, ...]) -> None:
    if axis != "compression_ratio":
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
    axes.set_xlabel(LABELS[axis])
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
