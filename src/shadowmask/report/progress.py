"""What a run shows while it goes on: a live display on a terminal, one plain line per step elsewhere.

It is fed with dictionaries in the names of `metrics.jsonl` and knows nothing of trainers.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from shadowmask.report.units import byte_unit, format_duration

SHOWN_STEPS = 12  # of the live table; metrics.jsonl has all

Metrics = Mapping[str, Any]


class ProgressDisplay:
    """Shows the steps of a training run; `with display:` brackets the part with steps.

    Args:
        total_steps: may also be given to `start`, when the trainer knows it.
        console: where to write; by default standard output. Live only if that is a terminal.
    """

    def __init__(self, total_steps: int | None = None, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False, soft_wrap=True)
        self.eta = Eta(total_steps)
        self._rows: deque[list[str]] = deque(maxlen=SHOWN_STEPS)
        self._bar = Progress(
            TextColumn("step {task.completed}/{task.total}"),
            BarColumn(bar_width=40),
            TextColumn("{task.fields[times]}"),
        )
        self._task: TaskID | None = None
        self._live: Live | None = None

    def __enter__(self) -> ProgressDisplay:
        if self.console.is_terminal and not self.console.is_dumb_terminal:
            # get_renderable: the clock goes on between steps, which take many seconds
            self._live = Live(get_renderable=self._render, console=self.console, refresh_per_second=2)
            self._live.start()
        self.eta.begin()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._live:
            self._live.stop()
            self._live = None

    def start(self, total_steps: int, done: int = 0) -> None:
        """Say how many steps there are, and how many a resumed run has behind it."""
        self.eta = Eta(total_steps)
        self.eta.begin(done)

    def update(self, metrics: Metrics) -> None:
        """Show one step; `metrics` has its number under `step`."""
        self.eta.update(int(metrics["step"]))
        if self._live:
            self._rows.append([column(metrics) for column in COLUMNS.values()])
            self._live.refresh()
        else:
            self.console.print(plain_line(metrics, self.eta), markup=False)

    def say(self, message: str) -> None:
        """Print a line; above the table, while that is live."""
        self.console.print(Text(message))

    def _render(self) -> Group:
        table = Table(box=None, pad_edge=False, header_style="bold")
        for name in COLUMNS:
            table.add_column(name, justify="right")
        for row in self._rows:
            table.add_row(*row)
        if self.eta.total is None:
            return Group(table)
        if self._task is None:
            self._task = self._bar.add_task("", total=self.eta.total, times="")
        self._bar.update(self._task, total=self.eta.total, completed=self.eta.done, times=self.eta.describe())
        return Group(table, self._bar)


class Eta:
    """Time left, from the mean time of the steps seen so far."""

    def __init__(self, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total, self.done = total, 0
        self._clock = clock
        self.begin()

    def begin(self, done: int = 0) -> None:
        self._first, self._started = done, self._clock()
        self._last = self._started
        self.done = done

    def update(self, done: int) -> None:
        self.done, self._last = done, self._clock()

    def seconds_left(self) -> float | None:
        """Seconds from now to the end; `None` before the first step or without a total."""
        seen = self.done - self._first
        if self.total is None or seen <= 0:
            return None
        at_last_step = (self._last - self._started) / seen * (self.total - self.done)
        return max(at_last_step - (self._clock() - self._last), 0.0)

    def describe(self) -> str:
        left = self.seconds_left()
        elapsed = format_duration(self._clock() - self._started)
        return f"{elapsed} gone" if left is None else f"{elapsed} gone, {format_duration(left)} left"


def plain_line(metrics: Metrics, eta: Eta) -> str:
    """One step as a line of plain text, for a pipe or a log file."""
    total = "" if eta.total is None else f"/{eta.total}"
    parts = [f"step {metrics['step']}{total}"]
    for name, column in COLUMNS.items():
        if name != "step" and (shown := column(metrics)):
            parts.append(f"{name} {shown}")
    left = eta.seconds_left()
    if left is not None:
        parts.append(f"eta {format_duration(left)}")
    return "  ".join(parts)


def _number(key: str, form: str) -> Callable[[Metrics], str]:
    """A column that is empty where the step did not measure it."""

    def column(metrics: Metrics) -> str:
        value = metrics.get(key)
        return "" if value is None else format(value, form)

    return column


def _kv(metrics: Metrics) -> str:
    peak, dense = metrics.get("kv/bytes_peak"), metrics.get("kv/bytes_dense")
    if peak is None or dense is None:
        return ""
    unit, divisor = byte_unit(dense)  # one unit for both, so that they can be compared at a glance
    return f"{peak / divisor:.3g}/{dense / divisor:.3g} {unit}"


COLUMNS: dict[str, Callable[[Metrics], str]] = {
    "step": _number("step", "d"),
    "reward": _number("reward", ".3f"),
    "sampling gap max": _number("sampling_gap/max", ".1e"),
    "information gap KL": _number("information_gap/kl", ".3f"),
    "KV evicted/dense": _kv,
}
