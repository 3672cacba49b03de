"""Where prompts and rewards of a training run come from: a built-in task, or the user's own data."""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from shadowmask.commands.common import import_function
from shadowmask.commands.errors import UserError
from shadowmask.rewards.guard import isolate_failures
from shadowmask.tasks import DataTask, Task, get_task
from shadowmask.tasks.cutting import CutReport, fit_rows, shorten_prompt
from shadowmask.tasks.source import choose_split, find_columns, load_splits

# what TRL gives a reward besides the columns of the rows
GIVEN = ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric")
ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True)
class TrainData:
    """Rows to train on, rows to test on, and what scores a completion."""

    train: list[dict[str, Any]]
    held_out: list[dict[str, Any]]
    reward: Callable[..., Any]
    task: Task | None
    own_reward: bool = True

    @property
    def metric(self) -> str:
        """What ``score`` measures."""
        return "reward" if self.task is None or self.own_reward else self.task.metric

    def score(self, **columns: Any) -> Sequence[float | None]:
        """Score held-out completions: by the task's metric, or by the user's own reward."""
        if self.task is None or self.own_reward:
            return self.reward(**columns)
        return self.task.metrics(**columns)[self.task.metric]

    def fitted(self, tokenizer: Any, limit: int | None) -> tuple[TrainData, dict[str, CutReport]]:
        """Cut the prompts to ``limit`` tokens (default: the task's), and say what that took away.

        Raises:
            ValueError: no prompt is left.
        """
        shorten = self.task.shorten if self.task else shorten_prompt
        if limit is None and self.task:
            limit = self.task.max_prompt_tokens
        train, report = fit_rows(self.train, shorten, tokenizer, limit)
        reports = {"train": report}
        held_out = self.held_out
        if held_out:
            held_out, reports["held_out"] = fit_rows(held_out, shorten, tokenizer, limit)
        return replace(self, train=train, held_out=held_out), reports


def load_data(args: Any, seed: int) -> TrainData:
    """Make or load the rows that ``TrainArguments`` describe.

    Raises:
        UserError: neither task nor data set, no reward, a missing file or column, no rows.
    """
    if args.task is None and args.dataset is None:
        raise UserError("give --task, or --dataset with --reward")
    if args.max_prompt_tokens is not None and args.max_prompt_tokens < 1:
        raise UserError(f"max_prompt_tokens={args.max_prompt_tokens} must be at least 1")
    data = _own_data(args) if args.task is None else _task_data(args, seed)
    if args.reward is not None:
        check_signature(args.reward, data.reward, data.train[0])
        data = replace(data, reward=isolate_failures(data.reward))
    return data


def make_task(args: Any) -> Task:
    """The task that ``task``, ``task_kwargs``, ``dataset`` and ``dataset_config`` describe.

    Raises:
        UserError: data for a task that makes its own.
        ValueError: an unknown task or setting.
    """
    settings = _as_dict(args.task_kwargs)
    given = {"source": args.dataset, "config": args.dataset_config}
    task = get_task(args.task, **settings)
    own = {name: value for name, value in given.items() if value is not None}
    if own and not isinstance(task, DataTask):
        raise UserError(f"task {args.task!r} makes its own prompts: leave out --dataset, or leave out --task")
    if own:
        task = dataclasses.replace(task, **own)  # type: ignore[type-var]
    return task


def _task_data(args: Any, seed: int) -> TrainData:
    task = make_task(args)
    if args.train_size < 1:
        raise UserError(f"train_size={args.train_size} must be at least 1")
    if args.eval_size < 0:
        raise UserError(f"eval_size={args.eval_size} must not be negative")
    train = task.dataset("train", args.train_size, seed)
    held_out = task.dataset("eval", args.eval_size, seed)
    if args.reward is None:
        return TrainData(train, held_out, task.reward, task, own_reward=False)
    return TrainData(train, held_out, import_function(args.reward), task)


def _own_data(args: Any) -> TrainData:
    if args.reward is None:
        raise UserError("--dataset needs --reward module:function, or a --task that has one")
    if args.task_kwargs:
        raise UserError(f"task_kwargs={args.task_kwargs!r} needs a --task")
    reward = import_function(args.reward)
    rows = _load_rows(args.dataset, args.dataset_config, args.dataset_split)
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


def _load_rows(name: str, config: str | None, split: str) -> list[dict[str, Any]]:
    splits = load_splits(name, config)
    chosen = choose_split(splits, (split,))
    if chosen is None:
        raise UserError(f"dataset_split={split!r}: data set {name!r} has the splits {', '.join(splits)}")
    table = splits[chosen]
    find_columns(name, table.column_names, {"prompt": ("prompt",)})
    if not len(table):
        raise UserError(f"data set {name!r} is empty")
    rows = list(table)
    for n, row in enumerate(rows):
        reason = prompt_fault(row["prompt"])
        if reason:
            raise UserError(f"data set {name!r}, row {n}: the prompt {reason}")
    return rows


def prompt_fault(prompt: Any) -> str | None:
    """Why a value is no prompt, neither text nor chat messages; ``None`` if it is one."""
    if isinstance(prompt, str):
        return None if prompt else "is empty"
    if not isinstance(prompt, list):
        return f"is a {type(prompt).__name__}, not text or a list of chat messages"
    if not prompt:
        return "has no messages"
    for message in prompt:
        if not isinstance(message, dict) or not {"role", "content"} <= message.keys():
            return f"has a message without role and content: {message!r}"
        if message["role"] not in ROLES:
            return f"has a message with the role {message['role']!r}, not one of {', '.join(ROLES)}"
    return None


def check_signature(spec: str, reward: Callable[..., Any], row: dict[str, Any]) -> None:
    """Raise UserError if a reward cannot be called the way TRL calls it."""
    columns = [name for name in row if name != "prompt" and not name.startswith("_")]
    given = {*GIVEN, *columns}
    try:
        inspect.signature(reward).bind(**dict.fromkeys(given))
    except TypeError as error:
        raise UserError(
            f"reward {spec!r}: {error}; it is called with {', '.join((*GIVEN, *columns))} by name, so let it "
            "take what it needs of these and **kwargs"
        ) from error
    except ValueError:  # a builtin, which tells no signature
        return
