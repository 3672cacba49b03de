"""Chain and lookup: the answer follows the facts, and nothing but the facts leads to it."""

import re

import pytest

from shadowmask.tasks import get_task
from shadowmask.tasks.chain import ChainTask
from shadowmask.tasks.lookup import LookupTask


def links(row):
    document, start = row["prompt"].split("\nPath: ")
    return dict(re.findall(r"(\w+) (\w+)\.", document)), start


def test_following_the_facts_gives_the_answer():
    for row in ChainTask(num_facts=7, num_hops=4).dataset("train", 20, seed=1):
        successor, name = links(row)
        assert len(successor) == 7 and set(successor) == set(successor.values()), "one ring"
        for station in row["answer"].split():
            name = successor[name]
            assert name == station
        assert len(set(row["answer"].split())) == 4


def test_looking_every_name_up_gives_the_answer():
    for row in LookupTask(num_facts=7, num_asked=3).dataset("train", 20, seed=1):
        document, asked = row["prompt"].split("\nAsked: ")
        successor = dict(re.findall(r"(\w+) (\w+)\.", document))
        assert len(set(asked.split())) == 3
        expected = [part for name in asked.split() for part in (name, successor[name])]
        assert row["answer"].split() == expected


def test_prompts_repeat_under_their_seed_and_splits_are_apart():
    task = ChainTask()
    assert task.dataset("train", 5, seed=3) == task.dataset("train", 9, seed=3)[:5]
    assert task.dataset("train", 5, seed=3) != task.dataset("train", 5, seed=4)
    both = [{row["prompt"].split("\n")[0] for row in task.dataset(s, 40, seed=0)} for s in ("train", "eval")]
    assert not both[0] & both[1]


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (" Otto Lina", 1.0),
        ("Otto Lina\n", 1.0),
        ("Lina Otto", 0.0),
        ("Otto", 0.0),
        ("Otto Lina Ada", 0.0),
        ("", 0.0),
    ],
)
def test_all_stations_in_order(completion, reward):
    for task in (ChainTask(), LookupTask()):
        assert task.reward([completion], ["Otto Lina"]) == [reward]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("chain", {"num_facts": 1}),
        ("chain", {"num_hops": 12}),
        ("lookup", {"num_facts": 81}),
        ("lookup", {"num_asked": 0}),
    ],
)
def test_bad_settings_are_named(name, settings):
    with pytest.raises(ValueError, match=next(iter(settings))):
        get_task(name, **settings)
