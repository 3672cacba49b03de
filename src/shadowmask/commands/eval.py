"""``shadowmask eval``: a model on a task's held-out prompts, dense and under any evictors and budgets.

Every cell of the matrix answers the same prompts, so differences to dense are paired. A finished cell is
written at once; the same command goes on where it was stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import shlex
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from transformers import PreTrainedModel

from shadowmask.commands.common import load_model, parse
from shadowmask.commands.data import make_task
from shadowmask.commands.errors import Interrupted, UserError
from shadowmask.commands.eval_settings import (
    MAX_NEW_TOKENS,
    Cell,
    EvalArguments,
    make_cells,
    take_defaults,
)
from shadowmask.commands.sources import Source, find_source, fingerprint
from shadowmask.evaluation import Evaluation, Scores, evaluate
from shadowmask.planning import parse_bytes
from shadowmask.report.matrix import Matrix, table
from shadowmask.report.matrix_plot import plot_matrix
from shadowmask.report.units import format_duration
from shadowmask.report.versions import collect_versions
from shadowmask.rollout import RolloutEngine
from shadowmask.tasks import Task
from shadowmask.tasks.cutting import fit_rows

ABOUT = """Answer a task's held-out prompts with a full cache and under evictors, the same prompts everywhere,
and say what eviction costs. Of a run folder it takes the last model and, as defaults, its settings."""

OWN_VERSIONS = ("shadowmask", "torch", "transformers")  # other ones may answer differently


def main(argv: Sequence[str]) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    (args,) = parse([EvalArguments], argv, "eval", ABOUT)
    if args.limit < 1:
        raise UserError(f"limit={args.limit} must be at least 1")
    for name in ("batch_size", "threads", "max_prompt_tokens", "max_new_tokens", "evict_every"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise UserError(f"{name}={value} must be at least 1")
    if args.temperature < 0:
        raise UserError(f"temperature={args.temperature} must not be negative")
    source = find_source(args.model)
    take_defaults(args, source)
    Eval(args, source).run()


class Eval:
    """One evaluation; ``run`` lists its stages in order."""

    def __init__(self, args: EvalArguments, source: Source) -> None:
        self.args, self.source = args, source
        self.cells = make_cells(args)
        self.task = make_task(args)
        self.limit = _bytes(args.kv_memory_limit)
        default = source.run / "eval.json" if source.run else Path("eval.json")
        self.path = Path(args.save).expanduser() if args.save else default
        if self.path.suffix != ".json":
            raise UserError(f"--save {self.path} must end in .json; the plots go beside it")
        if not self.path.parent.is_dir():
            raise UserError(f"--save {self.path}: the folder {self.path.parent} does not exist")
        self.console = Console(highlight=False)

    def run(self) -> None:
        items = self.task.dataset("eval", self.args.limit, self.args.seed or 0)
        if not items:
            raise UserError(f"task {self.args.task!r} has no held-out prompts")
        if self.args.threads:
            torch.set_num_threads(self.args.threads)
        model, tokenizer = load_model(self.source.model, self.args.dtype)
        if torch.accelerator.is_available():
            model.to(torch.accelerator.current_accelerator())
        limit = self.args.max_prompt_tokens or self.task.max_prompt_tokens
        items, report = fit_rows(items, self.task.shorten, tokenizer, limit)
        self.say(f"{self.args.task}, held out: {report}")
        matrix = Matrix.open(self.path, self.settings(model, limit), digests(items), self.task.metric)
        for n, cell in enumerate(self.cells, start=1):
            place = f"[{n}/{len(self.cells)}] {cell.name}"
            if cell.name in matrix.cells:
                self.say(f"{place}: done before, taken from {self.path}")
                continue
            matrix.add(cell.name, self._run_cell(cell, place, model, tokenizer, items))
        self._report(matrix)

    def settings(self, model: PreTrainedModel, max_prompt_tokens: int | None) -> dict[str, Any]:
        """What must be equal for cells to be compared; batching and memory limits need not."""
        names = ("limit", "seed", "temperature", "max_new_tokens", "evict_every", "evictor_kwargs", "dtype")
        versions = collect_versions()
        return {
            "model": self.source.model,
            "weights": fingerprint(model),
            "task": f"{self.args.task}: {self.task!r}",
            "max_prompt_tokens": max_prompt_tokens,
            **{name: getattr(self.args, name) for name in names},
            **{f"version of {name}": versions[name] for name in OWN_VERSIONS},
        }

    def _run_cell(
        self,
        cell: Cell,
        place: str,
        model: PreTrainedModel,
        tokenizer: Any,
        items: Sequence[Mapping[str, Any]],
    ) -> dict[str, Any]:
        engine = RolloutEngine(model, tokenizer, cell.evictor, cell.evict_every, self.limit)
        started = time.perf_counter()

        def progress(done: int, of: int) -> None:
            gone = time.perf_counter() - started
            left = format_duration(gone / done * (of - done))
            self.say(f"{place}: {done}/{of} prompts, {format_duration(gone)} gone, {left} left")

        try:
            result = evaluate(
                engine,
                tokenizer,
                items,
                scorer(self.task),
                max_new_tokens=self.args.max_new_tokens or MAX_NEW_TOKENS,
                temperature=self.args.temperature,
                seed=self.args.seed or 0,
                batch_size=self.args.batch_size,
                progress=progress,
            )
        except KeyboardInterrupt as error:
            raise Interrupted(
                f"stopped in {cell.name}; finished cells are in {shlex.quote(str(self.path))} and the same "
                "command goes on"
            ) from error
        seconds = time.perf_counter() - started
        return cell_record(cell, result, seconds, self.args.batch_size, self.args.kv_memory_limit)

    def _report(self, matrix: Matrix) -> None:
        # cells of an earlier, wider matrix stay in the file, the table and the picture
        rows = matrix.rows()
        self.console.print()
        # a table is not cut to the width of a log file
        wide = Console(highlight=False, width=None if self.console.is_terminal else 200)
        wide.print(table(rows, matrix.metric))
        title = f"{self.args.task}, {rows[0].score.n} prompts, {Path(self.source.model).name}"
        plots = plot_matrix(rows, matrix.metric, title, self.path)
        methods = sorted({row.score.method for row in rows})
        self.say(
            f"intervals: {' and '.join(methods)} over prompts; differences: paired bootstrap over prompts"
        )
        self.say(f"results in {self.path}, plots in {' and '.join(str(path) for path in plots)}")

    def say(self, line: str) -> None:
        self.console.print(line, markup=False, soft_wrap=True)


def scorer(task: Task) -> Any:
    """Everything that the task measures of a completion, the reward included."""

    def score(**columns: Any) -> dict[str, Scores]:
        measured: dict[str, Scores] = dict(task.metrics(**columns))
        return measured if "reward" in measured else {**measured, "reward": task.reward(**columns)}

    return score


def cell_record(
    cell: Cell, result: Evaluation, seconds: float, batch_size: int, kv_memory_limit: str | None
) -> dict[str, Any]:
    """What is written of a finished cell."""
    return {
        "evictor": cell.evictor.name,
        "settings": repr(cell.evictor),
        "evict_every": cell.evict_every,
        "batch_size": batch_size,
        "kv_memory_limit": kv_memory_limit,
        "rows": result.rows,
        "kv_bytes_allocated": result.kv_bytes_peak,
        "seconds": round(seconds, 3),
        "versions": collect_versions(),
        "answers": [vars(answer) for answer in result.answers],
    }


def digests(items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Which prompts these are, without their text, and the reference answer of each."""
    return [
        {
            "prompt_sha256": hashlib.sha256(json.dumps(item["prompt"]).encode()).hexdigest()[:16],
            "answer": str(item.get("answer")),
        }
        for item in items
    ]


def _bytes(limit: str | None) -> int | None:
    if limit is None:
        return None
    try:
        return parse_bytes(limit)
    except ValueError as error:
        raise UserError(f"kv_memory_limit={error}") from error
