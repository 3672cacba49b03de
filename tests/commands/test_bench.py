"""``shadowmask bench`` on a tiny shape: the figures are there and add up; how large they are is no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowmask.bench.workload import Workload
from shadowmask.cli import main

TINY = ["--shape", "tiny", "--prompt_length", "64", "--completion_length", "4", "--group_size", "3"]


@pytest.mark.parametrize("what", ["learner", "step"])
def test_prints_ratios_and_writes_them_with_their_conditions(
    what: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "figures.json"
    assert main(["bench", what, *TINY, "--threads", "1", "--save", str(target)]) == 0
    out = capsys.readouterr().out
    saved = json.loads(target.read_text())
    assert saved["workload"]["prompt_length"] == 64
    assert saved["versions"]["torch"]
    for row in saved["ratios"]:
        assert row["what"].strip() in out
        assert row["ratio"] > 0
    assert [path.name for path in tmp_path.iterdir()] == ["figures.json"]


@pytest.mark.parametrize("what", [pytest.param("rollout", marks=pytest.mark.slow), "memory"])
def test_every_row_names_what_its_ratio_is_made_up_of(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "figures.json"
    monkeypatch.setattr("shadowmask.commands.bench.LONG_PROMPT", 96)
    monkeypatch.setattr("shadowmask.commands.bench.SHORT_PROMPT", 64)
    assert main(["bench", what, *TINY, "--prompts", "2", "--threads", "1", "--save", str(target)]) == 0
    rows = json.loads(target.read_text())["ratios"]
    assert len(rows) >= 4
    for row in rows:
        assert row["ratio"] >= 0
        assert "/" in row["made_up_of"]


def test_scaling_draws_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = {"prompt_length": (32,), "group_size": (2,), "compression_ratio": (0.0, 0.5)}
    monkeypatch.setattr("shadowmask.commands.bench.SWEEPS", sweeps)
    monkeypatch.setattr("shadowmask.report.scaling.SWEEPS", sweeps)
    target = tmp_path / "scaling.json"
    assert main(["bench", "scaling", *TINY, "--threads", "1", "--save", str(target)]) == 0
    figures = json.loads(target.read_text())["figures"]
    assert len(figures) == 4
    dense, half = (figures[f"scaling_point compression_ratio={x}"] for x in (0.0, 0.5))
    assert half["kv_bytes_peak"] < dense["kv_bytes_peak"]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scaling.json", "scaling.png", "scaling.svg"]


def test_the_target_is_checked_before_anything_is_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "step", "--save", str(tmp_path / "no" / "figures.json")]) == 1
    captured = capsys.readouterr()
    assert "does not exist" in captured.err and "measuring" not in captured.out


def test_rho_is_the_quotient_of_learner_tokens() -> None:
    workload = Workload(prompt_length=1024, completion_length=64, group_size=8)
    assert workload.rho == 8 * (1024 + 64) / (1024 + 8 * 64)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["bench", "steps"], "one of step, learner, rollout"),
        (["bench", "step", "--shape", "7b"], "shape='7b' is unknown"),
        (["bench", "learner", *TINY, "--compression_ratio", "2"], "measuring learner failed"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]
