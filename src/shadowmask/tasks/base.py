"""What a task is: rows to train and to test on, and a reward that checks an answer.

A task knows nothing of models or trainers. Its `reward` has the signature that TRL calls, so the
bound method goes into `reward_funcs` as it is.
"""

from abc import ABC, abstractmethod
from typing import Any, ClassVar

SPLITS = ("train", "eval")
Completion = str | list[dict[str, Any]]


class Task(ABC):
    """A named source of prompts with checkable answers.

    Rows of the two splits never share a document, whatever their sizes and seeds. The first rows of
    a larger data set are the smaller data set of the same seed.
    """

    name: ClassVar[str]

    @abstractmethod
    def dataset(self, split: str, size: int, seed: int) -> list[dict[str, str]]:
        """Return `size` rows of a split with at least `prompt` and `answer`, the same in every process."""

    @abstractmethod
    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Score each completion against its answer, in [0, 1].

        `kwargs` takes the other columns of the rows, which TRL passes along.
        """

    def target(self, row: dict[str, str]) -> str:
        """Return the text that a model should write after the prompt, for supervised warm-up."""
        return f" {row['answer']}"


def completion_text(completion: Completion) -> str:
    """Return what was written, from plain text or from a list of chat messages."""
    if isinstance(completion, str):
        return completion
    return "".join(message["content"] for message in completion)
