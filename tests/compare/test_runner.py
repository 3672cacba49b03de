"""Cells run once, are run again if they did not end, and are never lost or dropped."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shadowmask.compare.results as results_module
from compare_fakes import started, suite_of
from shadowmask.compare.results import DIVERGED, POINTS, read_result, result_path, thin
from shadowmask.compare.runner import as_flags, run_suite


def say(_: str) -> None:
    pass


def test_every_cell_runs_once_and_is_never_run_again(fake: Path) -> None:
    suite = suite_of()
    first = run_suite(suite, fake / "out", 2, 1, say)
    assert len(first.results) == len(suite.cells) == 9 and not first.failed
    assert sorted(started(fake)) == sorted(f"{m} {s}" for m in ("dense", "naive", "smd") for s in range(3))
    again = run_suite(suite, fake / "out", 2, 1, say)
    assert again == first and len(started(fake)) == 9
    assert not (fake / "out" / "running").exists() or not list((fake / "out" / "running").iterdir())


def test_more_seeds_run_only_what_is_new(fake: Path) -> None:
    run_suite(suite_of(seeds=1), fake / "out", 2, 1, say)
    run_suite(suite_of(seeds=2), fake / "out", 2, 1, say)
    assert len(started(fake)) == 6


def test_a_cell_of_other_settings_is_not_taken_for_this_one(fake: Path) -> None:
    run_suite(suite_of(seeds=1), fake / "out", 2, 1, say)
    with pytest.raises(ValueError, match=r"made with another learning_rate than the suite says"):
        run_suite(suite_of({"smd": 0.2}, seeds=1), fake / "out", 2, 1, say)


def test_a_diverged_cell_is_recorded_as_diverged(fake: Path) -> None:
    suite = suite_of({"naive": "nan"}, seeds=1)
    outcome = run_suite(suite, fake / "out", 1, 1, say)
    status = {result.arm: result.status for result in outcome.results}
    assert status == {"dense": "done", "naive": DIVERGED, "smd": "done"} and not outcome.failed
    run_suite(suite, fake / "out", 1, 1, say)
    assert len(started(fake)) == 3, "diverging is a result: it is not tried again"


def test_a_failed_cell_is_told_and_run_again(fake: Path) -> None:
    suite = suite_of({"naive": "crash"}, seeds=1)
    outcome = run_suite(suite, fake / "out", 1, 1, say)
    assert outcome.failed == {"t/c/naive/seed0": "shadowmask train: the cache is on fire"}
    assert len(outcome.results) == 2
    (fake / "repaired").touch()
    assert len(run_suite(suite, fake / "out", 1, 1, say).results) == 3
    assert started(fake).count("naive 0") == 2 and len(started(fake)) == 4


def test_a_killed_comparison_loses_the_running_cell_only(fake: Path) -> None:
    """The real signal to the real process; the cell that it was in is run again from its start."""
    code = (
        "import sys; sys.path[:0] = sys.argv[1:]\n"
        "import shadowmask.compare.processes as p\n"
        "import shadowmask.compare.runner as r\n"
        "from compare_fakes import suite_of\n"
        "from pathlib import Path\n"
        "p.COMMAND = [sys.executable, 'fake.py']\n"
        "r.run_suite(suite_of({'smd': 'slow'}, seeds=1), Path('out'), 1, 1, print)\n"
    )
    here = [str(Path(__file__).parents[1]), *sys.path]
    process = subprocess.Popen(
        [sys.executable, "-c", code, *here], stdout=subprocess.DEVNULL, start_new_session=True
    )
    deadline = time.monotonic() + 60
    while "smd 0" not in started(fake) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    suite = suite_of({"smd": "slow"}, seeds=1)
    kept = [cell.arm for cell in suite.cells if read_result(fake / "out", cell)]
    assert sorted(kept) == ["dense", "naive"]
    _end_orphans(fake)
    fast = (fake / "fake.py").read_text().replace("time.sleep(60)", "pass")
    (fake / "fake.py").write_text(fast)
    assert len(run_suite(suite, fake / "out", 1, 1, say).results) == 3
    assert started(fake) == ["dense 0", "naive 0", "smd 0", "smd 0"]


def _end_orphans(folder: Path) -> None:
    """The sleeping stand-in outlives the process that was killed; end it by its own id."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder) == os.readlink(entry / "cwd") and b"fake.py" in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)
        except OSError:
            continue


def test_a_full_disk_loses_the_running_cell_only(fake: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    suite = suite_of(seeds=1)
    written: list[Path] = []
    original = results_module.write_atomically

    def full(path: Path, text: str) -> None:
        if len(written) == 1:
            raise OSError(28, "No space left on device")
        written.append(path)
        original(path, text)

    monkeypatch.setattr(results_module, "write_atomically", full)
    with pytest.raises(OSError, match="No space left"):
        run_suite(suite, fake / "out", 1, 1, say)
    monkeypatch.setattr(results_module, "write_atomically", original)
    assert len(run_suite(suite, fake / "out", 1, 1, say).results) == 3
    assert len(started(fake)) == 4, "one cell was run twice, no finished one"


def test_two_runs_of_a_suite_at_a_time_are_refused(fake: Path) -> None:
    import fcntl

    (fake / "out").mkdir()
    with (fake / "out" / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ValueError, match="another process is running a suite"):
            run_suite(suite_of(), fake / "out", 1, 1, say)


def test_a_damaged_result_is_named(fake: Path) -> None:
    suite = suite_of(seeds=1)
    run_suite(suite, fake / "out", 1, 1, say)
    path = result_path(fake / "out", suite.cells[0])
    path.write_text("{")
    with pytest.raises(ValueError, match="is damaged"):
        run_suite(suite, fake / "out", 1, 1, say)


def test_the_log_keeps_every_start_and_end(fake: Path) -> None:
    run_suite(suite_of({"naive": "crash"}, seeds=1), fake / "out", 1, 1, say)
    run_suite(suite_of({"naive": "crash"}, seeds=1), fake / "out", 1, 1, say)
    lines = (fake / "out" / "log.jsonl").read_text().splitlines()
    assert sum('"started"' in line for line in lines) == 4
    assert sum('"failed"' in line and "on fire" in line for line in lines) == 2


def test_curves_are_thinned_by_means() -> None:
    rows = [{"step": n + 1, "reward": float(n)} for n in range(100)]
    points = thin(rows, "reward")
    assert len(points) == POINTS and points[0] == [4, 1.5] and points[-1] == [100, 97.5]
    assert thin(rows[:3], "reward") == [[1, 0.0], [2, 1.0], [3, 2.0]]
    assert thin(rows, "missing") == []


def test_settings_become_flags() -> None:
    flags = as_flags({"seed": 1, "bf16": False, "task_kwargs": {"num_facts": 3}, "budget": None})
    assert flags == ["--seed", "1", "--bf16", "false", "--task_kwargs", '{"num_facts": 3}']
