"""Tasks behind packages that need no network: hard-needle and reasoning-gym."""

import sys

import pytest

from shadowmask.tasks import get_task
from shadowmask.tasks.hard_needle import SEPARATOR


def columns(rows):
    return {name: [row[name] for row in rows] for name in rows[0] if name != "prompt"}


@pytest.mark.parametrize(
    "name", ["hard-needle", "reasoning-gym:gsm_symbolic", "reasoning-gym:needle_haystack"]
)
def test_streams_are_seeded_and_apart(name):
    task = get_task(name)
    train = [task.dataset("train", 30, seed) for seed in (0, 1)]
    held_out = [task.dataset("eval", 30, seed) for seed in (0, 1)]
    assert get_task(name).dataset("train", 30, 0) == train[0]
    assert task.dataset("train", 7, 0) == train[0][:7]
    prompts = [{row["prompt"] for row in rows} for rows in (*train, *held_out)]
    assert all(len(part) == 30 for part in prompts)
    assert len(set().union(*prompts)) == 120
    assert task.dataset("train", 0, 0) == []


@pytest.mark.parametrize("name", ["hard-needle", "reasoning-gym:gsm_symbolic", "reasoning-gym:chain_sum"])
def test_the_target_is_rewarded_and_nonsense_is_not(name):
    task = get_task(name)
    rows = task.dataset("train", 5, 0)
    chat = [[{"role": "assistant", "content": task.target(row)}] for row in rows]
    assert task.reward(chat, **columns(rows)) == [1.0] * 5
    assert task.reward([task.target(row) for row in rows], **columns(rows)) == [1.0] * 5
    assert task.reward([""] * 5, **columns(rows)) == [0.0] * 5


def test_hard_needle_refuses_a_list_of_all_values():
    task = get_task("hard-needle", num_needles=5)
    (row,) = task.dataset("train", 1, 0)
    others = row["others"].split(SEPARATOR)
    assert len(others) == 4
    assert all(value in row["prompt"] for value in (row["answer"], *others))
    everything = ", ".join([row["answer"], *others])
    assert task.reward(
        [row["answer"], everything, others[0]], [row["answer"]] * 3, others=[row["others"]] * 3
    ) == [1.0, 0.0, 0.0]


def test_hard_needle_holds_out_projects():
    from hard_needle import PROJECTS, PROJECTS_UNSEEN

    for split, projects in (("train", PROJECTS), ("eval", PROJECTS_UNSEEN)):
        for row in get_task("hard-needle").dataset(split, 10, 0):
            assert any(project in row["prompt"].rpartition("Question:")[2] for project in projects)


@pytest.mark.parametrize(
    ("name", "settings", "said"),
    [
        ("hard-needle", {"num_needles": 9}, "num_needles must be in 1..8"),
        ("hard-needle", {"num_chars": 0}, "num_chars"),
        ("reasoning-gym:chain_some", {}, "no data set 'chain_some'; did you mean 'chain_sum'"),
        ("reasoning-gym:zzz", {}, "known: ab, "),
        ("reasoning-gym:chain_sum", {"settings": {"min_term": 2}}, "settings={'min_term': 2} of 'chain_sum'"),
        ("reasoning-gym:chain_sum", {"settings": {"seed": 2}}, "chosen by the task"),
    ],
)
def test_bad_settings_name_the_field(name, settings, said):
    with pytest.raises(ValueError, match=said):
        get_task(name, **settings)


def test_settings_of_the_library_are_passed_on():
    task = get_task("reasoning-gym:chain_sum", settings={"min_terms": 6, "max_terms": 6}, instruction="")
    for row in task.dataset("train", 5, 0):
        assert len([part for part in row["prompt"].split() if part in "+-"]) == 5


@pytest.mark.parametrize(
    ("name", "module", "extra"),
    [("hard-needle", "hard_needle", "tasks"), ("reasoning-gym:chain_sum", "reasoning_gym", "gym")],
)
def test_a_missing_library_is_one_line_with_the_remedy(monkeypatch, name, module, extra):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf"is not installed: pip install 'shadowmask\[{extra}\]'"):
        get_task(name)
