"""``shadowmask compare suite.yaml``: run a grid of training runs over seeds, then table and figures.

What is finished is never run again: start the same command again after an interruption.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from shadowmask.commands.errors import Interrupted, UserError
from shadowmask.compare.processes import Fork, can_fork, fork, spawn
from shadowmask.compare.runner import Outcome, as_flags, finished, run_suite
from shadowmask.compare.suite import Suite, load_suite
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.versions import collect_versions

ABOUT = """Run every cell of a suite (tasks x caches x arms x seeds) as a training run of its own, evaluate
each model on held-out prompts under every cache, and write a table and figures. Finished cells are kept: the
same command goes on where it was interrupted."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def main(argv: Sequence[str]) -> None:
    parser = _Parser(prog="shadowmask compare", description=ABOUT, allow_abbrev=False)
    parser.add_argument("suite", help="YAML file, e.g. suites/pocket.yaml")
    parser.add_argument("--output", help="folder of the results [results/<name of the suite>]")
    parser.add_argument("--quick", action="store_true", help="what the suite's `quick` says: a short version")
    parser.add_argument("--jobs", type=int, help="cells at one time [number of CPU cores]")
    parser.add_argument("--report", action="store_true", help="run nothing, only table and figures")
    parser.add_argument("--list", action="store_true", help="print the cells and stop")
    args = parser.parse_args(argv)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    jobs = cores if args.jobs is None else args.jobs
    if jobs < 1:
        raise UserError(f"--jobs {jobs} must be at least 1")
    suite = load_suite(args.suite, args.quick)
    if args.list:
        print("\n".join(cell.name for cell in suite.cells))
        return
    output = Path(args.output or f"results/{suite.name}{'-quick' if args.quick else ''}")
    check_cells(suite)
    if args.report:
        report(suite, Outcome(finished(suite, output), {}), output)
        return
    copies = can_fork()
    if not copies:
        prepare(suite)
    elif Fork(lambda: prepare(suite)).wait():  # training here would start threads, which copies do not have
        raise UserError("the pocket models could not be made; the lines above say why")
    threads = max(1, cores // jobs)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: no cell is left running
    try:
        outcome = run_suite(suite, output, jobs, threads, _say, fork if copies else spawn)
    except KeyboardInterrupt as stop:
        again = shlex.join(["shadowmask", "compare", *argv])
        raise Interrupted(f"stopped; finished cells are in {output}; go on with: {again}") from stop
    report(suite, outcome, output)
    if outcome.failed:
        name, error = next(iter(outcome.failed.items()))
        raise UserError(
            f"{len(outcome.failed)} cells failed and will be run by the next call; the first, {name}: {error}"
        )


def check_cells(suite: Suite) -> None:
    """Parse the settings of every cell as ``shadowmask train`` will, before the first one runs.

    Raises:
        UserError: names the cell.
    """
    from shadowmask.commands.train import parse_settings

    seen = set()
    for cell in suite.cells:
        settings = {k: v for k, v in cell.settings.items() if k != "seed"}
        key = json.dumps(settings, sort_keys=True)
        if key in seen:
            continue
        seen.add(key)
        try:
            parse_settings([*as_flags(cell.settings), "--output_dir", "unused"])
        except (UserError, ValueError) as error:
            raise UserError(f"cell {cell.name}: {error}") from error


def prepare(suite: Suite) -> int:
    """Build the pocket models that the cells use, once, instead of in several cells at a time; returns 0."""
    from shadowmask.demo.pocket import POCKET_MODEL, pocket_model_path
    from shadowmask.tasks import get_task

    tasks = {
        json.dumps([cell.settings.get("task"), cell.settings.get("task_kwargs")])
        for cell in suite.cells
        if cell.settings.get("model_name_or_path") == POCKET_MODEL
    }
    for name, settings in map(json.loads, sorted(tasks)):
        path = pocket_model_path(get_task(name, **(settings or {})), progress=_show_pocket)
        _say(f"pocket model of task {name!r}: {path}")
    return 0


def _show_pocket(step: int, loss: float, accuracy: float) -> None:
    if step % 100 == 0:
        _say(f"pretraining the pocket model, step {step}: loss {loss:.3f}, accuracy {accuracy:.2f}")


def report(suite: Suite, outcome: Outcome, output: Path) -> None:
    """Write table.md, summary.json, versions.json and the figures."""
    from shadowmask.compare.figures import draw_all
    from shadowmask.compare.tables import as_json, as_markdown

    page = as_markdown(suite, outcome.results, outcome.failed)
    write_atomically(output / "table.md", page)
    summary = as_json(suite, outcome.results, outcome.failed) | {"versions": collect_versions()}
    write_atomically(output / "summary.json", json.dumps(summary, indent=1) + "\n")
    figures = draw_all(suite, outcome.results, output / "figures")
    print(page)
    _say(f"{len(outcome.results)} of {len(suite.cells)} cells; table and {len(figures)} figures in {output}")


def _say(line: str) -> None:
    print(line, flush=True)
