"""A report shows what the runs logged, says what is wrong in words, and reads runs that are not whole."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shadowmask.report.advice import warnings_of
from shadowmask.report.figures import draw_figures, stage_seconds
from shadowmask.report.report_page import report_page
from shadowmask.report.run_folder import RunFolderError
from shadowmask.report.runs import differences, experiments, read_run, tolerance_of

SETTINGS = {
    "evictor": "SnapKV(compression_ratio=0.5, num_sinks=4)",
    "max_steps": 4,
    "num_generations": 4,
    "per_device_train_batch_size": 32,
    "learning_rate": 1e-5,
    "dtype": "float32",
    "bf16": False,
    "max_completion_length": 6,
}
ROW = {
    "reward": 0.5,
    "sampling_gap/max": 1e-6,
    "information_gap/kl": 0.2,
    "information_gap/agreement_p5": 0.7,
    "kv/bytes_peak": 4e7,
    "kv/bytes_dense": 8e7,
    "kv/retained_fraction": 0.5,
    "grad_norm": 2.0,
    "frac_reward_zero_std": 0.0,
    "completions/clipped_ratio": 0.1,
    "step_time": 10.0,
    "time/rollout": 4.0,
    "time/rewards": 1.0,
}


def make_run(
    folder: Path, seed: int = 0, steps: int = 4, changes: dict[str, Any] | None = None, **row: Any
) -> Path:
    """A run folder; ``changes`` go into its settings, ``row`` into the metrics of its last step."""
    folder.mkdir(parents=True)
    settings = SETTINGS | {"seed": seed, "output_dir": str(folder)} | (changes or {})
    (folder / "resolved.json").write_text(json.dumps(settings))
    rows = [ROW | {"step": step, "reward": 0.1 * step + seed} for step in range(1, steps + 1)]
    rows[-1] |= row
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    samples = [
        {"step": step, "prompt": "<i>why?</i>", "completion": f"<script>{step}", "rewards": {"r": 0.5}}
        for step in range(1, steps + 1)
    ]
    (folder / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in samples))
    return folder


def page_of(*folders: Path) -> str:
    runs = [read_run(folder) for folder in folders]
    groups = experiments(runs)
    return report_page(runs, groups, draw_figures(groups, folders[0].parent / "figures"))


def test_a_page_stands_alone_and_escapes_what_a_model_wrote(tmp_path):
    page = page_of(make_run(tmp_path / "run"))
    assert "<script" not in page
    assert "&lt;script&gt;4" in page
    assert "&lt;i&gt;why?&lt;/i&gt;" in page
    assert "http" not in page.replace("http-equiv", "")
    assert page.count("data:image/svg+xml;base64,") == 8
    assert "Nothing to warn of" in page
    assert "at step 4 of 4, not finished" in page


def test_figures_are_written_as_png_and_svg(tmp_path):
    drawn = draw_figures(experiments([read_run(make_run(tmp_path / "run"))]), tmp_path / "figures")
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    assert names == {f"{figure.name}{suffix}" for figure in drawn for suffix in (".png", ".svg")}
    assert (tmp_path / "figures" / "reward.png").read_bytes().startswith(b"\x89PNG")
    told = {figure.name: figure.latest for figure in drawn}
    assert told["reward"] == "0.400 at step 4"
    assert told["kv_bytes"] == "0.50x of dense"
    assert told["rejected"] == "not measured"
    assert told["time"].startswith("rollout 4.00 s, rewards and old log-probabilities 1.00 s, learner")


def test_runs_that_differ_in_their_seed_share_a_band(tmp_path):
    seeds = [make_run(tmp_path / f"s{seed}", seed) for seed in (0, 1)]
    other = make_run(tmp_path / "other", changes={"learning_rate": 1e-4})
    groups = experiments([read_run(path) for path in (*seeds, other)])
    assert [len(group.runs) for group in groups] == [2, 1]
    step, mean, low, high = groups[0].band("reward")[1]
    assert (step, round(mean, 6), round(low, 6), round(high, 6)) == (2, 0.7, 0.2, 1.2)
    assert stage_seconds(groups[0]) == {"time/rollout": 4.0, "time/rewards": 1.0, "rest": 5.0}


def test_a_step_that_was_not_timed_by_stage_is_one_bar(tmp_path):
    folder = make_run(tmp_path / "run")
    rows = [{"step": 1, "step_time": 10.0}]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert stage_seconds(experiments([read_run(folder)])[0]) == {"step": 10.0}


def test_the_differences_between_runs_are_named(tmp_path):
    runs = [make_run(tmp_path / "a"), make_run(tmp_path / "b", changes={"learning_rate": 1e-4})]
    assert differences([read_run(path) for path in runs]).keys() == {"learning_rate", "output_dir"}
    page = page_of(*runs)
    assert page.index("What differs") < page.index("<td>learning_rate</td><td>1e-05</td><td>0.0001</td>")


@pytest.mark.parametrize(
    ("row", "changes", "said"),
    [
        (
            {"frac_reward_zero_std": 0.25},
            {},
            "2 of 8 groups had no reward variance at step 4: nothing to learn from",
        ),
        ({"sampling_gap/max": 7e-5}, {}, "near its tolerance 0.0001"),
        ({"sampling_gap/max": 2e-4}, {}, "above its tolerance 0.0001"),
        ({"sampling_gap/max": 2e-4}, {"parity_tolerance": 3e-4}, "near its tolerance 0.0003"),
        ({"sampling_gap/mean": 0.06}, {"bf16": True}, "above its tolerance 0.05"),
        (
            {"completions/clipped_ratio": 1.0},
            {},
            "all completions were cut at the limit of 6 tokens in 1 of 4",
        ),
        ({"grad_norm": 90.0}, {}, "jumped to 90 at step 4, 45 times its median"),
        ({"grad_norm": None}, {}, "not finite at step 4"),
        ({"grad_norm": 0.0}, {}, "zero at 1 of 4 steps, first at step 4"),
        ({"correction/rejected_fraction": 0.8}, {}, "80% of the tokens were rejected at step 4"),
    ],
)
def test_trouble_is_told_in_words(tmp_path, row, changes, said):
    (line,) = warnings_of(read_run(make_run(tmp_path / "run", changes=changes, **row)))
    assert said in line


def test_a_healthy_run_has_no_warnings(tmp_path):
    assert warnings_of(read_run(make_run(tmp_path / "run"))) == []


@pytest.mark.parametrize(
    ("method", "warned"), [("smd", True), ("shadow", True), ("naive", False), ("tis", False)]
)
def test_only_a_learner_that_replays_is_held_to_the_tolerance(tmp_path, method, warned):
    folder = make_run(tmp_path / "run", changes={"method": method}, **{"sampling_gap/max": 5.0})
    assert bool(warnings_of(read_run(folder))) == warned


def test_a_run_that_evicted_nothing_is_told_so(tmp_path):
    for evictor, warned in (("SnapKV(budget=400)", True), ("DenseEvictor()", False)):
        folder = make_run(
            tmp_path / evictor, steps=1, changes={"evictor": evictor}, **{"kv/retained_fraction": 1.0}
        )
        assert bool(warnings_of(read_run(folder))) == warned


def test_damaged_lines_are_left_out_and_named(tmp_path):
    folder = make_run(tmp_path / "run")
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    (folder / "metrics.jsonl").write_text("\n".join([lines[0], lines[1][:40], "7", *lines[2:], lines[0][:9]]))
    run = read_run(folder)
    assert [row["step"] for row in run.metrics] == [1, 3, 4]
    assert run.notes == [f"{folder / 'metrics.jsonl'}: skipped lines 2, 3, 6 (cut off or not JSON)"]
    assert "skipped lines 2, 3, 6" in page_of(folder)


def test_the_settings_of_a_run_may_be_missing(tmp_path):
    folder = make_run(tmp_path / "run", **{"frac_reward_zero_std": 0.25})
    (folder / "resolved.json").write_text("{")
    run = read_run(folder)
    assert "cannot be read, left out" in run.notes[0]
    assert warnings_of(run)[0].startswith("25% of the groups had no reward variance")
    (folder / "resolved.json").unlink()
    assert "report" in page_of(folder)


def test_a_folder_without_metrics_is_one_clear_error(tmp_path):
    with pytest.raises(RunFolderError, match="no such folder"):
        read_run(tmp_path / "nothing")
    (tmp_path / "metrics.jsonl").write_text("")
    with pytest.raises(RunFolderError, match="has no metrics yet"):
        read_run(tmp_path)


def test_the_tolerance_is_that_of_the_compute_dtype():
    assert tolerance_of({"dtype": "float32"}) == ("max", 1e-4)
    assert tolerance_of({"dtype": "float32", "bf16": True})[0] == "mean"
    assert tolerance_of({"dtype": "auto", "parity_tolerance": 0.1}) == ("max", 0.1)


def test_a_long_run_shows_some_of_its_completions(tmp_path):
    page = page_of(make_run(tmp_path / "run", steps=500))
    assert "(every 5th of 500)" in page
    assert page.count("<summary>prompt</summary>") == 100
