"""Key-value recall: read a list of prices among other sentences, then give one of them.

    The cart stands beside the old fountain. The apple costs 427 dollars. ... The pear costs 172
    dollars.
    Question: How much does the pear cost?
    Answer: 172

The answer takes several tokens. The first is chosen with the whole prompt in view, the others by
queries that come after the eviction, so a cache that lost the fact shows in the reward. Facts set
the difficulty, fillers the length: about 9 and 8 tokens each with the tokenizer of the demo model,
180 tokens for the defaults.
"""

import random
import re
from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.tasks.base import Completion, Row, completion_text
from shadowmask.tasks.procedural import ProceduralTask, draw_fillers

ITEMS = (
    *("apple", "basket", "bottle", "bowl", "bread", "brush", "candle", "carpet", "chair", "clock"),
    *("coat", "cup", "desk", "doll", "drum", "fan", "flute", "fork", "guitar", "hammer"),
    *("hat", "jacket", "kettle", "knife", "ladder", "lamp", "lemon", "letter", "mirror", "nail"),
    *("onion", "orange", "paddle", "pan", "peach", "pear", "pen", "phone", "piano", "pillow"),
    *("plate", "pump", "radio", "ring", "rope", "saddle", "sock", "shirt", "shovel", "stool"),
    *("spoon", "sword", "table", "tent", "towel", "truck", "vase", "violin", "wagon", "wallet"),
)

QUESTION = "Question: How much does the {item} cost?\nAnswer:"
NUMBER = re.compile(r"-?\d+(?:,\d{3})*(?:\.\d+)?")


@final
@dataclass(frozen=True)
class RecallTask(ProceduralTask):
    """Recall one of `num_facts` prices from a prompt with `num_fillers` other sentences."""

    name: ClassVar[str] = "recall"

    num_facts: int = 10
    """How many items have a price; the chance of a blind guess among them is one over this."""
    num_fillers: int = 10
    """Sentences without a price, shuffled among the facts. They only lengthen the prompt."""
    price_digits: int = 3
    """Each digit is looked up by a query of its own, after the eviction: more digits, more loss."""
    questions_per_document: int = 1
    """Consecutive rows that ask about different items of one document."""

    def __post_init__(self) -> None:
        if not 1 <= self.num_facts <= len(ITEMS):
            raise ValueError(f"num_facts must be in 1..{len(ITEMS)}, got {self.num_facts}")
        if self.num_fillers < 0:
            raise ValueError(f"num_fillers must not be negative, got {self.num_fillers}")
        if self.price_digits < 2:
            raise ValueError(f"price_digits must be at least 2, got {self.price_digits}")
        if not 1 <= self.questions_per_document <= self.num_facts:
            raise ValueError(
                f"questions_per_document must be in 1..num_facts = {self.num_facts}, "
                f"got {self.questions_per_document}"
            )

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give 1 to completions whose only number, however often repeated, is the answer."""
        pairs = zip(completions, answer, strict=True)
        return [float(_numbers(completion_text(text)) == {float(price)}) for text, price in pairs]

    def _draw(self, rng: random.Random) -> tuple[str, dict[str, int]]:
        items = rng.sample(ITEMS, self.num_facts)
        numbers = range(10 ** (self.price_digits - 1), 10**self.price_digits)
        prices = dict(zip(items, rng.sample(numbers, self.num_facts), strict=True))
        sentences = [f"The {item} costs {price} dollars." for item, price in prices.items()]
        sentences += draw_fillers(self.num_fillers, rng)
        rng.shuffle(sentences)
        return " ".join(sentences), prices

    def _ask(self, document: str, facts: dict[str, int], rng: random.Random) -> list[Row]:
        return [
            {"prompt": f"{document}\n{QUESTION.format(item=item)}", "answer": str(facts[item])}
            for item in rng.sample(list(facts), self.questions_per_document)
        ]


def _numbers(text: str) -> set[float]:
    return {float(number.replace(",", "")) for number in NUMBER.findall(text)}
