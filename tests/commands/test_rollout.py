"""``shadowmask rollout``: what it prints is true, what it saves can be replayed, bad input is one line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from shadowmask.cli import main
from shadowmask.commands.rollout import RolloutArguments
from shadowmask.eviction import list_evictors
from shadowmask.record import ShadowMask
from shadowmask.trl import SMDConfig

PROMPT = "ABCDEFGH" * 4
SMALL = ["--evictor_kwargs", '{"observation_window": 4, "num_sinks": 2}', "--max_new_tokens", "12"]


def test_prints_completions_and_what_was_evicted(
    model_folder: Path, capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *SMALL, "--group_size", "2"]
    assert main(["rollout", *arguments, "--save", "saved", "--evict_every", "4"]) == 0
    out = capsys.readouterr().out
    assert "completion 2 of 2" in out
    assert "32 tokens" in out
    saved = json.loads((workplace / "saved" / "rollout.json").read_text())
    shadow = ShadowMask.load(workplace / "saved" / "shadow.safetensors")
    shadow.check_tokens(saved["prompt_ids"] * 2, saved["completion_ids"])
    assert shadow.retained_fraction() < 1
    assert f"{shadow.retained_fraction():.0%} of a dense cache's" in out


def test_the_same_seed_gives_the_same_completions(
    model_folder: Path, capsys: pytest.CaptureFixture[str], workplace: Path
) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *SMALL]
    runs = {}
    for name, seed in (("a", "1"), ("b", "1"), ("c", "2")):
        assert main(["rollout", *arguments, "--seed", seed, "--save", name]) == 0
        runs[name] = json.loads((workplace / name / "rollout.json").read_text())["completion_ids"]
    assert runs["a"] == runs["b"] != runs["c"]


def test_dense_evicts_nothing(model_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, "--evictor", "dense"]
    assert main(["rollout", *arguments, "--max_new_tokens", "4"]) == 0
    assert "0% of its keys evicted" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--evictor", "snapvk"], "Did you mean 'snapkv'"),
        (["--budget", "3"], "budget=3 is below"),
        (["--compression_ratio", "-0.1"], "outside [0, 1)"),
        (["--evictor_kwargs", "{"], "is not JSON"),
        (["--evictor_kwargs", "[1]"], "must be a mapping"),
        (["--evictor_kwargs", '{"windw": 3}'], "does not take these settings"),
        (["--model", "./nothing"], "does not exist"),
        (["--prompt", "  "], "the prompt is empty"),
        (["--prompt_file", "nothing.txt"], "with --prompt or --prompt_file"),
        (["--dtype", "float31"], "not a torch dtype"),
        (["--evict_every", "0"], "evict_every=0"),
        (["--max_new_tokens", "0"], "max_new_tokens=0"),
        (["--promt", "x"], "did you mean --prompt"),
        (["--chat"], "no chat template"),
        (["--save", "."], "exists already"),
    ],
)
def test_bad_input_is_one_clear_line(
    model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    arguments = ["--model", str(model_folder), "--prompt", PROMPT, *change]
    assert main(["rollout", *arguments]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]


@pytest.mark.parametrize("settings", [RolloutArguments, SMDConfig])
def test_help_lists_the_registered_evictors(settings: type) -> None:
    (evictor,) = (field for field in dataclasses.fields(settings) if field.name == "evictor")
    assert ", ".join(list_evictors()) in evictor.metadata["help"]
