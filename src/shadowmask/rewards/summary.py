"""Summaries: ROUGE-L by ``rouge-score``, with its stemmer. Its words are ASCII letters and digits."""

from __future__ import annotations

from functools import cache
from typing import Any

from shadowmask.extras import need


def rouge_l(summary: str, reference: str) -> float:
    """F1 of the longest common subsequence of words; an empty summary scores 0.

    Raises:
        ImportError: ``rouge-score`` is missing.
    """
    return float(_scorer().score(reference, summary)["rougeL"].fmeasure)


@cache
def _scorer() -> Any:
    return need("rouge_score.rouge_scorer").RougeScorer(["rougeL"], use_stemmer=True)
