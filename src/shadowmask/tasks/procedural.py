"""What procedural tasks share: documents of exact length, and splits that no seed can mix.

A document is a list of sentences, facts among fillers. It belongs to a split by its content, so the
same document is never trained on under one seed and tested under another.
"""

import hashlib
import random
from abc import abstractmethod
from typing import Any

from shadowmask.tasks.base import Row, Task, check_split

EVAL_SHARE = 4  # one document in four belongs to the held-out split
MAX_DRAWS = 10_000  # of documents for one row: settings that leave a split empty must not hang

FILLERS = (
    "The market opens early in the morning.",
    "A light rain fell during the night.",
    "The cart stands beside the old fountain.",
    "Children play in the narrow street.",
    "The baker waves to a friend.",
    "Two dogs sleep in the warm sun.",
    "The music from the square is loud.",
    "A woman carries flowers to her house.",
    "The bridge was painted last spring.",
    "Nobody remembers the name of the inn.",
    "The river runs slowly past the mill.",
    "Some visitors arrive by train at noon.",
    "The mayor likes to walk in the park.",
    "A cat watches from the window.",
    "The wind moves the flags gently.",
    "Most of the stalls have a red roof.",
    "The bell of the tower rings every hour.",
    "An old man tells a long story.",
    "The road to the village is quiet.",
    "Fresh snow covers the distant hills.",
    "The library is closed on holidays.",
    "A boat waits near the wooden pier.",
    "The teacher talks with her students.",
    "Someone left a door open in the hall.",
)

# one of every length from 1 to 5, for what the fillers above leave over
SHORT_FILLERS = (
    "Silence.",
    "Birds sing.",
    "The clock ticks.",
    "Leaves fall without noise.",
    "Nobody hurries on Sunday mornings.",
)


class ProceduralTask(Task):
    """A task that draws its documents itself."""

    def dataset(self, split: str, size: int, seed: int) -> list[Row]:
        check_split(split)
        rows: list[Row] = []
        while len(rows) < size:
            # Seeded by the row's own place: what stands here does not depend on `size`.
            rows += self._rows(split, random.Random(f"{split}/{seed}/{len(rows)}"))
        return rows[:size]

    def _rows(self, split: str, rng: random.Random) -> list[Row]:
        """Draw documents until one belongs to the split, and ask about it."""
        for _ in range(MAX_DRAWS):
            document, facts = self._draw(rng)
            if split_of(document) == split:
                return self._ask(document, facts, rng)
        raise ValueError(
            f"task {self.name!r}: its settings leave no document for the split {split!r}: {self}"
        )

    @abstractmethod
    def _draw(self, rng: random.Random) -> tuple[str, Any]:
        """Draw a document and the facts in it."""

    @abstractmethod
    def _ask(self, document: str, facts: Any, rng: random.Random) -> list[Row]:
        """Make rows that ask about the facts of a document."""


def split_of(document: str) -> str:
    """Assign a document to a split by its content, which keeps the splits apart for all seeds."""
    digest = hashlib.sha256(document.encode()).digest()
    return "eval" if digest[0] % EVAL_SHARE == 0 else "train"


def draw_fillers(count: int, rng: random.Random) -> list[str]:
    """Draw sentences without facts; they repeat only when all were used."""
    sentences: list[str] = []
    for start in range(0, count, len(FILLERS)):
        sentences += rng.sample(FILLERS, min(len(FILLERS), count - start))
    return sentences


def fill_words(words: int, rng: random.Random) -> list[str]:
    """Draw sentences without facts that have exactly `words` words together."""
    sentences: list[str] = []
    longest = max(len(filler.split()) for filler in FILLERS)
    while words > longest:
        for filler in rng.sample(FILLERS, len(FILLERS)):
            if words <= longest:
                break
            sentences.append(filler)
            words -= len(filler.split())
    while words > 0:
        fitting = [filler for filler in (*FILLERS, *SHORT_FILLERS) if len(filler.split()) == words]
        sentence = rng.choice(fitting) if fitting else SHORT_FILLERS[-1]
        sentences.append(sentence)
        words -= len(sentence.split())
    return sentences


def make_document(facts: list[str], num_fillers: int, num_words: int | None, rng: random.Random) -> str:
    """Shuffle facts among fillers: so many of them, or as many as make `num_words` words in all.

    Raises:
        ValueError: the facts alone are longer than `num_words`.
    """
    if num_words is None:
        sentences = facts + draw_fillers(num_fillers, rng)
    else:
        spoken = sum(len(fact.split()) for fact in facts)
        if spoken > num_words:
            raise ValueError(f"num_words={num_words} is too small: the facts alone have {spoken} words")
        sentences = facts + fill_words(num_words - spoken, rng)
    rng.shuffle(sentences)
    return " ".join(sentences)


def check_length(num_fillers: int, num_words: int | None) -> None:
    """Raise ValueError for lengths that no document can have."""
    if num_fillers < 0:
        raise ValueError(f"num_fillers must not be negative, got {num_fillers}")
    if num_words is not None and num_words < 1:
        raise ValueError(f"num_words must be at least 1, got {num_words}")
