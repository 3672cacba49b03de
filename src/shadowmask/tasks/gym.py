"""Any task of the library reasoning-gym, as ``reasoning-gym:<its name>``.

Entries are told apart by their question: a question belongs to one split under every seed. Scores are the
library's own, of the answer between <answer> and </answer>, in the last box, or after "answer:".
"""

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from typing import Any, ClassVar, final

from shadowmask.extras import check, need
from shadowmask.rewards.answers import final_text
from shadowmask.rewards.guard import score_each
from shadowmask.tasks.base import Completion, Row, Task, as_prompt, check_split, completion_text
from shadowmask.tasks.procedural import split_of

PREFIX = "reasoning-gym:"
INSTRUCTION = "\nWrite the final answer between <answer> and </answer>."
SEEDS = 2**31  # of the library's data sets; neighbouring ones of its own share entries
SPAN = 1_000  # entries of one library data set, whatever we take from it


@final
@dataclass(frozen=True)
class ReasoningGymTask(Task):
    """Entries of one data set of reasoning-gym, scored by its own verifier."""

    name: ClassVar[str] = "reasoning-gym"
    metric: ClassVar[str] = "score"

    gym: str = "chain_sum"
    """The library's name of the data set."""
    settings: dict[str, Any] = field(default_factory=dict)
    """Settings of that data set, e.g. lengths."""
    instruction: str = INSTRUCTION
    """What is put after the question."""
    chat: bool = False
    """Ask in a chat message instead of plain text."""

    def __post_init__(self) -> None:
        check("reasoning_gym")
        known = need("reasoning_gym.factory").DATASETS
        if self.gym not in known:
            near = get_close_matches(self.gym, known, n=1)
            hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(sorted(known))}"
            raise ValueError(f"reasoning-gym has no data set {self.gym!r}; {hint}")
        if {"seed", "size"} & self.settings.keys():
            raise ValueError("settings: seed and size of the data set are chosen by the task; leave them out")
        try:
            _entries(self.gym, _frozen(self.settings), 0)
        except (TypeError, AssertionError, ValueError) as error:
            raise ValueError(f"settings={self.settings!r} of {self.gym!r}: {error}") from error

    def dataset(self, split: str, size: int, seed: int) -> list[Row]:
        check_split(split)
        return list(itertools.islice(self._rows(split, seed), size))

    def reward(self, completions: list[Completion], answer: list[str], **kwargs: Any) -> list[float]:
        """Score the short answer by the library's verifier, in [0, 1]."""
        return score_each(self._score, completions, kwargs["gym_seed"], kwargs["gym_index"])

    def target(self, row: Row) -> str:
        return f" <answer>{row['answer']}</answer>"

    def _rows(self, split: str, seed: int) -> Iterator[Row]:
        """Rows of a split without end, from one library data set after the other."""
        settings = _frozen(self.settings)
        for block in itertools.count():
            gym_seed = random.Random(f"{self.gym}/{seed}/{block}").randrange(SEEDS)
            found = 0
            for n in range(SPAN):
                entry = _entry(self.gym, settings, gym_seed, n)  # kept for the verifier
                if split_of(entry["question"]) == split:
                    found += 1
                    yield self._row(entry, gym_seed, n)
            if not found:
                raise ValueError(f"reasoning-gym's {self.gym!r} has no question for the split {split!r}")

    def _row(self, entry: dict[str, Any], gym_seed: int, n: int) -> Row:
        prompt = as_prompt(entry["question"] + self.instruction, self.chat)
        answer = "" if entry["answer"] is None else str(entry["answer"])
        return {"prompt": prompt, "answer": answer, "gym_seed": gym_seed, "gym_index": n}

    def _score(self, completion: Completion, seed: int, index: int) -> float:
        settings = _frozen(self.settings)
        answer = final_text(completion_text(completion))
        entry = _entry(self.gym, settings, seed, index)
        score = _entries(self.gym, settings, seed).score_answer(answer, entry)
        return min(max(float(score), 0.0), 1.0)


@lru_cache(maxsize=64)
def _entries(gym: str, settings: Any, seed: int) -> Any:
    """The library's data set; the verifier needs its entries again, so they are made again from the seed."""
    return need("reasoning_gym").create_dataset(gym, seed=seed, size=SPAN, **_thawed(settings))


@lru_cache(maxsize=4096)
def _entry(gym: str, settings: Any, seed: int, index: int) -> Any:
    return _entries(gym, settings, seed)[index]


def _frozen(value: Any) -> Any:
    """A hashable twin of settings that came from JSON."""
    if isinstance(value, dict):
        return ("dict", tuple(sorted((name, _frozen(item)) for name, item in value.items())))
    if isinstance(value, list):
        return ("list", tuple(map(_frozen, value)))
    return value


def _thawed(value: Any) -> Any:
    if isinstance(value, tuple) and value and value[0] == "dict":
        return {name: _thawed(item) for name, item in value[1]}
    if isinstance(value, tuple) and value and value[0] == "list":
        return [_thawed(item) for item in value[1]]
    return value
