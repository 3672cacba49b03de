"""Chain: the answer follows the facts, and nothing but the facts leads to it."""

import re

import pytest

from shadowmask.tasks import get_task
from shadowmask.tasks.chain import ChainTask


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
    assert ChainTask().reward([completion], ["Otto Lina"]) == [reward]


@pytest.mark.parametrize(
    ("settings", "said"), [({"num_facts": 1}, "num_facts"), ({"num_hops": 12}, "num_hops")]
)
def test_bad_settings_are_named(settings, said):
    with pytest.raises(ValueError, match=said):
        get_task("chain", **settings)
