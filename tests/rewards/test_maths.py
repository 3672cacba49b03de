"""Mathematical answers: where they stand, and equality up to notation."""

import sys
import threading
import time

import pytest

from shadowmask.rewards import boxed_answer, final_answer, final_text, math_correct


@pytest.mark.parametrize(
    ("text", "box"),
    [
        (r"\boxed{42}", "42"),
        (r"\boxed{3}, no, \boxed{4}", "4"),
        (r"\boxed{\frac{1}{2}}", r"\frac{1}{2}"),
        (r"\boxed{ 5 }", "5"),
        (r"\fbox{5}", "5"),
        (r"\boxed{3} and then \boxed{4", "3"),  # cut off: the last that is closed
        (r"\boxed{3} and then \boxed{}", "3"),
        (r"\boxed{", None),
        (r"\boxed{}", None),
        ("42", None),
        ("", None),
    ],
)
def test_the_last_closed_box_counts(text, box):
    assert boxed_answer(text) == box


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (r"First \boxed{3}, but really \boxed{4}.", "4"),
        ("6 * 7 = 42\n#### 42", "42"),
        ("The answer is 12. It took 3 steps.", "12"),
        ("The answer is 5 + 3 = 8 because", "8"),
        ("Answer: **$1,200.50**.", "2401/2"),
        ("The answer is not clear, perhaps 7", "7"),
        ("so 5 apples and 6 pears", "6"),
        ("it falls to \u22127 degrees", "-7"),
        (r"<think>\boxed{1}</think>It is 2.", "2"),
        ("<think>It may be 3", None),
        ("nothing here", None),
        ("", None),
        ("   \n ", None),
    ],
)
def test_the_final_answer_of_a_completion(text, answer):
    assert final_answer(text) == answer


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", "42"),
        ("42", "42.00"),
        ("42", "٤٢"),
        ("1500", "1,500"),
        ("1500", "1{,}500"),
        ("1500", r"1\,500"),
        ("1500", r"\$1,500.00"),
        ("1,500", "1500"),
        ("-7", "\u22127"),
        ("0.5", "1/2"),
        ("1/2", r"\frac{1}{2}"),
        ("1/2", r"\frac12"),
        ("-3/4", r"-\dfrac{3}{4}"),
        ("1/2", "½"),
        ("5/2", r"2\frac{1}{2}"),
        ("1/3", "0.333333"),
        ("40", r"40\%"),
        ("5", r"5\text{ dollars}"),
        ("5", "5 dollars"),
        ("5", "x = 5"),
        ("7", r"\sqrt{49}"),
        ("1000", "10^3"),
    ],
)
def test_equal_answers_are_equal_whatever_they_look_like(gold, answer):
    assert math_correct(answer, gold)


@pytest.mark.parametrize(
    ("gold", "answer"),
    [
        ("42", None),
        ("42", ""),
        ("42", "forty-two"),
        ("42", "4 2"),
        ("42", "-42"),
        ("42", "142"),
        ("42", "42.5"),
        ("1500", "1.5"),
        ("4", "3,4"),
        ("1/2", "2"),
        ("42", "}{"),
        ("42", "\\frac{"),
        ("42", "9" * 5000),
    ],
)
def test_other_answers_are_not(gold, answer):
    assert not math_correct(answer, gold)


@pytest.mark.parametrize("answer", ["9^{9^{9^{9}}}", "9^9^9", "10^{99999999}", "99999!", "5!!!!"])
def test_a_tower_of_powers_costs_no_time(answer):
    started = time.monotonic()
    assert not math_correct(answer, "42")
    assert time.monotonic() - started < 3


def test_worker_threads_can_score_too():
    results: list[object] = []

    def work():
        try:
            results.append((math_correct(r"\frac{84}{2}", "42"), math_correct("41", "42")))
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert results == [(True, False)]


def test_a_reference_that_is_no_answer_is_an_error():
    with pytest.raises(ValueError, match="reference answer ''"):
        math_correct("42", "")


def test_a_missing_library_is_one_line_with_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "math_verify", None)
    with pytest.raises(ImportError, match=r"math-verify is not installed: pip install 'shadowmask\[tasks\]'"):
        math_correct("42", "42")


@pytest.mark.parametrize(
    ("text", "short"),
    [
        ("Paris", "Paris"),
        ("\n\n Paris \nIt lies on a river.", "Paris"),
        ("Let me see.\nAnswer: **Paris**\nDone", "Paris"),
        ("The answer is Paris", "Paris"),
        ("<answer>Rome</answer> no, <answer> Paris </answer>", "Paris"),
        (r"So \boxed{\text{Paris}}", "Paris"),
        ("<think>Rome?</think>\nParis", "Paris"),
        ("<think>Rome?", ""),
        ("", ""),
    ],
)
def test_the_short_answer_of_a_completion(text, short):
    assert final_text(text) == short
