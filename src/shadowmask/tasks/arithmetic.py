"""Arithmetic over facts in the prompt: find a few weights among many, then add and subtract them.

    The lamp weighs 42 grams. A cat watches from the window. The pear weighs 17 grams. ...
    Question: How many grams is the lamp plus the drum minus the pear?
    Answer: 61

Several facts are needed at once, wherever they stand. Results may be negative.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.rewards.answers import final_answer
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.numbers import to_number
from shadowmask.tasks.base import Completion, Row, as_prompt, completion_text
from shadowmask.tasks.procedural import ProceduralTask, check_length, make_document
from shadowmask.tasks.recall import ITEMS

FACT = "The {item} weighs {weight} grams."
QUESTION = "Question: How many grams is {terms}?\nAnswer:"


@final
@dataclass(frozen=True)
class ArithmeticTask(ProceduralTask):
    """Add and subtract `num_terms` of the `num_facts` weights that a document gives."""

    name: ClassVar[str] = "arithmetic"

    num_facts: int = 10
    """Items that have a weight."""
    num_terms: int = 2
    """Weights that the question combines; the sign of each but the first is drawn."""
    num_digits: int = 2
    """Digits of every weight."""
    subtract: bool = True
    """Whether terms may be subtracted; without, results are never negative."""
    num_fillers: int = 10
    """Sentences without a fact, shuffled among the facts."""
    num_words: int | None = None
    """Exact length of the document in words, instead of `num_fillers`."""
    chat: bool = False
    """Ask in a chat message instead of plain text."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_facts <= len(ITEMS):
            raise ValueError(f"num_facts must be in 1..{len(ITEMS)}, got {self.num_facts}")
        if not 1 <= self.num_terms <= self.num_facts:
            raise ValueError(f"num_terms must be in 1..num_facts = {self.num_facts}, got {self.num_terms}")
        if not 1 <= self.num_digits <= 9:
            raise ValueError(f"num_digits must be in 1..9, got {self.num_digits}")
        check_length(self.num_fillers, self.num_words)

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give 1 to completions whose final number is the result."""
        return score_each(_is_result, completions, answer)

    def _draw(self, rng: random.Random) -> tuple[str, dict[str, int]]:
        low = 10 ** (self.num_digits - 1)
        weights = {item: rng.randrange(low, 10 * low) for item in rng.sample(ITEMS, self.num_facts)}
        facts = [FACT.format(item=item, weight=weight) for item, weight in weights.items()]
        return make_document(facts, self.num_fillers, self.num_words, rng), weights

    def _ask(self, document: str, facts: dict[str, int], rng: random.Random) -> list[Row]:
        first, *others = rng.sample(list(facts), self.num_terms)
        terms, result = f"the {first}", facts[first]
        for item in others:
            sign = rng.choice((1, -1)) if self.subtract else 1
            terms += f" {'plus' if sign > 0 else 'minus'} the {item}"
            result += sign * facts[item]
        text = f"{document}\n{QUESTION.format(terms=terms)}"
        return [{"prompt": as_prompt(text, self.chat), "answer": str(result)}]


def _is_result(completion: Completion, result: str) -> float:
    found = final_answer(completion_text(completion))
    return float(found is not None and to_number(found) == int(result))
