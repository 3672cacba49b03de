r"""GSM8K: grade-school word problems with a number as the answer.

Zero-shot (the default) or with the first `shots` training problems as worked examples, which are then not
trained on. The answer is asked for in ``\boxed{}``; equality is `math-verify`'s.
Cobbe et al. 2021, arXiv:2110.14168.
"""

import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, final

from shadowmask.extras import check
from shadowmask.rewards.answers import final_answer
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.maths import boxed_answer, math_correct
from shadowmask.tasks.base import Completion, Prompt, Row, completion_text
from shadowmask.tasks.data import DataTask
from shadowmask.tasks.source import Hub, Table

INSTRUCTION = "Solve the problem step by step and write the final number in \\boxed{}."
QUESTION, ANSWER = "Problem:", "Solution:"
_CALCULATION = re.compile(r"<<[^<>]*>>")  # the data's own calculator notes


@final
@dataclass(frozen=True)
class Gsm8kTask(DataTask):
    """Word problems, rewarded for the right number and a little for the form of the answer."""

    name: ClassVar[str] = "gsm8k"
    hub: ClassVar[Hub] = Hub("openai/gsm8k", "main", "test")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {"question": ("question",), "answer": ("answer",)}

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
        _, answer = worked(record["answer"])
        return {"prompt": self._prompt(record["question"]), "answer": answer}

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
            record = super().records("train")[n]
            steps, answer = worked(record["answer"])
            examples.append((record["question"], f"{steps}\nThe answer is \\boxed{{{answer}}}.".strip()))
        return examples


def worked(solution: str) -> tuple[str, str]:
    """Divide a solution of the data into its steps and the number after ``####``."""
    steps, _, answer = str(solution).rpartition("####")
    return _CALCULATION.sub("", steps).strip(), answer.strip().replace(",", "")


def _correct(completion: str, answer: str) -> float:
    return float(math_correct(final_answer(completion), answer))
