"""The figures of a report: one quantity each, one line per experiment, a band over its seeds.

Lines differ in style and marker as well as in colour. Every figure is written as PNG and as SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from shadowmask.report.plots import LIMIT, SMALLEST_GAP, Style, save
from shadowmask.report.runs import Experiment, tolerance_of
from shadowmask.report.units import byte_unit

COLOURS = ("#1b3a6b", "#e08214", "#2c7a4b", "#8e3b8e", "#7a1f1f", "#555555")
DASHES = ("-", "--", "-.", ":", (0, (5, 1, 1, 1, 1, 1)), (0, (1, 3)))
MARKERS = ("o", "s", "^", "D", "v", "P")
STAGES = (
    ("time/rollout", "rollout", "#1b3a6b", ""),
    ("time/rewards", "rewards and old log-probabilities", "#e08214", "//"),
    ("rest", "learner and optimizer", "#b9c4d6", ".."),
    ("step", "whole step, not timed by stage", "#ffffff", "xx"),
)


@dataclass(frozen=True)
class Drawn:
    """A figure on disk and what it shows."""

    name: str
    title: str
    meaning: str
    latest: str  # its last values, in words
    svg: Path


@dataclass(frozen=True)
class Quantity:
    """One metric over steps."""

    name: str
    key: str
    title: str
    unit: str
    meaning: str
    log: bool = False
    form: str = ".3f"


QUANTITIES = (
    Quantity("reward", "reward", "Reward", "mean reward", "Mean reward of sampled completions."),
    Quantity(
        *("sampling_gap", "sampling_gap/max", "Sampling gap", "|Δ log p|, nats"),
        "Sampler against learner on the same tokens: rounding noise, or the run is off-policy.",
        log=True,
        form=".1e",
    ),
    Quantity(
        *("information_gap", "information_gap/kl", "Information gap", "KL(dense ‖ shadow), nats"),
        "What eviction costs: how far the masked policy is from the dense view of the same weights.",
    ),
    Quantity(
        *("agreement", "information_gap/agreement_p5", "Agreement, 5th percentile", "agreement"),
        "exp(-|Δ log p|) between shadow and dense on the worst twentieth of tokens; 1 is equal.",
    ),
    Quantity(
        *("gradient", "grad_norm", "Gradient norm", "norm before clipping"),
        "A jump or zeros are worth a look.",
    ),
    Quantity(
        *("rejected", "correction/rejected_fraction", "Rejected share", "share of tokens"),
        "Completion tokens that an off-policy correction masks or rejects.",
    ),
)


def draw_figures(experiments: Sequence[Experiment], folder: Path) -> list[Drawn]:
    """Draw all figures into a folder. A quantity that no run has is drawn as "not measured"."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = [_quantity(quantity, experiments, folder) for quantity in QUANTITIES]
    drawn.insert(4, _kv(experiments, folder))
    drawn.insert(5, _stages(experiments, folder))
    return drawn


def _quantity(quantity: Quantity, experiments: Sequence[Experiment], folder: Path) -> Drawn:
    key = quantity.key
    if quantity.name == "sampling_gap" and experiments:  # half precision is held to another statistic
        key = f"sampling_gap/{tolerance_of(experiments[0].runs[0].settings)[0]}"
    floor = SMALLEST_GAP if quantity.log else None
    statistic = f" ({key.split('/')[1]})" if quantity.log else ""
    figure, axes = _canvas(quantity.title, quantity.unit + statistic)
    for n, experiment in enumerate(experiments):
        _band(axes, experiment, key, style(n), floor=floor)
    if quantity.log and axes.lines:
        axes.set_yscale("log")
        for limit in sorted({tolerance_of(e.runs[0].settings)[1] for e in experiments}):
            axes.axhline(limit, label=f"tolerance {limit:g}", **LIMIT)
    if quantity.name in ("agreement", "rejected"):
        axes.set_ylim(-0.02, 1.05)
    latest = _latest(experiments, lambda e: _last(e, key, quantity.form))
    return _finish(figure, axes, quantity.name, quantity.meaning, latest, folder)


def _kv(experiments: Sequence[Experiment], folder: Path) -> Drawn:
    values = [row[2] for e in experiments for key in ("peak", "dense") for row in e.band(f"kv/bytes_{key}")]
    unit, divisor = byte_unit(max(values, default=0))
    figure, axes = _canvas("KV cache of a rollout", unit)
    for n, experiment in enumerate(experiments):
        _band(axes, experiment, "kv/bytes_peak", style(n), divisor)
        _band(
            axes, experiment, "kv/bytes_dense", style(n) | {"alpha": 0.45, "marker": None}, divisor, "dense"
        )
    if axes.lines:
        axes.set_ylim(bottom=0)

    def ratio(experiment: Experiment) -> str | None:
        held, dense = (experiment.band(f"kv/bytes_{key}") for key in ("peak", "dense"))
        return f"{held[-1][1] / dense[-1][1]:.2f}x of dense" if held and dense and dense[-1][1] else None

    meaning = "Peak bytes of keys and values; pale: the same tokens with nothing evicted."
    return _finish(figure, axes, "kv_bytes", meaning, _latest(experiments, ratio), folder)


