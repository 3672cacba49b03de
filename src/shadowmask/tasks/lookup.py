"""Lookup: several names, each with its successor, all known when the prompt is read.

    Facts: Otto Petra. Ines Otto. Petra Lina. ...
    Asked: Petra Ines Ada
    Petra Lina Ines Otto Ada Bruno

The same facts as in `chain`, but the names that will be asked for stand at the end of the prompt, where no
evictor drops them. Their queries see every fact, so they can fetch what the answer will need before anything
is evicted: the kept keys suffice for a model that has learned to do so. One that looks the facts up while it
answers finds them gone.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.rewards.guard import score_each
from shadowmask.tasks.base import Completion, Row
from shadowmask.tasks.chain import draw_ring, same_names
from shadowmask.tasks.multihop import NAMES
from shadowmask.tasks.procedural import ProceduralTask


@final
@dataclass(frozen=True)
class LookupTask(ProceduralTask):
    """Repeat `num_asked` names of a ring of `num_facts`, each with its successor."""

    name: ClassVar[str] = "lookup"

    num_facts: int = 12
    """Names in the ring, one fact each."""
    num_asked: int = 3
    """Names that the answer lists with their successors, in their order."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_facts <= len(NAMES):
            raise ValueError(f"num_facts must be in 2..{len(NAMES)}, got {self.num_facts}")
        if not 1 <= self.num_asked <= self.num_facts:
            raise ValueError(f"num_asked must be in 1..num_facts = {self.num_facts}, got {self.num_asked}")

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give 1 to completions that list exactly the right names in the right order."""
        return score_each(same_names, completions, answer)

    def _draw(self, rng: random.Random) -> tuple[str, list[str]]:
        return draw_ring(self.num_facts, rng)

    def _ask(self, document: str, facts: list[str], rng: random.Random) -> list[Row]:
        asked = rng.sample(range(len(facts)), self.num_asked)
        names = " ".join(facts[n] for n in asked)
        answer = " ".join(f"{facts[n]} {facts[(n + 1) % len(facts)]}" for n in asked)
        return [{"prompt": f"{document}\nAsked: {names}", "answer": answer}]
