"""A run folder is never overwritten, never half written, and takes up where a run stopped."""

import json
import subprocess
from enum import StrEnum
from pathlib import Path

import pytest
import torch
import yaml

from shadowmask.report import versions
from shadowmask.report.run_folder import RunFolder, RunFolderError, read_records, write_atomically


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "runs" / "first")


def test_a_run_is_never_overwritten(folder):
    folder.append_metrics({"step": 1})
    with pytest.raises(RunFolderError, match=r"not empty.*--resume") as caught:
        RunFolder(folder.path)
    assert "\n" not in str(caught.value)
    assert RunFolder(folder.path, resume=True).read_metrics() == [{"step": 1}]


def test_an_empty_folder_may_be_used_but_not_resumed(tmp_path):
    RunFolder(tmp_path)
    with pytest.raises(RunFolderError, match="no run to resume"):
        RunFolder(tmp_path, resume=True)


def test_a_file_in_the_way_is_named(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(RunFolderError, match="is a file"):
        RunFolder(tmp_path / "run")


def test_the_config_reads_back_in_its_order(folder):
    class Schedule(StrEnum):
        LINEAR = "linear"

    config = {"z": 1, "a": {"path": Path("x/y"), "rates": (0.5, None)}, "schedule": Schedule.LINEAR}
    folder.write_config(config)
    read = yaml.safe_load((folder.path / "config.yaml").read_text())
    assert read == {"z": 1, "a": {"path": "x/y", "rates": [0.5, None]}, "schedule": "linear"}
    assert list(read) == ["z", "a", "schedule"]


def test_a_setting_that_cannot_be_read_back_is_refused(folder):
    with pytest.raises(TypeError, match="Tensor"):
        folder.write_config({"weight": torch.ones(1)})
    assert not list(folder.path.glob("*"))


def test_metrics_append_and_what_json_lacks_becomes_null(folder):
    folder.append_metrics({"step": 1, "reward": 0.5, "loss": float("nan")})
    folder.append_metrics({"step": 2, "reward": 0.75, "loss": float("inf")})
    lines = folder.metrics_path.read_text().splitlines()
    assert [json.loads(line)["reward"] for line in lines] == [0.5, 0.75]
    assert folder.read_metrics()[0]["loss"] is folder.read_metrics()[1]["loss"] is None


def test_a_metric_without_a_step_is_refused(folder):
    with pytest.raises(ValueError, match="no 'step'"):
        folder.append_metrics({"reward": 1.0})
    assert folder.read_metrics() == []


def test_samples_keep_their_text(folder):
    folder.append_samples([{"step": 1, "completion": "42 €\n\u2028<|im_end|>", "reward": 1.0}])
    assert folder.read_samples()[0]["completion"] == "42 €\n\u2028<|im_end|>"


def test_cutting_back_forgets_later_steps_and_a_broken_last_line(folder):
    for step in (1, 2, 3):
        folder.append_metrics({"step": step})
        folder.append_samples([{"step": step, "n": n} for n in range(2)])
    with folder.metrics_path.open("ab") as file:
        file.write('{"step": 4, "note": "€'.encode()[:-1])  # cut inside a character
    assert [record["step"] for record in folder.read_metrics()] == [1, 2, 3]
    folder.truncate_after(2)
    folder.append_metrics({"step": 3, "again": True})
    assert folder.read_metrics() == [{"step": 1}, {"step": 2}, {"step": 3, "again": True}]
    assert [record["step"] for record in folder.read_samples()] == [1, 1, 2, 2]


def test_cutting_back_a_fresh_folder_does_nothing(folder):
    folder.truncate_after(0)
    assert not list(folder.path.glob("*"))


def test_a_broken_line_in_the_middle_is_an_error_and_not_skipped(folder):
    folder.path.mkdir(parents=True)
    folder.metrics_path.write_text('{"step": 1}\n{"st\n{"step": 3}\n')
    with pytest.raises(RunFolderError, match="line 2"):
        read_records(folder.metrics_path)


def test_a_failed_write_keeps_the_old_file_and_leaves_no_other(folder, monkeypatch):
    folder.write_json("result.json", {"value": 1})
    monkeypatch.setattr("os.replace", lambda *paths: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(OSError, match="disk full"):
        write_atomically(folder.path / "result.json", "other")
    assert [path.name for path in folder.path.iterdir()] == ["result.json"]
    assert json.loads((folder.path / "result.json").read_text()) == {"value": 1}


def test_versions_name_what_ran(folder):
    folder.write_versions()
    found = json.loads((folder.path / "versions.json").read_text())
    assert found["torch"] == torch.__version__
    assert {"python", "transformers", "trl", "shadowmask", "git_commit", "cpus"} <= set(found)


def test_the_commit_is_that_of_a_tracked_file_only(tmp_path):
    def git(*arguments):
        identity = ("-c", "user.name=n", "-c", "user.email=e@example.org")
        subprocess.run(["git", *identity, *arguments], cwd=tmp_path, check=True, capture_output=True)

    tracked, other = tmp_path / "tracked.py", tmp_path / "other.py"
    tracked.write_text("1")
    assert versions.git_commit(tracked) is None
    git("init")
    git("add", "tracked.py")
    git("commit", "-m", "first")
    other.write_text("1")
    clean = versions.git_commit(tracked)
    assert clean is not None
    assert len(clean) == 40
    assert versions.git_commit(other) is None
    tracked.write_text("2")
    assert versions.git_commit(tracked) == f"{clean}-dirty"


def test_a_new_run_that_fails_early_leaves_nothing(folder):
    folder.write_config({"seed": 1})
    folder.discard()
    assert not folder.path.exists()


def test_a_run_with_something_to_show_is_not_discarded(folder):
    folder.append_metrics({"step": 1})
    folder.discard()
    RunFolder(folder.path, resume=True).discard()
    assert folder.read_metrics() == [{"step": 1}]


def test_a_resumed_run_forgets_the_records_that_it_will_make_again(folder):
    folder.append_metrics({"step": 2})
    for step in (2, 3):
        write_atomically(folder.records_path(step), b"\x00")
    folder.truncate_after(2)
    assert list((folder.path / "samples").iterdir()) == [folder.records_path(2)]
