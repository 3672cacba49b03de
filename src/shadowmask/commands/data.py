"""Where prompts and rewards of a training run come from: a built-in task, or the user's own data."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import disable_progress_bars, load_dataset
from datasets.exceptions import DatasetGenerationError

from shadowmask.commands.common import first_line, import_function
from shadowmask.commands.errors import UserError
from shadowmask.tasks import Task, get_task

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}


@dataclass(frozen=True)
class TrainData:
    """Rows to train on, rows to test on, and what scores a completion."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    reward: Callable[..., Any]
    task: Task | None


def load_data(args: Any, seed: int) -> TrainData:
    """Make or load the rows that ``TrainArguments`` describe.

    Raises:
        UserError: neither or both of task and data set, no reward, a missing file or column, no rows.
    """
    if (args.task is None) == (args.dataset is None):
        raise UserError("give either --task or --dataset (with --reward)")
    reward = None if args.reward is None else import_function(args.reward)
    if args.task is not None:
        task = get_task(args.task, **_as_dict(args.task_kwargs))
        if args.train_size < 1:
            raise UserError(f"train_size={args.train_size} must be at least 1")
        train = task.dataset("train", args.train_size, seed)
        held_out = task.dataset("eval", args.eval_size, seed)
        return TrainData(train, held_out, reward or task.reward, task)
    if reward is None:
        raise UserError("--dataset needs --reward module:function")
    rows = _load_rows(args.dataset, args.dataset_split)
    if len(rows) <= args.eval_size:
        raise UserError(
            f"data set {args.dataset!r} has {len(rows)} rows: too few to hold out eval_size={args.eval_size}"
        )
    cut = len(rows) - args.eval_size
    return TrainData(rows[:cut], rows[cut:], reward, None)


def _as_dict(settings: dict[str, Any] | str | None) -> dict[str, Any]:
    if not isinstance(settings, str):
        return dict(settings or {})
    try:
        return dict(json.loads(settings))
    except (json.JSONDecodeError, TypeError, ValueError) as error:
        raise UserError(f"task_kwargs={settings!r} is not a JSON object: {error}") from error


def _load_rows(name: str, split: str) -> list[dict[str, Any]]:
    if not sys.stderr.isatty():
        disable_progress_bars()
    kind = FILES.get(Path(name).suffix)
    if kind and not Path(name).is_file():
        raise UserError(f"data file {name!r} does not exist")
    if kind and not Path(name).stat().st_size:
        raise UserError(f"data file {name!r} is empty")
    try:
        if kind:
            loaded = load_dataset(kind, data_files=name, split="train")
        else:
            loaded = load_dataset(name, split=split)
    except (OSError, ValueError, DatasetGenerationError) as error:
        raise UserError(f"data set {name!r} cannot be loaded: {first_line(error)}") from error
    if "prompt" not in loaded.column_names:
        raise UserError(
            f"data set {name!r} has no column 'prompt'; its columns are {', '.join(loaded.column_names)}"
        )
    if not len(loaded):
        raise UserError(f"data set {name!r} is empty")
    return list(loaded)
