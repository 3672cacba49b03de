"""``shadowmask train`` on every kind of task: prompts are made, cut, answered, scored and learned from."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from shadowmask.cli import main
from shadowmask.commands.common import parse
from shadowmask.commands.data import load_data
from shadowmask.commands.train import ReplayableModelConfig, TrainArguments, _with_defaults
from shadowmask.tasks import get_task
from shadowmask.trl import SMDConfig

PROCEDURAL = {
    "recall": {"num_facts": 3, "num_fillers": 1},
    "multihop": {"num_chains": 2, "num_hops": 2, "num_fillers": 1},
    "arithmetic": {"num_facts": 3, "num_fillers": 1, "chat": True},
    "hard-needle": {"num_needles": 2, "num_chars": 200},
    "reasoning-gym:chain_sum": {"chat": True},
}
PUBLISHED = {
    "gsm8k": {"format_weight": 0.2},
    "hotpotqa": {},
    "tldr": {},
    "govreport": {"chat": False},
}
LIMITS = {"gsm8k": 400, "hotpotqa": 480, "tldr": 300, "govreport": 400}  # characters, with this tokenizer


@pytest.fixture
def settings(model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.chdir(tmp_path)
    return [
        *("--model_name_or_path", str(model_folder), "--output_dir", "run", "--max_steps", "1"),
        *("--per_device_train_batch_size", "4", "--num_generations", "2", "--max_completion_length", "6"),
        *("--bf16", "false", "--logging_steps", "1", "--save_strategy", "no", "--train_size", "4"),
        *("--eval_size", "1", "--gradient_checkpointing", "false"),
    ]


def check_run(folder: Path, limit: int | None) -> None:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1]
    assert rows[0]["sampling_gap/max"] < 1e-4
    assert 0 <= rows[0]["reward"] <= 1
    assert 0 < rows[0]["kv/retained_fraction"] < 1
    reports = json.loads((folder / "data.json").read_text())
    assert set(reports) == {"train", "held_out"}
    assert reports["train"]["limit"] == limit
    accuracy = json.loads((folder / "accuracy_after.json").read_text())
    assert 0 <= accuracy["evicted"]["mean"] <= 1


@pytest.mark.parametrize("task", PROCEDURAL)
def test_a_task_that_makes_its_own_prompts(task: str, settings: list[str]) -> None:
    assert main(["train", *settings, "--task", task, "--task_kwargs", json.dumps(PROCEDURAL[task])]) == 0
    check_run(Path("run"), limit=None)


@pytest.mark.parametrize("task", PUBLISHED)
def test_a_published_task_on_local_data(
    task: str, settings: list[str], fixtures: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = ["--dataset", str(fixtures / f"{task}.jsonl"), "--max_prompt_tokens", str(LIMITS[task])]
    assert (
        main(["train", *settings, "--task", task, *data, "--task_kwargs", json.dumps(PUBLISHED[task])]) == 0
    )
    check_run(Path("run"), limit=LIMITS[task])
    said = capsys.readouterr().out
    assert "train data: 4 prompts of" in said
    assert f"held-out {get_task(task).metric} before training, evicted cache: 0." in said
    if task != "gsm8k":
        assert f"cut to max_prompt_tokens={LIMITS[task]}" in said


@pytest.mark.parametrize("form", ["plain", "chat"])
def test_own_data_with_a_reward_from_a_file(form: str, settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "helper.py").write_text(
        "def text(c): return c if isinstance(c, str) else c[0]['content']\n"
    )
    (tmp_path / "elsewhere" / "mine.py").write_text(
        "import helper\n"
        "def reward(completions, letter, **kwargs):\n"
        "    return [float(helper.text(c).count(x)) for c, x in zip(completions, letter)]\n"
    )
    texts = [f"Write as many e as you can, {n}." + " Go on!" * n for n in range(20, 26)]
    prompts = [[{"role": "user", "content": text}] if form == "chat" else text for text in texts]
    rows = [{"prompt": prompt, "letter": "e"} for prompt in prompts]
    (tmp_path / "mine.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    own = ["--dataset", "mine.jsonl", "--reward", "elsewhere/mine.py:reward", "--max_prompt_tokens", "100"]
    assert main(["train", *settings, *own]) == 0
    report = json.loads(Path("run/data.json").read_text())["train"]
    assert report["cut"] == report["rows"] == 5


def test_a_task_may_be_given_another_reward(settings: list[str], tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text(
        "def length(completions, answer, **kwargs):\n    return [float(len(c)) for c in completions]\n"
    )
    own = ["--task", "multihop", "--reward", "other.py:length", "--task_kwargs", '{"num_chains": 2}']
    assert main(["train", *settings, *own]) == 0
    row = json.loads(Path("run/metrics.jsonl").read_text().splitlines()[0])
    assert "rewards/length/mean" in row
    assert json.loads(Path("run/accuracy_after.json").read_text())["dense"]["mean"] > 1  # its scale, not ours


def test_the_demo_on_another_task_takes_none_of_its_settings() -> None:
    kinds = [TrainArguments, SMDConfig, ReplayableModelConfig]
    for own, kwargs in (([], {}), (["--task_kwargs", '{"num_hops": 3}'], {"num_hops": 3})):
        args, config, model = parse(kinds, _with_defaults(["--task", "multihop", *own]), "train", "")
        assert (args.task, args.warmup_sft_steps) == ("multihop", 0)
        assert load_data(args, 0).task == get_task("multihop", **kwargs)
        assert model.model_name_or_path == "demo"
        assert config.compression_ratio == 0.5
    args, *_ = parse(kinds, _with_defaults([]), "train", "")
    assert (args.task, args.warmup_sft_steps) == ("recall", 5)


def test_own_data_needs_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "--dataset", "mine.jsonl", "--output_dir", str(tmp_path / "run")]) == 1
    assert "name a model: --model_name_or_path" in capsys.readouterr().err


BAD_REWARDS = """
def needy(completions, answr, **kwargs):
    return [0.0]
