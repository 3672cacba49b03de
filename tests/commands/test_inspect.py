"""``shadowmask inspect`` on runs, saved rollouts and prompts; bad input is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from shadowmask.cli import main
from shadowmask.commands.callbacks import spread, telling_pair
from shadowmask.report.sample import load_samples
from tiny_models import shared_rollout
from tolerances import FLOAT32

PROMPT = "ABCDEFGH" * 4
SMALL = ["--evictor_kwargs", '{"num_sinks": 2, "recent_window": 4}', "--max_new_tokens", "8"]


def test_a_run_saves_what_inspect_shows(
    workplace: Path, settings: list[str], capsys: pytest.CaptureFixture[str], model_folder: Path
) -> None:
    assert main(["train", *settings, "--saved_samples", "2"]) == 0
    saved = sorted((workplace / "run" / "samples").iterdir())
    assert [path.name for path in saved] == ["step-000001.samples.json.gz", "step-000003.samples.json.gz"]
    best, worst = load_samples(saved[0])
    assert best.prompt_ids == worst.prompt_ids
    assert best.reward >= worst.reward
    for sample in (best, worst):
        assert (sample.sparse_logprobs - sample.shadow_logprobs).abs().max() <= FLOAT32
        assert (sample.dense_logprobs - sample.shadow_logprobs).abs().max() > 100 * FLOAT32
        assert sample.facts["model"] == str(model_folder)
        assert sample.restored is not None
    assert main(["inspect", "run"]) == 0
    page = (workplace / "inspect.html").read_text()
    assert "shadowmask inspect: run" in page
    capsys.readouterr()
    assert main(["inspect", "run", "--step", "1", "--sample", "1", "--text"]) == 0
    out = capsys.readouterr().out
    assert "step 1, best of its prompt" in out
    assert "step 1, worst of its prompt" not in out
    # the model before its first update is the one that sampled step 1, and not step 3
    again = ["inspect", "run", "--model", str(model_folder), "--text"]
    assert main([*again, "--step", "1"]) == 0
    assert "giving back would take" in capsys.readouterr().out
    assert main([*again, "--step", "3"]) == 1
    assert "sampling_gap/max" in capsys.readouterr().err


def test_no_samples_are_saved_when_none_are_wanted(workplace: Path, settings: list[str]) -> None:
    assert main(["train", *settings, "--saved_samples", "0"]) == 0
    assert not (workplace / "run" / "samples").exists()


def test_two_evictors_stand_side_by_side(workplace: Path, model_folder: Path) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *SMALL]
    assert main(["inspect", *arguments, "--evictor", "recent", "dense", "--output", "a/b.html"]) == 0
    assert (workplace / "a" / "b.html").is_file()


def test_a_saved_rollout_is_shown(
    workplace: Path, model_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *SMALL, "--group_size", "3"]
    assert main(["rollout", *arguments, "--save", "saved"]) == 0
    assert "shadowmask inspect saved" in capsys.readouterr().out
    assert main(["inspect", "saved", "--sample", "3", "1", "--text"]) == 0
    out = capsys.readouterr().out
    assert out.index("completion 3") < out.index("completion 1")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "name a run folder or a saved rollout, or give --prompt"),
        (["saved", "--prompt", "x"], "name a run folder or a saved rollout, or give --prompt"),
        (["nothing"], "'nothing' does not exist"),
        (["."], "no saved rollouts: train with --saved_samples"),
        (["saved", "--sample", "4"], "holds samples 1 to 1"),
        (["saved", "--sample", "1", "1", "1"], "at most two"),
        (["saved", "saved", "saved"], "at most two stand side by side"),
        (["data.jsonl"], "damaged"),
        (["saved", "--model", "{other}"], "made by another model"),
        (["--prompt", "x", "--evictor", "recent", "h2o", "dense"], "at most two stand side by side"),
        (["--prompt", "x", "--spans", "-1"], "spans=-1"),
        (["--prompt", "x", "--evictor", "recnt"], "Did you mean 'recent'"),
        (["saved", "--outptu", "x"], "did you mean --output"),
    ],
)
def test_bad_input_is_one_clear_line(
    workplace: Path,
    model_folder: Path,
    other_model: Path,
    saved: Path,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    said: str,
) -> None:
    (workplace / "saved").symlink_to(saved)
    arguments = [text.replace("{other}", str(other_model)) for text in arguments]
    capsys.readouterr()
    assert main(["inspect", *arguments]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]
    assert not (workplace / "inspect.html").exists()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, model_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("rollouts") / "saved"
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *SMALL]
    assert main(["rollout", *arguments, "--save", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def other_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of another shape."""
    from tiny_trl import saved_model

    folder = tmp_path_factory.mktemp("other")
    saved_model(folder, "gemma3")
    return folder


def test_saved_steps_are_spread_over_the_run() -> None:
    assert spread(12, 4) == {1, 5, 8, 12}
    assert spread(2, 4) == {1, 2}
    assert spread(7, 1) == {7}
    assert spread(7, 0) == set()


def test_the_pair_that_is_saved_is_of_one_prompt_and_differs_most() -> None:
    batch = shared_rollout()
    order = list(reversed(range(12)))  # rows run against the batch
    rewards = [0.0] * 12
    rewards[order.index(4)], rewards[order.index(0)] = 1.0, 0.5
    best, worst = telling_pair(batch, order, rewards)
    assert order[best] == 4
    assert order[worst] in (3, 5)