def stage_seconds(experiment: Experiment) -> dict[str, float]:
    """Mean seconds of a step in each stage; what was not measured apart is in ``rest``."""
    means = {}
    for key in ("step_time", "time/rollout", "time/rewards"):
        values = [mean for _, mean, _, _ in experiment.band(key)]
        if values:
            means[key] = sum(values) / len(values)
    if "step_time" not in means:
        return {}
    step = means.pop("step_time")
    if not means:  # a run from before stages were timed
        return {"step": step}
    return means | {"rest": max(step - sum(means.values()), 0.0)}


def _stages(experiments: Sequence[Experiment], folder: Path) -> Drawn:
    figure, axes = _canvas("Time of a step", "")
    names = [experiment.name for experiment in experiments]
    rows = [stage_seconds(experiment) for experiment in experiments]
    left = [0.0] * len(rows)
    for key, label, colour, hatch in STAGES:
        widths = [row.get(key, 0.0) for row in rows]
        if not any(widths):
            continue
        bar: Style = {"label": label, "facecolor": colour, "hatch": hatch, "edgecolor": "#777777"}
        axes.barh(range(len(rows)), widths, left=left, **bar)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.set_yticks(range(len(rows)), [name[-22:] for name in names])
    axes.invert_yaxis()
    axes.set_xlabel("seconds, mean of steps")
    if any(left):
        axes.set_xlim(right=1.6 * max(left))  # room for the legend

    def total(experiment: Experiment) -> str | None:
        seconds = stage_seconds(experiment)
        words = [f"{label} {seconds[key]:.2f} s" for key, label, _, _ in STAGES if key in seconds]
        return ", ".join(words) or None

    meaning = "Where the seconds of a step go."
    return _finish(figure, axes, "time", meaning, _latest(experiments, total), folder, steps=False)


def style(n: int) -> Style:
    """Colour, dash and marker of the n-th experiment."""
    return {
        "color": COLOURS[n % len(COLOURS)],
        "linestyle": DASHES[n % len(DASHES)],
        "marker": MARKERS[n % len(MARKERS)],
        "markersize": 3,
    }


def _band(
    axes: Axes,
    experiment: Experiment,
    key: str,
    look: Style,
    divisor: float = 1,
    suffix: str = "",
    floor: float | None = None,
) -> None:
    """The mean over seeds as a line; if there are several, their range as a band."""
    rows = experiment.band(key)
    if not rows:
        return
    steps = [row[0] for row in rows]
    mean, low, high = (
        [max(row[n], floor) / divisor if floor else row[n] / divisor for row in rows] for n in (1, 2, 3)
    )
    axes.plot(steps, mean, label=f"{experiment.name} {suffix}".strip(), **look)
    if len(experiment.runs) > 1:
        axes.fill_between(steps, low, high, color=look["color"], alpha=0.18, linewidth=0)


def _canvas(title: str, unit: str) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(5.6, 3.4), layout="constrained")
    axes = figure.subplots()
    axes.set_title(title)
    axes.set_ylabel(unit)
    return figure, axes


def _finish(
    figure: Figure, axes: Axes, name: str, meaning: str, latest: str, folder: Path, steps: bool = True
) -> Drawn:
    if steps:
        axes.set_xlabel("step")
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.3)
    if axes.lines or axes.patches:
        axes.legend(fontsize="small")
    else:
        axes.text(0.5, 0.5, "not measured", ha="center", va="center", transform=axes.transAxes)
    for suffix in (".png", ".svg"):
        save(figure, folder / f"{name}{suffix}")
    return Drawn(name, axes.get_title(), meaning, latest, folder / f"{name}.svg")


def _last(experiment: Experiment, key: str, form: str) -> str | None:
    rows = experiment.band(key)
    return f"{rows[-1][1]:{form}} at step {rows[-1][0]}" if rows else None


def _latest(experiments: Sequence[Experiment], words: Callable[[Experiment], str | None]) -> str:
    told = {experiment.name: words(experiment) for experiment in experiments}
    parts = [f"{name}: {text}" if len(told) > 1 else text for name, text in told.items() if text]
    return "; ".join(parts) or "not measured"