def closed(completions):
    return [0.0]
"""


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--task", "multihop", "--dataset", "DATA/gsm8k.jsonl"], "makes its own prompts"),
        (["--task", "gsm8k", "--dataset", "DATA/tldr.jsonl"], "no column 'question'; its columns are prompt"),
        (["--task", "gsm8k", "--dataset", "nothing.jsonl"], "does not exist"),
        (["--task", "gsm8k", "--dataset", "./nothing"], "does not exist"),
        (["--task", "gsm8k", "--dataset", "notes.txt"], "none of the endings .jsonl, .json, .parquet"),
        (["--task", "gsm8k"], "data set 'openai/gsm8k' cannot be loaded"),
        (
            ["--task", "gsm8k", "--dataset", "DATA/gsm8k.jsonl", "--max_prompt_tokens", "20"],
            "leaves no prompt",
        ),
        (["--task", "gsm8k", "--dataset", "DATA/gsm8k.jsonl", "--max_prompt_tokens", "0"], "at least 1"),
        (["--task", "gsm8k", "--task_kwargs", '{"shot": 6}'], "did you mean 'shots'"),
        (["--task", "gsm8k", "--task_kwargs", '{"shots": "6"}'], "shots='6' must be of type int"),
        (["--task", "reasoning-gym:chain_some"], "did you mean 'chain_sum'"),
        (["--task", "arithmetic", "--eval_size", "-1"], "eval_size=-1"),
        (["--task", "arithmetic", "--reward", "rewards.py:needy"], "missing a required argument: 'answr'"),
        (["--task", "arithmetic", "--reward", "rewards.py:closed"], "an unexpected keyword argument"),
        (["--task", "arithmetic", "--reward", "nothing.py:f"], "no such file"),
        (["--task", "arithmetic", "--reward", "wrong.py:f"], "wrong.py, line 1"),
        (["--task", "arithmetic", "--reward", "rewards"], "module:function or path.py:function"),
        (["--dataset", "DATA/gsm8k.jsonl", "--reward", "rewards.py:closed"], "no column 'prompt'"),
        (["--dataset", "DATA/tldr.jsonl"], "needs --reward"),
        (["--dataset", "odd.jsonl", "--reward", "rewards.py:needy"], "row 1: the prompt has a message with"),
        (
            ["--dataset", "DATA/tldr.jsonl", "--reward", "rewards.py:needy", "--dataset_split", "x"],
            "splits train",
        ),
    ],
)
def test_bad_input_is_one_clear_line(
    arguments: list[str],
    said: str,
    settings: list[str],
    fixtures: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "rewards.py").write_text(BAD_REWARDS)
    (tmp_path / "wrong.py").write_text("def f(:\n")
    (tmp_path / "notes.txt").write_text("notes")
    (tmp_path / "odd.jsonl").write_text(
        '{"prompt": [{"role": "user", "content": "?"}]}\n{"prompt": [{"role": "boss", "content": "?"}]}\n'
    )
    arguments = [argument.replace("DATA", str(fixtures)) for argument in arguments]
    assert main(["train", *settings, *arguments]) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("shadowmask train:")]
    assert len(errors) == 1
    assert said in errors[0]
    assert not Path("run").exists()
