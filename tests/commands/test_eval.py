"""``shadowmask eval``: a matrix of paired cells, kept when interrupted, from models and run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from shadowmask.cli import main
from shadowmask.commands import eval as command
from shadowmask.report.matrix import DENSE

TASK = ["--task", "recall", "--task_kwargs", '{"num_facts": 4, "num_fillers": 1}', "--limit", "6"]
SMALL = ["--max_new_tokens", "6", "--evictor_kwargs", '{"num_sinks": 2}']


@pytest.fixture
def arguments(model_folder: Path, workplace: Path) -> list[str]:
    cells = ["--evictor", "recent", "random", "--compression_ratio", "0", "0.5"]
    return ["eval", "--model", str(model_folder), *TASK, *SMALL, *cells]


def read(path: str = "eval.json") -> dict[str, Any]:
    return json.loads(Path(path).read_text())


def test_a_matrix_of_paired_cells(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*arguments, "--budget", "40"]) == 0
    out = capsys.readouterr().out
    names = [
        "dense",
        *(f"{e} {s}" for e in ("recent", "random") for s in ("compression_ratio=0.5", "budget=40")),
    ]
    stored = read()
    assert list(stored["cells"]) == names
    assert all(name in out for name in names)
    assert len(stored["items"]) == 6
    assert stored["settings"]["version of torch"] == torch.__version__
    dense = stored["cells"][DENSE]
    assert dense["versions"]["transformers"]
    for name, cell in stored["cells"].items():
        assert [a["prompt_tokens"] for a in cell["answers"]] == [a["prompt_tokens"] for a in dense["answers"]]
        assert {"accuracy", "reward"} <= cell["answers"][0]["scores"].keys()
        assert (stored["figures"] and figures(stored, name)["kv_share"] < 1) == (name != DENSE)
        assert figures(stored, name)["score"]["method"] == "Wilson"
        assert (figures(stored, name)["difference"] is None) == (name == DENSE)
    assert Path("eval.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("eval.svg").read_text()
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]


def figures(stored: dict[str, Any], name: str) -> dict[str, Any]:
    return stored["figures"][name]


def test_finished_cells_are_not_run_again(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*arguments, "--save", "whole.json"]) == 0
    ran: list[str] = []
    real = command.evaluate

    def interrupted(engine: Any, *args: Any, **kwargs: Any) -> Any:
        ran.append(engine.evictor.name)
        if len(ran) == 3:
            raise KeyboardInterrupt
        return real(engine, *args, **kwargs)

    monkeypatch.setattr(command, "evaluate", interrupted)
    assert main(arguments) == 130
    assert "the same command goes on" in capsys.readouterr().err
    assert list(read()["cells"]) == ["dense", "recent compression_ratio=0.5"]
    assert main(arguments) == 0
    assert ran == ["dense", "recent", "random", "random"]
    assert main(arguments) == 0
    assert len(ran) == 4
    for name, cell in read("whole.json")["cells"].items():
        assert cell["answers"] == read()["cells"][name]["answers"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--seed", "1"], "seed=0 (now 1)"),
        (["--limit", "3"], "limit=6 (now 3)"),
        (["--temperature", "0.5"], "temperature=0.0 (now 0.5)"),
        (["--model", "other"], "model="),
    ],
)
def test_a_file_is_not_continued_under_other_settings(
    arguments: list[str],
    model_folder: Path,
    workplace: Path,
    capsys: pytest.CaptureFixture[str],
    change: list[str],
    said: str,
) -> None:
    (workplace / "other").symlink_to(model_folder)
    assert main(arguments) == 0
    before = read()
    assert main([*arguments, *change]) == 1
    assert said in capsys.readouterr().err
    assert read() == before


def test_other_weights_under_the_same_name_are_noticed(
    arguments: list[str], model_folder: Path, workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    shutil.copytree(model_folder, "mine")
    arguments[2] = "mine"
    assert main(arguments) == 0
    model = AutoModelForCausalLM.from_pretrained("mine")
    with torch.no_grad():
        model.model.norm.weight.mul_(1.01)
    model.save_pretrained("mine")
    assert main(arguments) == 1
    assert "weights=" in capsys.readouterr().err


def test_batches_and_memory_limits_do_not_count_as_settings(arguments: list[str]) -> None:
    assert main([*arguments, "--save", "a.json"]) == 0
    assert main([*arguments, "--save", "b.json", "--batch_size", "2", "--kv_memory_limit", "500kB"]) == 0
    for name, cell in read("a.json")["cells"].items():
        assert cell["answers"] == read("b.json")["cells"][name]["answers"]
    assert main([*arguments, "--save", "a.json", "--batch_size", "2"]) == 0


@pytest.fixture
def run_settings(settings: list[str]) -> list[str]:
    """A training run on a task, from the settings of one on data."""
    kept = settings[:2] + settings[6:]
    return [*kept, *TASK[:4], "--train_size", "4", "--budget", "40", "--max_steps", "2"]


@pytest.mark.parametrize("lora", [False, True])
def test_a_run_folder_brings_its_model_and_its_settings(
    run_settings: list[str], workplace: Path, capsys: pytest.CaptureFixture[str], lora: bool
) -> None:
    peft = ["--use_peft", "--lora_r", "4", "--lora_target_modules", "all-linear"] if lora else []
    assert main(["train", *run_settings, *peft]) == 0
    assert main(["eval", "--model", "run", "--limit", "4"]) == 0
    stored = read("run/eval.json")
    settings = stored["settings"]
    assert settings["model"] == "run/final"
    assert (settings["seed"], settings["max_new_tokens"], settings["evict_every"]) == (3, 12, 4)
    assert list(stored["cells"]) == ["dense", "snapkv budget=40"]
    assert "num_sinks=2" in stored["cells"]["snapkv budget=40"]["settings"]
    capsys.readouterr()
    # without a final model the last checkpoint counts; it is the same model here
    Path("run/final").rename("run/kept")
    assert main(["eval", "--model", "run", "--limit", "4", "--save", "again.json"]) == 0
    assert read("again.json")["settings"]["model"] == "run/checkpoint-2"
    assert read("again.json")["settings"]["weights"] == settings["weights"]
    assert main(["eval", "--model", "run/checkpoint-1", *TASK, "--save", "first.json"]) == 0
    assert read("first.json")["settings"]["weights"] != settings["weights"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--model", "./nothing"], "does not exist"),
        (["--model", "empty"], "neither a model folder (no config.json) nor a run folder"),
        (["--model", "young"], "has no checkpoint and no final model yet"),
        (["--model", "odd"], "holds no settings"),
        (["--model", "own"], "trained on data of its own: name a --task"),
        (["--task", "recal"], "did you mean 'recall'"),
        (["--task", "gsm8k", "--task_kwargs", "{}", "--dataset", "empty.jsonl"], "is empty"),
        (["--evictor", "recent", "snapvk"], "Did you mean 'snapkv'"),
        (["--compression_ratio", "0.5", "1.0"], "compression_ratio=1.0 is outside [0, 1)"),
        (["--compression_ratio", "-0.1"], "compression_ratio=-0.1 is outside [0, 1)"),
        (["--budget", "3"], "budget=3 is below"),
        (["--limit", "0"], "limit=0 must be at least 1"),
        (["--batch_size", "0"], "batch_size=0"),
        (["--max_new_tokens", "0"], "max_new_tokens=0"),
        (["--temperature", "-1"], "temperature=-1.0 must not be negative"),
        (["--evict_every", "0"], "evict_every=0"),
        (["--kv_memory_limit", "much"], "kv_memory_limit='much' is not a number of bytes"),
        (["--kv_memory_limit", "1kB"], "is too small"),
        (["--dtype", "float31"], "not a torch dtype"),
        (["--save", "eval.txt"], "must end in .json"),
        (["--save", "no/eval.json"], "folder no does not exist"),
        (["--save", "data.json"], "holds no evaluation that could be continued"),
        (["--evictr", "recent"], "did you mean --evictor"),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str], workplace: Path, capsys: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    (workplace / "empty").mkdir()
    (workplace / "empty.jsonl").write_text("")
    (workplace / "data.json").write_text("[1]")
    configs = {"young": "task: recall\n", "odd": "- 1\n", "own": "dataset: data.jsonl\nreward: x:y\n"}
    for name, config in configs.items():
        (workplace / name).mkdir()
        (workplace / name / "config.yaml").write_text(config)
    (workplace / "own" / "final").mkdir()
    (workplace / "odd" / "final").mkdir()
    base = arguments
    if change == ["--model", "own"]:
        base = ["eval", *arguments[3 + len(TASK) :]]
    before = sorted(path.name for path in workplace.iterdir())
    assert main([*base, *change]) == 1
    errors = capsys.readouterr().err.splitlines()
    assert len(errors) == 1
    assert said in errors[0]
    assert sorted(path.name for path in workplace.iterdir()) == before


def test_a_task_without_held_out_prompts(
    arguments: list[str], workplace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    row = {"question": "1 + 1?", "answer": "#### 2"}
    (workplace / "one.jsonl").write_text(json.dumps(row) + "\n")
    change = ["--task", "gsm8k", "--task_kwargs", '{"chat": false}', "--dataset", "one.jsonl"]
    assert main([*arguments, *change]) == 1
    assert "no rows for the split 'eval'" in capsys.readouterr().err
