"""What a task is: rows to train and to test on, and a reward that checks an answer.

A task knows nothing of models or trainers. Its `reward` has the signature that TRL calls, so the
bound method goes into `reward_funcs` as it is.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from shadowmask.rewards.text import Completion, completion_text

SPLITS = ("train", "eval")
Prompt = str | list[dict[str, Any]]
Row = dict[str, Any]

__all__ = ["SPLITS", "Completion", "Prompt", "Row", "Task", "as_prompt", "check_split", "completion_text"]


class Task(ABC):
    """A named source of prompts with checkable answers.

    Rows of the two splits never share a document, whatever their sizes and seeds. The first rows of
    a larger data set are the smaller data set of the same seed.
    """

    name: ClassVar[str]
    metric: ClassVar[str] = "accuracy"
    """The one of `metrics` that a table has room for."""
    max_prompt_tokens: ClassVar[int | None] = None
    """Longer prompts are cut to this, unless the user says otherwise. None: nothing is cut."""

    @abstractmethod
    def dataset(self, split: str, size: int, seed: int) -> list[Row]:
        """Return `size` rows of a split with at least `prompt` and `answer`, the same in every process.

        A task with data of its own returns what there is, at most `size` rows. Columns whose name
        starts with an underscore are for `shorten` and are dropped before training.
        """

    @abstractmethod
    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Score each completion against its answer, in [0, 1].

        `kwargs` takes the other columns of the rows, which TRL passes along.
        """

    def metrics(self, completions: list[Completion], answer: list[str], **kwargs) -> dict[str, list[float]]:
        """What evaluation reports, by name, one value per completion. The default is the reward."""
        return {self.metric: self.reward(completions, answer, **kwargs)}

    def shorten(self, row: Row, surplus: int, tokenizer: Any) -> Row | None:
        """Return the row with a prompt about `surplus` tokens shorter, or None if nothing may be cut."""
        return None

    def target(self, row: Row) -> str:
        """Return the text that a model should write after the prompt, for supervised warm-up."""
        return f" {row['answer']}"


def check_split(split: str) -> None:
    """Raise ValueError for a split that no task has."""
    if split not in SPLITS:
        raise ValueError(f"split must be one of {SPLITS}, got {split!r}")


def as_prompt(text: str, chat: bool) -> Prompt:
    """Return a prompt as one user message of a chat, or as it is."""
    return [{"role": "user", "content": text}] if chat else text
