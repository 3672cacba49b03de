"""Numbers in every dress that models put them in."""

from fractions import Fraction

import pytest

from shadowmask.rewards import last_number, numbers_in, to_number


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("42", 42),
        ("+42", 42),
        ("042", 42),
        ("42.", 42),
        ("-7", -7),
        ("\u22127", -7),  # minus sign
        ("\u20137", -7),  # en dash
        ("- 7", -7),
        ("٤٢", 42),
        ("\uff14\uff12", 42),  # full width
        ("१२", 12),
        ("1,234,567", 1234567),
        ("12,34,567", 1234567),  # Indian grouping
        ("1.234.567", 1234567),
        ("1 234", 1234),
        ("1\u202f234", 1234),
        ("1\u00a0234.5", Fraction("1234.5")),
        ("1'234", 1234),
        ("1\u2019234", 1234),
        ("$1,234.50", Fraction("1234.5")),
        ("-$5", -5),
        ("$-5", -5),
        ("\\$5", 5),
        ("5 €", 5),
        ("50%", 50),
        ("50\\%", 50),
        ("5\uff05", 5),
        ("1/2", Fraction(1, 2)),
        ("-3/4", Fraction(-3, 4)),
        ("½", Fraction(1, 2)),
        ("2½", Fraction(5, 2)),
        ("2 1/2", Fraction(5, 2)),
        ("-2 1/2", Fraction(-5, 2)),
        (".5", Fraction(1, 2)),
        ("1e3", 1000),
        ("2.5E-1", Fraction(1, 4)),
    ],
)
def test_a_number_in_any_dress_is_read(written, value):
    assert to_number(written) == value


@pytest.mark.parametrize(
    "written",
    ["", " ", "-", "seven", "5 dollars", "1, 2", "1,23", "3/0", "1 2", "x", "1.2.3", "10²", "9" * 1000],
)
def test_what_is_no_number_is_none(written):
    assert to_number(written) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("10-3 = 7", [10, 3, 7]),
        ("it is -3, not 3", [-3, 3]),
        ("x-5", [5]),
        ("(-4)", [-4]),
        ("3\u20135 days", [3, 5]),
        ("US$5 to €6", [5, 6]),
        ("100 200", [100, 200]),
        ("- 6 pears", [6]),
        ("1,234 and 5,6", [1234, 5, 6]),
        ("nothing", []),
        ("", []),
        ("1/0", []),
    ],
)
def test_the_numbers_of_a_text(text, found):
    assert numbers_in(text) == found
    assert last_number(text) == (found[-1] if found else None)
