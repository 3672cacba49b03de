"""Mathematical answers: the last box, and equality by ``math-verify``."""

from __future__ import annotations

import logging
import re
import threading
from decimal import Decimal
from typing import Any

from shadowmask.extras import need
from shadowmask.rewards.numbers import CURRENCY, MAX_CHARACTERS, NARROW_SPACE, last_number, plain, to_number

SECONDS = 5  # for one answer, where a time limit can be set
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boldsymbol)\s*\{([^{}]*)\}")
_SPACING = re.compile(r"\\[!,;:]|\{,\}|\\left|\\right|~")
_HUGE = re.compile(r"\^\s*\{?[^{}\s]*\^|\^\s*\{?\s*-?\d{4,}|\d!{2,}|\d{3,}!")  # towers: sympy would try


def boxed_answer(text: str) -> str | None:
    r"""Return the content of the last ``\boxed{...}`` that is closed and not empty, or ``None``."""
    for start in reversed([match.end() for match in re.finditer(r"\\f?box(?:ed)?\s*\{", text)]):
        depth = 1
        for end in range(start, len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if not depth:
                content = text[start:end].strip()
                if content:
                    return content
                break
    return None


def strip_latex(text: str) -> str:
    """Take text wrappers, spacing commands, dollar and percent escapes off a short answer."""
    text = _WRAPPED.sub(r" \1 ", text)
    text = re.sub(r"(?<=\d)(?:\{,\}|\\,|\\;|\\ )(?=\d{3})", ",", text)
    return _SPACING.sub("", text).replace("\\%", "%").replace("\\$", "$").strip(" $\t\n")


def math_correct(answer: str | None, gold: str) -> bool:
    """Whether an extracted answer equals the reference, up to notation.

    Raises:
        ImportError: ``math-verify`` is missing.
        ValueError: the reference itself cannot be read.
    """
    library = need("math_verify")
    limit = SECONDS if threading.current_thread() is threading.main_thread() else None
    reference = _parse(library, gold, limit)
    if not reference:
        raise ValueError(f"the reference answer {gold!r} is no number or formula")
    if not answer or len(answer) > MAX_CHARACTERS or _HUGE.search(answer):
        return False
    found = _parse(library, answer, limit)
    return bool(found) and bool(library.verify(reference, found, timeout_seconds=limit))


def _parse(library: Any, text: str, limit: int | None) -> list[Any]:
    # without a time limit, as in worker threads, the library says so once: it is meant
    for name in ("parser", "grader"):
        logging.getLogger(f"math_verify.{name}").setLevel(logging.ERROR)
    return library.parse(f"\\boxed{{{_canonical(text)}}}", parsing_timeout=limit)


def _canonical(text: str) -> str:
    """One number in any dress becomes a bare fraction; anything else goes to the parser cleaned."""
    text = CURRENCY.sub("", strip_latex(plain(text))).replace("%", "").replace(NARROW_SPACE, " ").strip()
    value = to_number(text.rpartition("=")[2])
    if value is None and re.search(r"(?<!\\)\b[A-Za-z]{2,}", re.sub(r"\\[A-Za-z]+", "", text)):
        value = last_number(text)  # "5 dollars": words around a number are its unit
    if value is None:
        return text
    if value.denominator == 1:
        return str(value.numerator)
    if "." in text and "/" not in text:  # as a decimal: the library compares those to six places
        return f"{Decimal(value.numerator) / Decimal(value.denominator):f}"
    return f"\\frac{{{value.numerator}}}{{{value.denominator}}}"
