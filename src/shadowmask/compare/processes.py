"""One process per cell: a copy of this one where that is safe, else the command line started anew.

Importing the libraries takes some ten seconds, which is a third of a pocket cell. A copy has them already,
and shares nothing afterwards. It is safe while this process has only imported: no thread, no accelerator.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

COMMAND = [sys.executable, "-m", "shadowmask.cli"]


@runtime_checkable
class Process(Protocol):
    """What the runner asks of a cell's process."""

    returncode: int | None

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def send_signal(self, number: int, /) -> None: ...


Start = Callable[[Sequence[str], Path], Process]
"""Starts the command line with these arguments; what it prints goes to the file."""


def spawn(arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """Start the command line in an interpreter of its own."""
    with log.open("wb") as file:
        return subprocess.Popen(
            [*COMMAND, *arguments],
            stdout=file,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is the runner's to handle
        )


class Fork:
    """Runs a function in a copy of this process; its return value is the exit status."""

    def __init__(self, function: Callable[[], int], log: Path | None = None) -> None:
        self.returncode: int | None = None
        sys.stdout.flush()
        sys.stderr.flush()
        self.pid = os.fork()
        if self.pid == 0:
            _run_and_exit(function, log)

    def poll(self) -> int | None:
        return self._look(os.WNOHANG)

    def wait(self) -> int:
        code = self._look(0)
        assert code is not None
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def _look(self, options: int) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, options)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode


def fork(arguments: Sequence[str], log: Path) -> Fork:
    """Run the command line in a copy of this process."""

    def command() -> int:
        from shadowmask.cli import main

        return main(arguments)

    return Fork(command, log)


def _run_and_exit(function: Callable[[], int], log: Path | None) -> None:
    code = 1
    try:
        if log is not None:
            os.setsid()
            _end_with_parent()
            for number in (signal.SIGINT, signal.SIGTERM):
                signal.signal(number, signal.SIG_DFL)
            target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.dup2(target, 1)
            os.dup2(target, 2)
            # whatever stood there before may write elsewhere
            sys.stdout, sys.stderr = os.fdopen(1, "w", 1), os.fdopen(2, "w", 1)
        code = function()
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)  # without the clean-up of the process that this is a copy of


def _end_with_parent() -> None:
    """A comparison that is killed leaves no cell behind that goes on, and holds its lock."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def can_fork() -> bool:
    """False where copies are not safe: off POSIX, on macOS, or with an accelerator."""
    import torch

    return sys.platform == "linux" and not torch.accelerator.is_available()
