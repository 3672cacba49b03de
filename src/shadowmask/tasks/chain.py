"""Chain: write down every station of a path through facts that are scattered over the prompt.

    Facts: Otto Petra. Ines Otto. Petra Lina. ...
    Path: Ines
    Otto Petra Lina

The answer names one station after the other, so all but the first are looked up by queries that come after
the eviction, and which fact will be needed is not known before. What an evictor drops from the middle of the
path is gone: no learner can bring it back. The names form one ring, so every name is somebody's successor and
nothing but the facts tells them apart.
"""

import random
from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.rewards.guard import score_each
from shadowmask.tasks.base import Completion, Row, completion_text
from shadowmask.tasks.multihop import NAMES
from shadowmask.tasks.procedural import ProceduralTask


@final
@dataclass(frozen=True)
class ChainTask(ProceduralTask):
    """Follow a ring of `num_facts` names for `num_hops` steps."""

    name: ClassVar[str] = "chain"

    num_facts: int = 12
    """Names in the ring, one fact each."""
    num_hops: int = 3
    """Names that the answer lists."""

    def __post_init__(self) -> None:
        if not 2 <= self.num_facts <= len(NAMES):
            raise ValueError(f"num_facts must be in 2..{len(NAMES)}, got {self.num_facts}")
        if not 1 <= self.num_hops < self.num_facts:
            raise ValueError(
                f"num_hops must be in 1..num_facts - 1 = {self.num_facts - 1}, got {self.num_hops}"
            )

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Give 1 to completions that list exactly the right names in the right order."""
        return score_each(same_names, completions, answer)

    def _draw(self, rng: random.Random) -> tuple[str, list[str]]:
        return draw_ring(self.num_facts, rng)

    def _ask(self, document: str, facts: list[str], rng: random.Random) -> list[Row]:
        start = rng.randrange(len(facts))
        path = [facts[(start + hop) % len(facts)] for hop in range(self.num_hops + 1)]
        return [{"prompt": f"{document}\nPath: {path[0]}", "answer": " ".join(path[1:])}]


def draw_ring(num_facts: int, rng: random.Random) -> tuple[str, list[str]]:
    """Draw names in a ring, and the document that says who follows whom, in any order."""
    ring = rng.sample(NAMES, num_facts)
    facts = [f"{giver} {taker}." for giver, taker in zip(ring, ring[1:] + ring[:1], strict=True)]
    rng.shuffle(facts)
    return f"Facts: {' '.join(facts)}", ring


def same_names(completion: Completion, answer: str) -> float:
    """1 for the names of the answer in its order and nothing else."""
    return float(completion_text(completion).split() == answer.split())
