"""Recall: the same rows everywhere, splits apart, and a reward that cannot be talked into a 1."""

import hashlib
import json

import pytest

from shadowmask.tasks import RecallTask, get_task
from shadowmask.tasks.procedural import FILLERS
from shadowmask.tasks.recall import ITEMS

SETTINGS = [
    RecallTask(),
    RecallTask(num_facts=1, num_fillers=0),
    RecallTask(num_facts=20, num_fillers=60, questions_per_document=3),
]


def document_of(row):
    return row["prompt"].split("\nQuestion")[0]


@pytest.mark.parametrize("task", SETTINGS, ids=str)
@pytest.mark.parametrize("split", ["train", "eval"])
def test_the_answer_is_the_price_that_the_document_gives(task, split):
    for row in task.dataset(split, size=12, seed=3):
        item = row["prompt"].split("How much does the ")[1].split(" cost?")[0]
        assert f"The {item} costs {row['answer']} dollars." in document_of(row)
        assert document_of(row).count(" costs ") == task.num_facts
        assert sum(document_of(row).count(filler) for filler in FILLERS) == task.num_fillers


def test_prices_are_distinct_so_that_a_neighbouring_fact_is_never_right_by_chance():
    for row in RecallTask(num_facts=60, price_digits=2).dataset("train", size=5, seed=0):
        prices = [word for word in document_of(row).split() if word.isdigit()]
        assert len(set(prices)) == 60


def test_splits_share_no_document():
    # few possible documents: by chance they would collide
    task = RecallTask(num_facts=1, num_fillers=0, price_digits=2)
    train = {document_of(row) for row in task.dataset("train", size=2000, seed=0)}
    held_out = {document_of(row) for row in task.dataset("eval", size=2000, seed=0)}
    assert len(held_out) > 100
    assert not train & held_out


def test_a_larger_set_starts_with_the_smaller_one_and_seeds_differ():
    task = RecallTask()
    assert task.dataset("train", 20, seed=1)[:7] == task.dataset("train", 7, seed=1)
    assert task.dataset("train", 7, seed=1) != task.dataset("train", 7, seed=2)


def test_rows_are_the_same_in_every_process_and_version():
    rows = RecallTask(questions_per_document=2).dataset("eval", 5, seed=5)
    assert hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16] == "00aec2a741b5ae29"


def test_questions_of_one_document_are_neighbours_and_about_different_items():
    rows = RecallTask(questions_per_document=4).dataset("train", 10, seed=0)
    assert len({document_of(row) for row in rows}) == 3
    for start in (0, 4, 8):
        block = rows[start : start + 4]
        assert len({document_of(row) for row in block}) == 1
        assert len({row["prompt"] for row in block}) == len(block)


def test_the_word_lists_have_no_duplicates_and_fillers_state_no_price():
    assert len(set(ITEMS)) == len(ITEMS)
    assert len(set(FILLERS)) == len(FILLERS)
    assert not any("cost" in filler or any(map(str.isdigit, filler)) for filler in FILLERS)


@pytest.mark.parametrize(
    "completion", [" 42", "42 dollars.", "$42", "The pear costs 42.00 dollars.", "042", "42, 42!"]
)
def test_the_answer_in_any_dress_is_rewarded(completion):
    assert RecallTask().reward([completion], ["42"]) == [1.0]


@pytest.mark.parametrize(
    "completion", ["", " forty-two", "43", "42 or 43", "142", "4 2", "-42", "42.5", "42,000", "4"]
)
def test_anything_else_is_not(completion):
    assert RecallTask().reward([completion], ["42"]) == [0.0]


def test_chat_completions_and_extra_columns_are_accepted():
    chat = [[{"role": "assistant", "content": "It is 17."}]]
    assert RecallTask().reward(chat, ["17"], prompts=["?"], trainer_state=None) == [1.0]


def test_a_missing_answer_is_an_error():
    with pytest.raises(ValueError):
        RecallTask().reward(["42", "43"], ["42"])


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        ({"num_facts": 0}, "num_facts"),
        ({"num_facts": len(ITEMS) + 1}, "num_facts"),
        ({"num_fillers": -1}, "num_fillers"),
        ({"price_digits": 1}, "price_digits"),
        ({"questions_per_document": 0}, "questions_per_document"),
        ({"num_facts": 4, "questions_per_document": 5}, "questions_per_document"),
    ],
)
def test_bad_settings_name_the_field(settings, field):
    with pytest.raises(ValueError, match=field):
        RecallTask(**settings)


def test_an_unknown_split_is_an_error():
    with pytest.raises(ValueError, match="'test'"):
        RecallTask().dataset("test", 1, seed=0)


def test_an_unknown_task_gets_the_nearest_name():
    assert get_task("recall", num_facts=3) == RecallTask(num_facts=3)
    with pytest.raises(ValueError, match="did you mean 'recall'"):
        get_task("recal")
    with pytest.raises(ValueError, match=r"known tasks: .*recall"):
        get_task("zzz")


def test_the_warm_up_target_is_rewarded():
    task = RecallTask()
    for row in task.dataset("train", 3, seed=0):
        assert task.reward([task.target(row)], [row["answer"]]) == [1.0]
