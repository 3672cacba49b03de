"""Tasks: prompts with a checkable answer. One task a file, one row here."""

from difflib import get_close_matches

from shadowmask.tasks.base import Task
from shadowmask.tasks.recall import RecallTask

TASKS: dict[str, type[Task]] = {RecallTask.name: RecallTask}

__all__ = ["TASKS", "RecallTask", "Task", "get_task", "list_tasks"]


def list_tasks() -> list[str]:
    """Return the names that `get_task` knows, sorted."""
    return sorted(TASKS)


def get_task(name: str, **kwargs) -> Task:
    """Build the task `name`; `kwargs` are its own settings.

    >>> get_task("recall", num_facts=4).dataset("eval", size=1, seed=0)[0]["answer"]
    '522'

    Raises:
        ValueError: for an unknown name, with the nearest known one, or for a bad setting.
    """
    if name in TASKS:
        return TASKS[name](**kwargs)
    nearest = get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {nearest[0]!r}?" if nearest else f"known tasks: {', '.join(list_tasks())}"
    raise ValueError(f"unknown task {name!r}; {hint}")
