"""Multihop and arithmetic: answers follow from the document, lengths are exact, splits stay apart."""

import hashlib
import json
import random
import re
from itertools import pairwise

import pytest

from shadowmask.tasks import get_task
from shadowmask.tasks.arithmetic import ArithmeticTask
from shadowmask.tasks.multihop import NAMES, MultihopTask
from shadowmask.tasks.procedural import FILLERS, SHORT_FILLERS, fill_words, split_of

TASKS = [
    MultihopTask(),
    MultihopTask(num_hops=4, num_chains=3, num_words=150),
    ArithmeticTask(),
    ArithmeticTask(num_facts=20, num_terms=5, num_digits=4, num_words=200),
]


def parts(row):
    document, question = row["prompt"].split("\nQuestion: ")
    return document, question


def test_following_the_links_leads_to_the_answer():
    task = MultihopTask(num_hops=3, num_chains=4)
    for row in task.dataset("train", 20, seed=1):
        document, question = parts(row)
        links = dict(re.findall(r"(\w+) passes every parcel on to (\w+)\.", document))
        assert len(links) == 3 * 4
        person = question.split()[0]
        for _ in range(3):
            person = links[person]
        assert person == row["answer"]
        assert person not in links  # the end of its chain
        assert len(set(links.values()) - set(links)) == 4  # one end a chain: the others distract


def test_links_stand_anywhere_in_the_document_not_in_order():
    ordered = 0
    for row in MultihopTask(num_hops=3).dataset("train", 50, seed=0):
        document, question = parts(row)
        links = dict(re.findall(r"(\w+) passes every parcel on to (\w+)\.", document))
        chain = [question.split()[0]]
        while chain[-1] in links:
            chain.append(links[chain[-1]])
        places = [document.index(f"{person} passes") for person in chain[:-1]]
        ordered += all(a < b for a, b in pairwise(places))
    assert 0 < ordered < 25  # one in six by chance


def test_adding_and_subtracting_the_weights_gives_the_answer():
    negative = 0
    for row in ArithmeticTask(num_terms=4).dataset("train", 40, seed=2):
        document, question = parts(row)
        weights = {item: int(n) for item, n in re.findall(r"The (\w+) weighs (\d+) grams\.", document)}
        assert len(weights) == 10
        terms = re.findall(r"(is|plus|minus) the (\w+)", question)
        assert len(terms) == 4
        result = sum(weights[item] * (-1 if sign == "minus" else 1) for sign, item in terms)
        assert str(result) == row["answer"]
        negative += result < 0
    assert negative
    assert all("minus" not in r["prompt"] for r in ArithmeticTask(subtract=False).dataset("train", 20, 0))


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_splits_share_no_document_under_any_seed(task):
    train = {parts(row)[0] for seed in range(3) for row in task.dataset("train", 100, seed)}
    held_out = {parts(row)[0] for seed in range(3) for row in task.dataset("eval", 100, seed)}
    assert len(train) == len(held_out) == 300  # and seeds differ
    assert not train & held_out


def test_splits_stay_apart_where_few_documents_exist():
    task = ArithmeticTask(num_facts=1, num_terms=1, num_digits=1, num_fillers=0)
    train = {row["prompt"] for row in task.dataset("train", 1000, seed=0)}
    held_out = {row["prompt"] for row in task.dataset("eval", 1000, seed=1)}
    assert len(held_out) > 50
    assert not train & held_out


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_a_larger_set_starts_with_the_smaller_one(task):
    assert task.dataset("train", 20, seed=1)[:7] == task.dataset("train", 7, seed=1)
    assert task.dataset("train", 0, seed=1) == []


@pytest.mark.parametrize(
    ("task", "digest"),
    [(MultihopTask(), "34d523ab8774d50d"), (ArithmeticTask(num_words=90), "75ba46c342fbf717")],
    ids=str,
)
def test_rows_are_the_same_in_every_process_and_version(task, digest):
    rows = task.dataset("eval", 5, seed=5)
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == digest


@pytest.mark.parametrize("words", [*range(50, 70), 200, 1000])
@pytest.mark.parametrize("task", [MultihopTask, ArithmeticTask])
def test_the_length_in_words_is_exact(task, words):
    settings = {"num_chains": 3} if task is MultihopTask else {"num_facts": 10}
    for row in task(num_words=words, **settings).dataset("train", 3, seed=0):
        assert len(parts(row)[0].split()) == words


