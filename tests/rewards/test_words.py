"""Short answers and summaries."""

import sys

import pytest

from shadowmask.rewards import completion_text, exact_match, mentions, rouge_l, token_f1
from shadowmask.rewards.summary import _scorer


@pytest.mark.parametrize(
    ("answer", "gold"),
    [("The Viola!", "viola"), ("  a  viola ", "the viola"), ("\u201cViola\u201d", "viola"), ("212.", "212")],
)
def test_exact_match_looks_at_words_only(answer, gold):
    assert exact_match(answer, gold) == 1.0
    assert token_f1(answer, gold) == 1.0


@pytest.mark.parametrize(("answer", "gold"), [("", "viola"), ("", ""), ("violas", "viola"), ("the", "a")])
def test_other_words_do_not_match(answer, gold):
    assert exact_match(answer, gold) == 0.0
    assert token_f1(answer, gold) == 0.0


@pytest.mark.parametrize(
    ("answer", "gold", "value"),
    [
        ("old viola", "viola", 2 / 3),
        ("viola viola", "viola", 2 / 3),  # a word counts as often as the reference has it
        ("Tilo Brandt of Ostmere", "Tilo Brandt", 2 / 3),
        ("yes", "yes", 1.0),
        ("yes indeed", "yes", 0.0),  # closed answers are all or nothing
        ("no", "no way", 0.0),
    ],
)
def test_f1_counts_common_words(answer, gold, value):
    assert token_f1(answer, gold) == pytest.approx(value)


def test_a_phrase_is_mentioned_by_whole_words_in_order():
    assert mentions("It was Dr. Sarah Cheng, I think", "dr sarah cheng")
    assert not mentions("Dr. Sarah Cheng", "Dr. Sarah Chen")
    assert not mentions("Chen Sarah Dr", "Dr. Sarah Chen")
    assert not mentions("anything", "...")


def test_rouge_l_by_hand():
    # the first has all of its 5 words in order among the 6 of the second
    assert rouge_l("the cat sat the mat", "the cat sat on the mat") == pytest.approx(10 / 11)
    assert rouge_l("", "the cat") == 0.0
    assert rouge_l("the cat", "") == 0.0
    assert rouge_l("running", "run") == 1.0  # stemmed


def test_a_missing_scorer_is_one_line_with_the_remedy(monkeypatch):
    _scorer.cache_clear()
    monkeypatch.setitem(sys.modules, "rouge_score", None)
    with pytest.raises(ImportError, match=r"rouge-score is not installed: pip install 'shadowmask\[tasks\]'"):
        rouge_l("a", "b")


@pytest.mark.parametrize(
    ("completion", "text"),
    [
        ("as it is", "as it is"),
        ([{"role": "assistant", "content": "said"}], "said"),
        ([{"role": "assistant", "content": None}], ""),
        ([{"role": "assistant"}], ""),
        ([{"role": "assistant", "content": [{"type": "text", "text": "a"}, {"type": "image"}]}], "a"),
        ([], ""),
        ("", ""),
    ],
)
def test_the_text_of_a_completion(completion, text):
    assert completion_text(completion) == text
