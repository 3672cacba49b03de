"""Hard needle: one of several look-alike facts about projects in a long document, from the package
``hard-needle``.

An offline stand-in for question answering over long contexts. Training draws on one pool of projects, people
and values, evaluation on another that shares nothing with it.
"""

import random
from dataclasses import dataclass
from typing import Any, ClassVar, final

from shadowmask.extras import check, need
from shadowmask.rewards.answers import final_text
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.qa import mentions
from shadowmask.tasks.base import Completion, Row, Task, as_prompt, check_split, completion_text

POOLS = {"train": "default", "eval": "unseen"}
MAX_NEEDLES = 8  # projects in a pool
SEPARATOR = " | "


@final
@dataclass(frozen=True)
class HardNeedleTask(Task):
    """Give the value that belongs to one project among `num_needles`."""

    name: ClassVar[str] = "hard-needle"

    num_needles: int = 3
    """Facts of the same kind in the document; one is asked for."""
    num_chars: int = 2000
    """Approximate length of the document in characters."""
    chat: bool = False
    """Ask in a chat message instead of plain text."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_needles <= MAX_NEEDLES:
            raise ValueError(f"num_needles must be in 1..{MAX_NEEDLES}, got {self.num_needles}")
        if self.num_chars < 1:
            raise ValueError(f"num_chars must be at least 1, got {self.num_chars}")
        check("hard_needle")

    def dataset(self, split: str, size: int, seed: int) -> list[Row]:
        check_split(split)
        return [self._row(POOLS[split], random.Random(f"{split}/{seed}/{n}")) for n in range(size)]

    def reward(self, completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float]:
        """Give 1 to completions whose short answer has the value and none of the `others` in the document."""
        return score_each(_score, completions, answer, kwargs["others"])

    def _row(self, pool: str, rng: random.Random) -> Row:
        example = need("hard_needle").generate_hard_example(
            num_needles=self.num_needles, ctx_chars=self.num_chars, seed=rng.getrandbits(63), pool_set=pool
        )
        value = example["target"]
        others = [record["value"] for record in example["needle_records"] if record["value"] != value]
        prompt = as_prompt(example["prompt"], self.chat)
        return {"prompt": prompt, "answer": value, "others": SEPARATOR.join(others)}


def _score(completion: Completion, answer: str, others: str) -> float:
    text = final_text(completion_text(completion))
    rivals = [other for other in others.split(SEPARATOR) if other]
    return float(mentions(text, answer) and not any(mentions(text, rival) for rival in rivals))
