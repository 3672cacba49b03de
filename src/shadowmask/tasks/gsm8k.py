r"""GSM8K: grade-school word problems with a number as the answer.

Zero-shot (the default) or with the first `shots` training problems as worked examples, which are then not
trained on. The answer is asked for in ``\boxed{}``; equality is `math-verify`'s.
Cobbe et al. 2021, arXiv:2110.14168.
"""

import re
from dataclasses import dataclass
from typing import Any, ClassVar, final

from shadowmask.tasks.problems import Problem, ProblemTask
from shadowmask.tasks.source import Hub

_CALCULATION = re.compile(r"<<[^<>]*>>")  # the data's own calculator notes


@final
@dataclass(frozen=True)
class Gsm8kTask(ProblemTask):
    """Grade-school word problems."""

    name: ClassVar[str] = "gsm8k"
    hub: ClassVar[Hub] = Hub("openai/gsm8k", "main", "test")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {"question": ("question",), "answer": ("answer",)}

    def problem(self, record: dict[str, Any]) -> Problem:
        return Problem(record["question"], *worked(record["answer"]))


def worked(solution: str) -> tuple[str, str]:
    """Divide a solution of the data into its steps and the number after ``####``."""
    steps, _, answer = str(solution).rpartition("####")
    return _CALCULATION.sub("", steps).strip(), answer.strip().replace(",", "")
