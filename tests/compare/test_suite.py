"""Suites: the cells of a grid, and what is refused before anything runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from shadowmask.compare.suite import SuiteError, load_suite, make_suite
from shadowmask.corrections import METHODS

SUITE: dict[str, Any] = {
    "train": {"max_steps": 9, "learning_rate": 1e-3},
    "tasks": {"easy": {"task": "recall"}, "hard": {"task": "chain", "max_steps": 20}},
    "caches": {
        "snap": {"evictor": "snapkv", "compression_ratio": 0.5},
        "rand": {"evictor": "random", "budget": 8},
    },
    "arms": {"smd-0.3": {"method": "smd", "distill_coef": 0.3}},
    "grid": [
        {"task": ["easy", "hard"], "cache": ["snap", "rand"], "arm": ["dense", "smd"], "seed": [0, 1]},
        {"task": "easy", "cache": "snap", "arm": ["smd", "smd-0.3"], "seed": [0]},
    ],
    "quick": {"train": {"max_steps": 2}, "seeds": [0]},
}


def test_a_grid_becomes_cells_each_once() -> None:
    suite = make_suite(SUITE, "mine")
    names = [cell.name for cell in suite.cells]
    assert len(names) == len(set(names)) == 2 * 2 * 2 + 2 * 2 + 1
    assert "easy/dense/dense/seed0" in names, "what evicts nothing is one cell for all caches"
    assert "easy/snap/smd-0.3/seed0" in names and "hard/snap/smd-0.3/seed0" not in names
    assert [cell.seed for cell in suite.cells] == sorted(cell.seed for cell in suite.cells)
    assert suite.name == "mine" and set(suite.caches) == {"snap", "rand"}


def test_settings_are_layered() -> None:
    cells = {cell.name: cell.settings for cell in make_suite(SUITE, "mine").cells}
    assert cells["hard/rand/smd/seed1"] == {
        "max_steps": 20,
        "learning_rate": 1e-3,
        "task": "chain",
        "evictor": "random",
        "budget": 8,
        "method": "smd",
        "seed": 1,
    }
    assert cells["easy/snap/smd-0.3/seed0"]["distill_coef"] == 0.3
    assert cells["easy/dense/dense/seed0"]["evictor"] == "dense"
    assert "compression_ratio" not in cells["easy/dense/dense/seed0"]


def test_quick_changes_what_it_says() -> None:
    suite = make_suite(SUITE, "mine", quick=True)
    assert {cell.seed for cell in suite.cells} == {0}
    assert next(c for c in suite.cells if c.task == "easy").settings["max_steps"] == 2


def test_only_arms_of_the_matrix_are_evaluated_under_other_caches() -> None:
    suite = make_suite(SUITE | {"matrix": ["dense"]}, "mine")
    caches = {cell.name: set(suite.eval_caches(cell)) for cell in suite.cells}
    assert caches["easy/dense/dense/seed0"] == {"snap", "rand"}
    assert caches["easy/snap/smd/seed0"] == set()
    every = make_suite(SUITE, "mine")
    cell = next(cell for cell in every.cells if cell.name == "easy/snap/smd/seed0")
    assert set(every.eval_caches(cell)) == {"rand"}, "its own is measured anyway"


def test_every_method_is_an_arm() -> None:
    grid = [{"task": ["easy"], "cache": ["snap"], "arm": list(METHODS), "seed": [0]}]
    assert len(make_suite(SUITE | {"grid": grid}, "mine").cells) == len(METHODS)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grid": []}, "the grid is empty"),
        ({"grid": None}, "the grid is empty"),
        ({"grid": {"task": "easy"}}, "must be a list of blocks"),
        ({"grid": [{"task": ["easy"], "cache": ["snap"], "arm": [], "seed": [0]}]}, "arm is empty"),
        ({"grid": [{"task": ["easy"], "cache": ["snap"], "arm": ["smd"]}]}, "seed is empty"),
        (
            {"grid": [{"task": ["easy"], "cache": ["snap"], "arm": ["nave"], "seed": [0]}]},
            "arm 'nave' is unknown; did you mean 'naive'",
        ),
        (
            {"grid": [{"task": ["esy"], "cache": ["snap"], "arm": ["smd"], "seed": [0]}]},
            "task 'esy' is unknown; did you mean 'easy'",
        ),
        (
            {"grid": [{"task": ["easy"], "cache": ["snp"], "arm": ["smd"], "seed": [0]}]},
            "cache 'snp' is unknown; did you mean 'snap'",
        ),
        (
            {"grid": [{"task": ["easy"], "cache": ["snap"], "arm": ["smd"], "seeds": [0]}]},
            "key 'seeds' is unknown; did you mean 'seed'",
        ),
        (
            {"grid": [{"task": ["easy"], "cache": ["snap"], "arm": ["smd"], "seed": ["0"]}]},
            "seed '0' is no whole number",
        ),
        ({"arms": {"mine": {"method": "sdm"}}}, "arm 'mine': method 'sdm' is unknown; did you mean 'smd'"),
        ({"arms": {"a/b": {}}}, "must not be empty or contain '/'"),
        ({"train": [1]}, "train must be a mapping"),
        ({"trane": {}}, "key 'trane' is unknown; did you mean 'train'"),
        ({"matrix": ["smdd"]}, "matrix: arm 'smdd' is unknown; did you mean 'smd'"),
        ({"pairs": [["smd"]]}, "pairs: ['smd'] must be a list of two arms"),
        ({"pairs": "smd"}, "pairs: 'smd' must be a list of two arms"),
        ({"pairs": [["smd", "nave"]]}, "pairs: arm 'nave' is unknown; did you mean 'naive'"),
        ({"baseline": "dnse"}, "baseline 'dnse' is unknown; did you mean 'dense'"),
    ],
)
def test_bad_suites_are_one_clear_line(change: dict[str, Any], said: str) -> None:
    with pytest.raises(SuiteError, match=said.replace("[", r"\[")):
        make_suite(SUITE | change, "mine")


def test_files_that_are_no_suites(tmp_path: Path) -> None:
    with pytest.raises(SuiteError, match="does not exist"):
        load_suite(tmp_path / "nothing.yaml")
    (tmp_path / "bad.yaml").write_text("grid: [")
    with pytest.raises(SuiteError, match="not valid YAML"):
        load_suite(tmp_path / "bad.yaml")
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(SuiteError, match="must be a mapping"):
        load_suite(tmp_path / "list.yaml")
