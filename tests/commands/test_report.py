"""``shadowmask report`` on real runs, finished or cut off; bad input is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadowmask.cli import main


def test_runs_are_reported_alone_and_beside_each_other(
    workplace: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings]) == 0
    assert main(["train", *settings, "--output_dir", "other", "--seed", "4"]) == 0
    with (workplace / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "rew')  # as a run that is still writing leaves it
    capsys.readouterr()
    assert main(["report", "run"]) == 0
    out = capsys.readouterr().out
    assert "run: finished after step 3" in out
    assert "skipped line 4 (cut off or not JSON)" in out
    assert (workplace / "run" / "report_figures" / "reward.svg").is_file()
    assert main(["report", "run", "other", "--output", "both.html"]) == 0
    page = (workplace / "both.html").read_text()
    assert "run (2 seeds)" in page
    assert "skipped line 4" in page
    assert "<td>seed</td><td>3</td><td>4</td>" in page
    assert "<td>time/rollout" not in page  # metrics are drawn, not listed


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name one or more run folders"),
        (["nothing"], "no such folder"),
        (["."], "has no metrics yet"),
        ([".", "."], "named twice"),
        ([".", "--output"], "expected one argument"),
    ],
)
def test_bad_input_is_one_clear_line(
    workplace: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(["report", *arguments]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]
    assert not (workplace / "report.html").exists()
