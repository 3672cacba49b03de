"""Where the answer stands in what a model wrote."""

from __future__ import annotations

import re

from shadowmask.rewards.maths import boxed_answer, strip_latex
from shadowmask.rewards.numbers import CURRENCY, numbers_in, plain
from shadowmask.rewards.text import after_thinking

_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL | re.IGNORECASE)
_MARK = re.compile(r"\banswer\s*(?:is|:|=)+", re.IGNORECASE)
_SENTENCE_END = re.compile(r"[.!?](?=\s|$)|\n")


def final_text(text: str) -> str:
    """Return the short answer of a completion: the last box or answer tag, else the line after the last
    "answer:", else the first line that is not empty. The chain of thought in ``<think>`` does not count.
    """
    text = after_thinking(text)
    tags = [found.strip() for found in _TAG.findall(text)]
    if tags:
        return tags[-1]
    box = boxed_answer(text)
    if box is not None:
        return strip_latex(box)
    marks = [mark.end() for mark in _MARK.finditer(text)]
    rest = text[marks[-1] :] if marks else text
    return next((line.strip(" *_`\t") for line in rest.splitlines() if line.strip(" *_`\t")), "")


def final_answer(text: str) -> str | None:
    """Return the final mathematical answer: the last box, else what follows the last ``####``, else the
    last number of the sentence after the last "answer is", else the last number of all.
    """
    text = plain(after_thinking(text))
    box = boxed_answer(text)
    if box is not None:
        return box
    _, marker, rest = text.rpartition("####")
    if marker and rest.strip():
        return rest.strip().splitlines()[0].strip()
    for mark in reversed(list(_MARK.finditer(text))):
        number = _last(_SENTENCE_END.split(text[mark.end() :].lstrip(), maxsplit=1)[0])
        if number is not None:
            return number
    return _last(text)


def _last(text: str) -> str | None:
    found = numbers_in(CURRENCY.sub("", text))
    return str(found[-1]) if found else None
