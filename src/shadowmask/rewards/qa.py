"""Short answers to questions: exact match and token F1 on normalised words, as SQuAD and HotpotQA do."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter

CLOSED = {"yes", "no", "noanswer"}  # half a word of these is worth nothing
_ARTICLES = re.compile(r"\b(?:a|an|the)\b")


def normalize(text: str) -> str:
    """Lower case, no punctuation of any script, no English articles, single spaces."""
    text = unicodedata.normalize("NFKC", text).lower()
    text = "".join(c for c in text if not unicodedata.category(c).startswith("P") and c != "`")
    return " ".join(_ARTICLES.sub(" ", text).split())


def exact_match(answer: str, gold: str) -> float:
    """1.0 if both are the same after normalisation."""
    return float(normalize(answer) == normalize(gold) != "")


def token_f1(answer: str, gold: str) -> float:
    """Harmonic mean of precision and recall over words; all or nothing for yes and no."""
    found, wanted = normalize(answer), normalize(gold)
    if {found, wanted} & CLOSED:
        return float(found == wanted)
    common = sum((Counter(found.split()) & Counter(wanted.split())).values())
    if not common:
        return 0.0
    return 2 * common / (len(found.split()) + len(wanted.split()))


def mentions(text: str, phrase: str) -> bool:
    """Whether the words of a phrase stand in a text, next to each other and in order."""
    wanted = normalize(phrase)
    return bool(wanted) and f" {wanted} " in f" {normalize(text)} "
