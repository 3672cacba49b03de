"""What word problems share: worked examples, a number in a box as the answer, equality by `math-verify`."""

from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from shadowmask.extras import check
from shadowmask.rewards.answers import final_answer
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.maths import boxed_answer, math_correct
from shadowmask.tasks.base import Completion, Prompt, Row, completion_text
from shadowmask.tasks.data import DataTask
from shadowmask.tasks.source import Table

INSTRUCTION = "Solve the problem step by step and write the final number in \\boxed{}."
QUESTION, ANSWER = "Problem:", "Solution:"


@dataclass(frozen=True)
class Problem:
    """A question, the steps of a solution (may be empty) and the number that it comes to."""

    question: str
    steps: str
    answer: str


@dataclass(frozen=True)
class ProblemTask(DataTask):
    """Word problems, rewarded for the right number and a little for the form of the answer."""

    shots: int = 0
    """Worked examples before the problem; the published setting has 6."""
    format_weight: float = 0.1
    """Share of the reward that a boxed answer earns, right or wrong."""

    def __post_init__(self) -> None:
        if self.shots < 0:
            raise ValueError(f"shots must not be negative, got {self.shots}")
        if not 0 <= self.format_weight <= 1:
            raise ValueError(f"format_weight must be in 0..1, got {self.format_weight}")
        check("math_verify")

    def records(self, split: str) -> Table:
        records = super().records(split)
        if split != "train" or not self.shots:
            return records
        if len(records) <= self.shots:
            raise ValueError(
                f"shots={self.shots} needs more than that many training rows, "
                f"data set {self.where!r} has {len(records)}"
            )
        return records.pick(range(self.shots, len(records)))

    def row(self, record: dict[str, Any]) -> Row:
        problem = self.problem(record)
        return {"prompt": self._prompt(problem.question), "answer": problem.answer}

    @abstractmethod
    def problem(self, record: dict[str, Any]) -> Problem:
        """Read a record of the data set."""

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give `1 - format_weight` for the right number and `format_weight` for a boxed one."""
        return score_each(self._score, completions, answer)

    def metrics(self, completions: list[Completion], answer: list[str], **kwargs) -> dict[str, list[float]]:
        texts = [self._answer_part(completion) for completion in completions]
        return {
            "accuracy": score_each(_correct, texts, answer),
            "boxed": [float(boxed_answer(text) is not None) for text in texts],
        }

    def target(self, row: Row) -> str:
        return f" \\boxed{{{row['answer']}}}"

    def _score(self, completion: Completion, answer: str) -> float:
        text = self._answer_part(completion)
        boxed = float(boxed_answer(text) is not None)
        return (1 - self.format_weight) * _correct(text, answer) + self.format_weight * boxed

    def _answer_part(self, completion: Completion) -> str:
        """Without what a base model makes up after its answer: the next problem."""
        return completion_text(completion).split(f"\n{QUESTION}")[0]

    def _prompt(self, question: str) -> Prompt:
        if not self.chat:
            asked = [f"{QUESTION} {q}\n{ANSWER} {a}" for q, a in self._examples]
            return "\n\n".join([INSTRUCTION, *asked, f"{QUESTION} {question}\n{ANSWER}"])
        messages: list[dict[str, Any]] = []
        for q, a in self._examples:
            messages += [
                {"role": "user", "content": f"{q}\n{INSTRUCTION}"},
                {"role": "assistant", "content": a},
            ]
        return [*messages, {"role": "user", "content": f"{question}\n{INSTRUCTION}"}]

    @cached_property
    def _examples(self) -> list[tuple[str, str]]:
        examples: list[tuple[str, str]] = []
        for n in range(self.shots):
            shown = self.problem(super().records("train")[n])
            examples.append(
                (shown.question, f"{shown.steps}\nThe answer is \\boxed{{{shown.answer}}}.".strip())
            )
        return examples


def _correct(completion: str, answer: str) -> float:
    return float(math_correct(final_answer(completion), answer))
