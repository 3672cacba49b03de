"""Tasks: prompts with a checkable answer. One task a file, one row here."""

import dataclasses
from difflib import get_close_matches
from typing import Any

from shadowmask.tasks.arithmetic import ArithmeticTask
from shadowmask.tasks.base import Task
from shadowmask.tasks.chain import ChainTask
from shadowmask.tasks.data import DataTask
from shadowmask.tasks.govreport import GovreportTask
from shadowmask.tasks.gsm8k import Gsm8kTask
from shadowmask.tasks.gym import PREFIX, ReasoningGymTask
from shadowmask.tasks.hard_needle import HardNeedleTask
from shadowmask.tasks.hotpotqa import HotpotqaTask
from shadowmask.tasks.lookup import LookupTask
from shadowmask.tasks.multihop import MultihopTask
from shadowmask.tasks.recall import RecallTask
from shadowmask.tasks.stand_ins import AclsumTask, AsdivTask, XsumTask
from shadowmask.tasks.tldr import TldrTask

TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in (
        *(RecallTask, MultihopTask, ChainTask, LookupTask, ArithmeticTask, HardNeedleTask),
        *(Gsm8kTask, HotpotqaTask, TldrTask, GovreportTask),
        *(AsdivTask, XsumTask, AclsumTask),
    )
}

__all__ = ["TASKS", "DataTask", "RecallTask", "Task", "get_task", "list_tasks"]


def list_tasks() -> list[str]:
    """Return the names that `get_task` knows, sorted; any data set of reasoning-gym comes on top."""
    return sorted(TASKS)


def get_task(name: str, **kwargs: Any) -> Task:
    """Build the task `name`; `kwargs` are its own settings.

    >>> get_task("recall", num_facts=4).dataset("eval", size=1, seed=0)[0]["answer"]
    '522'

    Raises:
        ValueError: for an unknown name, with the nearest known one, or for a bad setting.
        ImportError: the task needs a package that is not installed.
    """
    if name.startswith(PREFIX):
        return _build(name, ReasoningGymTask, {**kwargs, "gym": name.removeprefix(PREFIX)})
    if name in TASKS:
        return _build(name, TASKS[name], kwargs)
    nearest = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known tasks: {', '.join(list_tasks())}"
    raise ValueError(f"unknown task {name!r}; {hint}")


def _build(name: str, kind: Any, settings: dict[str, Any]) -> Task:
    known = {spec.name: spec for spec in dataclasses.fields(kind)}
    for setting, value in settings.items():
        if setting not in known:
            near = get_close_matches(setting, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"it has {', '.join(known)}"
            raise ValueError(f"task {name!r} has no setting {setting!r}; {hint}")
        wanted = type(known[setting].default)
        if wanted in (int, bool, str) and type(value) is not wanted:
            raise ValueError(f"task {name!r}: {setting}={value!r} must be of type {wanted.__name__}")
    return kind(**settings)
