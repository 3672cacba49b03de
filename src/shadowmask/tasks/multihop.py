"""Multi-hop: follow a parcel from hand to hand through facts that are scattered over the prompt.

    Ines passes every parcel on to Otto. The cart stands beside the old fountain. Otto passes ...
    Question: Ines gets a parcel. Who has it after it was passed on 2 times?
    Answer: Petra

Every hop must be looked up before the next is known, so a cache that lost any link of the chain shows in
the reward. The other chains are distractors of the same length: whoever only finds an end of a chain is
right once in `num_chains` times.
"""

import random
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar, final

from shadowmask.rewards.answers import final_text
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.qa import mentions
from shadowmask.tasks.base import Completion, Row, as_prompt, completion_text
from shadowmask.tasks.procedural import ProceduralTask, check_length, make_document

NAMES = (
    *("Ada", "Amir", "Anton", "Bella", "Boris", "Bruno", "Carla", "Cesar", "Clara", "Dana"),
    *("David", "Edda", "Egon", "Elena", "Emil", "Esther", "Fatima", "Felix", "Flora", "Frida"),
    *("Georg", "Greta", "Gustav", "Hanna", "Hugo", "Ida", "Igor", "Ines", "Ivan", "Jana"),
    *("Jonas", "Julia", "Karim", "Kira", "Klaus", "Lara", "Leo", "Lina", "Lucas", "Magda"),
    *("Marco", "Maria", "Milo", "Mira", "Nadia", "Nils", "Nora", "Olga", "Oscar", "Otto"),
    *("Paula", "Pedro", "Petra", "Rafael", "Rita", "Rosa", "Samir", "Sara", "Simon", "Sofia"),
    *("Stella", "Sven", "Tara", "Theo", "Tilda", "Tomas", "Ursula", "Vera", "Viktor", "Wanda"),
    *("Xenia", "Yara", "Yusuf", "Zelda", "Zoe", "Alma", "Basil", "Celia", "Dario", "Elsa"),
)

FACT = "{giver} passes every parcel on to {taker}."
QUESTION = "Question: {start} gets a parcel. Who has it after it was passed on {hops}?\nAnswer:"


@final
@dataclass(frozen=True)
class MultihopTask(ProceduralTask):
    """Name the end of one of `num_chains` chains of `num_hops` facts each."""

    name: ClassVar[str] = "multihop"

    num_hops: int = 2
    """Facts that have to be found one after the other."""
    num_chains: int = 5
    """Chains in the document, all of the same length; one is asked about."""
    num_fillers: int = 10
    """Sentences without a fact, shuffled among the facts."""
    num_words: int | None = None
    """Exact length of the document in words, instead of `num_fillers`."""
    chat: bool = False
    """Ask in a chat message instead of plain text."""

    def __post_init__(self) -> None:
        for field in ("num_hops", "num_chains"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}")
        names = self.num_chains * (self.num_hops + 1)
        if names > len(NAMES):
            raise ValueError(
                f"num_chains={self.num_chains} of num_hops={self.num_hops} need {names} names, "
                f"there are {len(NAMES)}"
            )
        check_length(self.num_fillers, self.num_words)

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give 1 to completions whose final answer names the right person and nobody else."""
        return score_each(_named_alone, completions, answer)

    def _draw(self, rng: random.Random) -> tuple[str, list[list[str]]]:
        length = self.num_hops + 1
        people = rng.sample(NAMES, self.num_chains * length)
        chains = [people[n : n + length] for n in range(0, len(people), length)]
        facts = [
            FACT.format(giver=giver, taker=taker) for chain in chains for giver, taker in pairwise(chain)
        ]
        return make_document(facts, self.num_fillers, self.num_words, rng), chains

    def _ask(self, document: str, facts: list[list[str]], rng: random.Random) -> list[Row]:
        chain = rng.choice(facts)
        hops = "once" if self.num_hops == 1 else f"{self.num_hops} times"
        question = QUESTION.format(start=chain[0], hops=hops)
        return [{"prompt": as_prompt(f"{document}\n{question}", self.chat), "answer": chain[-1]}]


def _named_alone(completion: Completion, name: str) -> float:
    text = final_text(completion_text(completion))
    return float(mentions(text, name) and not any(mentions(text, other) for other in NAMES if other != name))
