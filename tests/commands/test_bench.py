"""``shadowmask bench`` on a tiny shape: the figures are there and add up; how large they are is no test."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowmask.bench.suites import SUITES, ratio
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


def test_a_row_is_made_up_of_its_two_measurements() -> None:
    assert ratio("x", 3.04, 2.0) == ("x", "3.0 / 2.0 s", 1.52, "")
    assert ratio("x", 0.0125, 0.05, "ms", "<= 1") == ("x", "12 / 50 ms", 0.25, "<= 1")
    assert ratio("x", 5e8, 2e9, "GB").made_up_of == "0.50 / 2.00 GB"


def test_suites_divide_the_right_way_round() -> None:
    """Faster and smaller must look better: every case is given figures by hand."""
    figures = {
        "smd_step": {"seconds": 10.0, "rollout_seconds": 4.0, "learner_seconds": 6.0, "peak_bytes": 1e9}
        | {"stage decode": 2.5},
        "trl_step": {"seconds": 60.0, "rollout_seconds": 12.0, "learner_seconds": 48.0, "peak_bytes": 4e9},
        "learner": {"packed_seconds": 8.0, "both_tracks_seconds": 10.0, "unpacked_seconds": 40.0}
        | {"rollout_seconds": 12.0, "packed_peak_bytes": 4e8, "both_tracks_peak_bytes": 5e8},
        "rollout_memory": {
            "weights_bytes": 5e8,
            "peak_bytes": 5.5e8,
            "kv_bytes_peak": 5e8,
            "kv_bytes_dense": 1e9,
        },
        "generate_memory": {"peak_bytes": 5.5e9},
        "slicing": {"cache_bytes": 1e9, "evict_copy_peak_bytes": 5e8, "evict_by_layer_peak_bytes": 1e8}
        | {"sliced_peak_bytes": 1e9, "sliced_seconds": 30.0},
    }
    ratios = {
        name: [row.ratio for row in SUITES[name](Workload(), lambda case, **_: figures[case])]
        for name in ("step", "learner", "memory", "slicing")
    }
    assert ratios["step"] == [6.0, 3.0, 8.0, 0.25, 0.25]
    assert ratios["learner"] == [5.0, 1.25, 1.1, 1.25]
    assert ratios["slicing"] == [1.5, 1.1, 0.5, 0.5, 3.0]
    assert ratios["memory"] == [1.05, 1.05, pytest.approx(0.1), 0.5]


@pytest.mark.parametrize(
    "what",
    [
        pytest.param("rollout", marks=pytest.mark.slow),
        pytest.param("slicing", marks=pytest.mark.slow),
        "memory",
    ],
)
def test_every_case_of_a_suite_is_measured(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "figures.json"
    monkeypatch.setattr("shadowmask.bench.suites.LONG_PROMPT", 96)
    monkeypatch.setattr("shadowmask.bench.suites.SHORT_PROMPT", 64)
    assert main(["bench", what, *TINY, "--prompts", "2", "--threads", "1", "--save", str(target)]) == 0
    saved = json.loads(target.read_text())
    assert len(saved["ratios"]) == (5 if what == "slicing" else 4)
    for name, figures in saved["figures"].items():
        assert all(value > 0 for value in figures.values()), name
    for name, figures in saved["figures"].items():
        if name.startswith("rollout"):
            assert figures["kv_bytes_peak"] < figures["kv_bytes_unshared"] or "group_size=1" in name


def test_scaling_draws_what_it_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweeps = {"prompt_length": (32,), "group_size": (2,), "compression_ratio": (0.0, 0.5)}
    monkeypatch.setattr("shadowmask.bench.suites.SWEEPS", sweeps)
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
