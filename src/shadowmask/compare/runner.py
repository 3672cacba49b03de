"""Run the cells of a suite: one process each, several at a time, each exactly once.

A cell runs ``shadowmask train`` into ``running/``; only when that has ended is its result written (and
renamed into place), then the folder goes. So a machine that dies loses the running cells and nothing else,
and whoever starts the suite again goes on where it stopped.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shadowmask.compare.processes import Process, Start, spawn
from shadowmask.compare.results import DIVERGED, DONE, Result, collect, diverged, read_result, write_result
from shadowmask.compare.suite import Cell, Suite

Say = Callable[[str], None]
POLL = 0.2  # seconds between two looks at the running cells


@dataclass
class Running:
    """A cell and its process."""

    cell: Cell
    process: Process
    folder: Path
    started: float


@dataclass
class Outcome:
    """What one call did: results of all finished cells, and the errors of those that failed."""

    results: list[Result]
    failed: dict[str, str]


def run_suite(suite: Suite, output: Path, jobs: int, threads: int, say: Say, start: Start = spawn) -> Outcome:
    """Run what is not finished and return all results.

    Args:
        jobs: cells at one time.
        threads: CPU threads of each.
        start: how a cell's process is started.

    Raises:
        ValueError: a finished cell was made with other settings, or another process runs this suite.
        OSError: results cannot be written, e.g. the disk is full. Running cells are stopped.
    """
    waiting = [cell for cell in suite.cells if read_result(output, cell) is None]
    failed: dict[str, str] = {}
    if waiting:
        with _only_one(output):
            shutil.rmtree(output / "running", ignore_errors=True)  # of a process that was killed
            say(f"{len(suite.cells)} cells, {len(suite.cells) - len(waiting)} finished, {jobs} at a time")
            failed = _Pool(suite, output, jobs, threads, say, start).run(waiting)
    return Outcome(finished(suite, output), failed)


def finished(suite: Suite, output: Path) -> list[Result]:
    """The results that are there, in the order of the suite."""
    results = [read_result(output, cell) for cell in suite.cells]
    return [result for result in results if result is not None]


class _Pool:
    def __init__(self, suite: Suite, output: Path, jobs: int, threads: int, say: Say, start: Start) -> None:
        self.start = start
        self.suite, self.output, self.jobs, self.threads, self.say = suite, output, jobs, threads, say
        self.running: list[Running] = []
        self.failed: dict[str, str] = {}
        self.over = 0
        self.started = time.monotonic()

    def run(self, waiting: Sequence[Cell]) -> dict[str, str]:
        left = list(waiting)
        try:
            while left or self.running:
                while left and len(self.running) < self.jobs:
                    self._start(left.pop(0))
                time.sleep(POLL)
                for each in [each for each in self.running if each.process.poll() is not None]:
                    self.running.remove(each)
                    self._end(each, len(waiting))
        finally:
            self._stop()
        return self.failed

    def _start(self, cell: Cell) -> None:
        # of this process alone: a cell may outlive a comparison that was killed, and go on writing
        folder = self.output / "running" / f"{cell.name.replace('/', '~')}~{os.getpid()}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        settings = cell.settings | {"output_dir": str(folder), "eval_caches": self.suite.eval_caches(cell)}
        log = folder.parent / f"{folder.name}.log"
        process = self.start(["train", *as_flags(settings | {"threads": self.threads})], log)
        self.running.append(Running(cell, process, folder, time.monotonic()))
        self._log(cell, "started")

    def _end(self, each: Running, total: int) -> None:
        cell, seconds = each.cell, time.monotonic() - each.started
        code = each.process.returncode
        log = each.folder.parent / f"{each.folder.name}.log"
        last = _last_line(log)
        self.over += 1
        left = (time.monotonic() - self.started) / self.over * (total - self.over)
        nan = diverged(each.folder) or (code != 0 and "= nan" in last)
        if nan or code == 0:
            result = collect(cell, each.folder, DIVERGED if nan else DONE, seconds, last if nan else "")
            write_result(self.output, cell, result)
            self._log(cell, result.status, seconds)
            told = ", ".join(f"{name} {value:.3f}" for name, value in list(result.after.items())[:2])
            told = "DIVERGED" if nan else told
        else:
            self.failed[cell.name] = last
            self._log(cell, "failed", seconds, code=code, error=last)
            told = f"FAILED: {last}"
        self.say(f"[{self.over}/{total}] {cell.name}: {told} ({seconds:.0f} s; {left / 60:.0f} min left)")
        shutil.rmtree(each.folder, ignore_errors=True)
        log.unlink(missing_ok=True)

    def _stop(self) -> None:
        """End what still runs: only when something went wrong, or the user wants it."""
        for each in self.running:
            each.process.send_signal(signal.SIGKILL)
        for each in self.running:
            each.process.wait()

    def _log(self, cell: Cell, event: str, seconds: float | None = None, **more: Any) -> None:
        row: dict[str, Any] = {"time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), "cell": cell.name}
        row["event"] = event
        row |= {} if seconds is None else {"seconds": round(seconds, 1)}
        with (self.output / "log.jsonl").open("a") as file:
            file.write(json.dumps(row | more) + "\n")


def as_flags(settings: dict[str, Any]) -> list[str]:
    """Settings as ``shadowmask train`` takes them; mappings and lists as JSON."""
    flags = []
    for name, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict | list | bool) else str(value)
        flags += [] if value is None else [f"--{name}", text]
    return flags


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines() if log.is_file() else []
    filled = [line.strip() for line in lines if line.strip()]
    return filled[-1][:300] if filled else "no output"


@contextmanager
def _only_one(output: Path) -> Iterator[None]:
    output.mkdir(parents=True, exist_ok=True)
    with (output / ".lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"another process is running a suite into {output}") from error
        yield
