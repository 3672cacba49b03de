"""Numbers as people and models write them, as exact fractions.

Digits of any script, any minus sign, thousands separators (western, Indian, thin spaces), currency and
percent signs, fractions and mixed numbers. A percent sign is dropped, not applied: to a question for a
percentage, "40" and "40%" are the same answer.
"""

from __future__ import annotations

import re
import unicodedata
from fractions import Fraction

NARROW_SPACE = "\u00a0"  # stands for every space that may group digits
MINUS = "\u2010\u2011\u2012\u2013\u2212\ufe63\uff0d"  # hyphens, dashes, minus signs
SIGNS = {"\u066b": ".", "\u066c": ",", "\u2044": "/", "\u2019": "'"} | dict.fromkeys(MINUS, "-")
CURRENCY = re.compile(r"\\?[$€£¥₹]")
MAX_CHARACTERS = 200  # no answer is longer; a number of a thousand digits is no answer either

_GROUPED = (
    rf"\d{{1,3}}(?:[,'{NARROW_SPACE}]\d{{3}})+(?!\d)|\d{{1,2}}(?:,\d{{2}})+,\d{{3}}(?!\d)"
    r"|\d{1,3}(?:\.\d{3}){2,}(?!\d)|\d+"
)
_NUMBER = re.compile(
    rf"""(?P<sign>(?<![\w)\]}}])[-+])?
    (?:(?P<mixed>\d+)\s(?=\d+/\d))?
    (?=\.?\d)(?P<whole>{_GROUPED})?(?P<decimals>\.\d+)?
    (?:[eE](?P<exponent>[+-]?\d{{1,2}})(?!\w))?
    (?:\s?/\s?(?P<denominator>\d+))?""",
    re.VERBOSE,
)


def plain(text: str) -> str:
    """Spell digits, signs, spaces and fractions of any script with ASCII; leave letters alone."""
    return "".join(_plain(character) for character in text)


def _plain(character: str) -> str:
    if character.isascii():
        return character
    if character in SIGNS:
        return SIGNS[character]
    digit = unicodedata.decimal(character, None)
    if digit is not None:
        return str(digit)
    if unicodedata.category(character) == "Zs":
        return NARROW_SPACE
    name = unicodedata.name(character, "")
    if name.startswith("VULGAR FRACTION") and "NUMERATOR" not in name:
        return " " + unicodedata.normalize("NFKC", character).replace("\u2044", "/")
    if name.startswith("FULLWIDTH"):
        return unicodedata.normalize("NFKC", character)
    return character


def numbers_in(text: str) -> list[Fraction]:
    """Return every number of a text in order; ``10-3`` holds 10 and 3, ``= -3`` holds -3."""
    text = CURRENCY.sub("", plain(text))
    values = (_value(match) for match in _NUMBER.finditer(text))
    return [value for value in values if value is not None]


def last_number(text: str) -> Fraction | None:
    """Return the last number of a text, or ``None``."""
    found = numbers_in(text)
    return found[-1] if found else None


def to_number(text: str) -> Fraction | None:
    """Read a text that is one number and nothing else but signs around it, or return ``None``."""
    if len(text) > MAX_CHARACTERS:
        return None
    text = CURRENCY.sub("", plain(text)).replace("\\%", "").replace("%", "").strip().rstrip(".")
    text = re.sub(r"^([-+])\s+", r"\1", text)
    text = re.sub(r"(?<=\d) (?=\d{3}(?:\D|$))(?!\d+/)", NARROW_SPACE, text)  # here a space groups digits
    match = _NUMBER.fullmatch(text)
    return None if match is None else _value(match)


def _value(match: re.Match[str]) -> Fraction | None:
    whole, decimals = match["whole"] or "0", match["decimals"] or ""
    if len(match[0]) > MAX_CHARACTERS:
        return None
    value = Fraction(re.sub(r"\D", "", whole) + decimals)
    if match["exponent"]:
        value *= Fraction(10) ** int(match["exponent"])
    if match["denominator"]:
        if not int(match["denominator"]):
            return None
        value /= int(match["denominator"])
    value += int(match["mixed"] or 0)
    return -value if match["sign"] == "-" else value