@pytest.mark.parametrize("words", range(40))
def test_any_number_of_words_can_be_filled(words):
    sentences = fill_words(words, random.Random(0))
    assert sum(len(sentence.split()) for sentence in sentences) == words


def test_fillers_state_no_fact():
    for filler in (*FILLERS, *SHORT_FILLERS):
        assert not any(mark in filler for mark in ("weighs", "passes", "costs"))
        assert not set(re.findall(r"\w+", filler)) & set(NAMES)
    assert len(set(NAMES)) == len(NAMES)
    assert [len(filler.split()) for filler in SHORT_FILLERS] == [1, 2, 3, 4, 5]


def test_chat_prompts_say_the_same():
    plain = ArithmeticTask().dataset("eval", 3, 0)
    chat = ArithmeticTask(chat=True).dataset("eval", 3, 0)
    assert [row["prompt"] for row in chat] == [[{"role": "user", "content": r["prompt"]}] for r in plain]


@pytest.mark.parametrize("task", TASKS, ids=str)
def test_the_warm_up_target_is_rewarded(task):
    rows = task.dataset("train", 5, seed=0)
    assert task.reward([task.target(row) for row in rows], [row["answer"] for row in rows]) == [1.0] * 5


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("Otto", 1.0),
        (" otto.", 1.0),
        ("It is Otto", 1.0),
        ("Ines gives it to Vera.\nAnswer: Otto", 1.0),
        ("Otto or Vera", 0.0),
        ("Vera", 0.0),
        ("Ottos", 0.0),
        ("", 0.0),
    ],
)
def test_multihop_wants_one_name(completion, reward):
    assert MultihopTask().reward([completion], ["Otto"], prompts=["?"]) == [reward]
    assert MultihopTask().reward([[{"role": "assistant", "content": completion}]], ["Otto"]) == [reward]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("-12", 1.0),
        ("\u221212 grams", 1.0),
        ("30 - 42 = -12", 1.0),
        (r"\boxed{-12}", 1.0),
        ("12", 0.0),
        ("-12, or rather 5", 0.0),
        ("-12.5", 0.0),
        ("", 0.0),
    ],
)
def test_arithmetic_wants_the_result_last(completion, reward):
    assert ArithmeticTask().reward([completion], ["-12"]) == [reward]


@pytest.mark.parametrize(
    ("name", "settings", "field"),
    [
        ("multihop", {"num_hops": 0}, "num_hops"),
        ("multihop", {"num_chains": 0}, "num_chains"),
        ("multihop", {"num_chains": 40, "num_hops": 2}, "need 120 names, there are 80"),
        ("multihop", {"num_fillers": -1}, "num_fillers"),
        ("arithmetic", {"num_facts": 0}, "num_facts"),
        ("arithmetic", {"num_terms": 11}, "num_terms"),
        ("arithmetic", {"num_digits": 0}, "num_digits"),
        ("arithmetic", {"num_words": 0}, "num_words"),
        ("arithmetic", {"num_word": 5}, "did you mean 'num_words'"),
        ("arithmetic", {"num_facts": "8"}, "num_facts='8' must be of type int"),
        ("arithmetic", {"chat": 1}, "chat=1 must be of type bool"),
        ("arithmetic", {"zzz": 1}, "no setting 'zzz'; it has num_facts"),
    ],
)
def test_bad_settings_name_the_field(name, settings, field):
    with pytest.raises(ValueError, match=field):
        get_task(name, **settings)


def test_a_document_too_short_for_its_facts_is_an_error():
    with pytest.raises(ValueError, match="num_words=20 is too small: the facts alone have 50 words"):
        ArithmeticTask(num_words=20).dataset("train", 1, 0)
    with pytest.raises(ValueError, match="'test'"):
        ArithmeticTask().dataset("test", 1, 0)


def test_settings_that_leave_a_split_empty_are_an_error():
    task = ArithmeticTask(num_facts=1, num_terms=1, num_digits=1, num_fillers=0)
    object.__setattr__(task, "_draw", lambda rng: ("The hat weighs 4 grams.", {"hat": 4}))
    empty = "train" if split_of("The hat weighs 4 grams.") == "eval" else "eval"
    with pytest.raises(ValueError, match="settings leave no document for the split"):
        task.dataset(empty, 1, 0)
