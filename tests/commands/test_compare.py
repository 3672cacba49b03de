"""``shadowmask compare`` as a user runs it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml

import shadowmask.commands.compare as compare
from shadowmask.cli import main
from shadowmask.commands.compare import check_cells
from shadowmask.compare.suite import load_suite
from tolerances import FLOAT32

SUITES = Path(__file__).parents[2] / "suites"


@pytest.fixture
def suite(workplace: Path, model_folder: Path) -> Path:
    content = {
        "train": {
            "model_name_or_path": str(model_folder),
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_completion_length": 12,
            "max_steps": 2,
            "learning_rate": 1e-3,
            "bf16": False,
            "logging_steps": 1,
            "save_strategy": "no",
            "eval_size": 2,
            "eval_before": False,
            "evictor_kwargs": {"num_sinks": 2, "recent_window": 4},
        },
        "tasks": {"own": {"dataset": "data.jsonl", "reward": "tiny_rewards.py:count"}},
        "caches": {
            "half": {"evictor": "random", "compression_ratio": 0.5},
            "most": {"evictor": "random", "compression_ratio": 0.7},
        },
        "grid": [
            {"task": "own", "cache": "half", "arm": "smd", "seed": [0]},
            {"task": "own", "cache": "most", "arm": "shadow", "seed": [0]},
        ],
        "matrix": ["smd"],
    }
    path = workplace / "small.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_real_cell_from_suite_to_table(
    suite: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", str(suite), "--output", "out", "--jobs", "1"]) == 0
    said = capsys.readouterr().out
    assert "[1/2] own/half/smd/seed0" in said and "2 of 2 cells finished" in said
    stored = json.loads((workplace / "out/cells/own/half/smd/seed0.json").read_text())
    assert stored["status"] == "done" and set(stored["after"]) == {"dense", "half", "most"}
    assert max(value for _, value in stored["curves"]["sampling_gap/max"]) <= FLOAT32
    other = json.loads((workplace / "out/cells/own/most/shadow/seed0.json").read_text())
    assert set(other["after"]) == {"dense", "most"}, "only arms of the matrix see every cache"
    summary = json.loads((workplace / "out/summary.json").read_text())
    assert summary["rows"][0]["seeds"] == 1 and summary["versions"]["trl"]
    assert (workplace / "out/figures/learning_curves.png").is_file()
    assert main(["compare", str(suite), "--output", "out", "--jobs", "1"]) == 0
    assert "[1/2]" not in capsys.readouterr().out, "it was run again"
    assert (workplace / "out/log.jsonl").read_text().count("started") == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"grid": []}, "the grid is empty"),
        ({"grid": [{"task": "own", "cache": "half", "arm": "nave", "seed": [0]}]}, "did you mean 'naive'"),
        (
            {"caches": {"half": {"evictor": "rndom"}, "most": {"evictor": "random"}}},
            "cell own/half/smd/seed0: unknown evictor 'rndom'",
        ),
        ({"arms": {"smd": {"method": "smd", "kl_cap": -1.0}}}, "kl_cap=-1.0 must be positive"),
        ({"train": {"lerning_rate": 0.1}}, "unknown setting --lerning_rate"),
    ],
)
def test_bad_suites_fail_before_anything_runs(
    suite: Path,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict,
    said: str,
) -> None:
    monkeypatch.setattr(compare, "run_suite", lambda *_: pytest.fail("a cell was run"))
    suite.write_text(yaml.safe_dump(yaml.safe_load(suite.read_text()) | change))
    assert main(["compare", str(suite), "--output", "out"]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1 and said in errors[0]
    assert not (workplace / "out").exists()


def test_flags_that_are_none(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        ([], "the following arguments are required: suite"),
        (["nothing.yaml"], "does not exist"),
        ([str(suite), "--jobs", "0"], "--jobs 0 must be at least 1"),
        ([str(suite), "--fast"], "unrecognized arguments: --fast"),
    ):
        assert main(["compare", *arguments]) == 1
        assert said in capsys.readouterr().err


def test_list_names_the_cells(suite: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(suite), "--list"]) == 0
    assert capsys.readouterr().out.split() == ["own/half/smd/seed0", "own/most/shadow/seed0"]


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("path", sorted(SUITES.glob("*.yaml")), ids=lambda path: path.stem)
def test_the_suites_that_come_along_are_well_formed(path: Path, quick: bool) -> None:
    suite = load_suite(path, quick)
    check_cells(suite)
    if not quick and path.stem == "pocket":
        assert len(suite.order("seed")) >= 5 and len(suite.order("task")) == 2
