"""Copies of a process: their exit status, their output, their end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shadowmask.compare.processes import Fork, can_fork, fork

PATH = {"PYTHONPATH": os.pathsep.join(sys.path)}

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="copies are used on Linux only")


def test_the_return_value_is_the_exit_status(tmp_path: Path) -> None:
    assert Fork(lambda: 0, tmp_path / "log").wait() == 0
    assert Fork(lambda: 7, tmp_path / "log").wait() == 7


def test_output_and_errors_go_to_the_log(tmp_path: Path) -> None:
    def fail() -> int:
        print("as far as here")
        raise RuntimeError("and no further")

    process = Fork(fail, tmp_path / "log")
    assert process.wait() == 1 == process.poll()
    text = (tmp_path / "log").read_text()
    assert "as far as here" in text and text.rstrip().endswith("RuntimeError: and no further")


def test_a_copy_can_be_ended(tmp_path: Path) -> None:
    process = Fork(lambda: time.sleep(60) or 0, tmp_path / "log")
    assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    process.send_signal(signal.SIGKILL)  # of what is over: nothing happens


def test_a_copy_does_not_outlive_the_process_that_made_it(tmp_path: Path) -> None:
    code = (
        "import os, time, pathlib\n"
        "from shadowmask.compare.processes import Fork\n"
        "def last():\n"
        "    pathlib.Path('pid').write_text(str(os.getpid()))\n"
        "    time.sleep(60)\n"
        "Fork(last, pathlib.Path('log')).wait()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | PATH)
    deadline = time.monotonic() + 60
    while not ((tmp_path / "pid").is_file() and (tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    copy = Path("/proc") / (tmp_path / "pid").read_text()
    assert copy.exists()
    parent.kill()
    parent.wait()
    while _runs(copy) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not _runs(copy)


def _runs(process: Path) -> bool:
    try:
        return (process / "stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


def test_the_command_line_runs_in_a_copy(tmp_path: Path) -> None:
    assert fork(["no-such-command"], tmp_path / "log").wait() == 2
    assert "unknown command" in (tmp_path / "log").read_text()
    assert isinstance(can_fork(), bool)
