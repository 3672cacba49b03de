"""``shadowmask train`` as a user runs it: a run folder, the same numbers twice, resume, bad input."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

from shadowmask.cli import main
from shadowmask.report.run_folder import last_checkpoint
from tiny_trl import make_tokenizer
from tolerances import FLOAT32


def read_metrics(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def comparable(rows: list[dict]) -> list[dict]:
    timed = ("time", "runtime", "per_second")
    return [{k: v for k, v in row.items() if not any(word in k for word in timed)} for row in rows]


def test_a_run_leaves_everything_behind(workplace: Path, settings: list[str]) -> None:
    assert main(["train", *settings, "--eval_size", "2"]) == 0
    run = workplace / "run"
    rows = read_metrics(run)
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["sampling_gap/max"] <= FLOAT32
        assert row["information_gap/max"] > 100 * FLOAT32  # eviction did bite: dense is off
        assert 0 < row["kv/retained_fraction"] < 1
        assert 0 < row["kv/bytes_peak"] < row["kv/bytes_dense"]
        assert {"reward", "smd/distill_kl", "staleness/kl", "information_gap/agreement_p5"} <= row.keys()
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert config["evict_every"] == 4
    assert config["seed"] == 3
    assert config["learning_rate"] == 1e-3
    assert "steps_per_generation" not in config
    assert "compression_ratio=0.5" in json.loads((run / "resolved.json").read_text())["evictor"]
    assert json.loads((run / "versions.json").read_text())["trl"]
    assert len((run / "samples.jsonl").read_text().splitlines()) == 12
    assert set(json.loads((run / "accuracy_after.json").read_text())) == {"dense", "evicted"}
    assert (run / "run.png").read_bytes().startswith(b"\x89PNG")
    assert (run / "final" / "model.safetensors").is_file()
    assert not list(run.rglob("*.partial"))


def test_a_run_that_evicted_nothing_says_so(
    workplace: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings]) == 0
    assert "nothing was evicted" not in capsys.readouterr().out
    assert main(["train", *settings, "--budget", "500", "--output_dir", "all"]) == 0
    assert "nothing was evicted" in capsys.readouterr().out


def test_the_same_seed_gives_the_same_numbers(workplace: Path, settings: list[str]) -> None:
    assert main(["train", *settings]) == 0
    assert main(["train", *settings, "--output_dir", "again"]) == 0
    assert main(["train", *settings, "--output_dir", "other", "--seed", "4"]) == 0
    first, again, other = (comparable(read_metrics(workplace / n)) for n in ("run", "again", "other"))
    assert first == again
    assert first != other


def test_the_config_of_a_run_repeats_it(workplace: Path, settings: list[str]) -> None:
    assert main(["train", *settings]) == 0
    assert main(["train", "--config", "run/config.yaml", "--output_dir", "again"]) == 0
    assert comparable(read_metrics(workplace / "run")) == comparable(read_metrics(workplace / "again"))


def test_an_interrupted_run_goes_on_as_if_nothing_had_happened(workplace: Path, settings: list[str]) -> None:
    settings = [*settings, "--max_steps", "6"]
    assert main(["train", *settings, "--output_dir", "whole"]) == 0
    command = [sys.executable, "-m", "shadowmask.cli", "train", *settings]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        deadline = time.monotonic() + 120
        metrics = workplace / "run" / "metrics.jsonl"
        while not (metrics.is_file() and metrics.read_text()) and time.monotonic() < deadline:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "--resume --output_dir run" in errors
    stopped = len(read_metrics(workplace / "run"))
    assert 1 <= stopped < 6, "the run was over before the signal came"
    assert main(["train", "--resume", "--output_dir", "run"]) == 0
    assert comparable(read_metrics(workplace / "run")) == comparable(read_metrics(workplace / "whole"))


@pytest.mark.parametrize("stop", [False, True])
def test_a_fall_of_dense_accuracy_is_told_and_can_stop_the_run(
    workplace: Path, settings: list[str], capsys: pytest.CaptureFixture[str], stop: bool
) -> None:
    (workplace / "falling.py").write_text(
        "left = [0.9]\n"
        "def score(completions, answer, **kwargs):\n"
        "    if len(completions) == 2:  # held-out prompts; training has eight\n"
        "        left[0] -= 0.2\n"
        "        return [left[0]] * 2\n"
        "    return [float(text.count('A')) for text in completions]\n"
    )
    flags = ["--reward", "falling.py:score", "--eval_size", "2", "--eval_before", "false"]
    flags += ["--dense_guard_every", "2", "--dense_guard_stop", str(stop).lower(), "--max_steps", "5"]
    assert main(["train", *settings, *flags]) == 0
    said = capsys.readouterr().out
    assert "held-out dense accuracy fell from 0.700 to 0.500 by step 2" in said
    rows = read_metrics(workplace / "run")
    assert len(rows) == (2 if stop else 5)
    assert rows[1]["held_out/dense_accuracy"] == pytest.approx(0.5)
    assert (workplace / "run" / "accuracy_after.json").is_file()


def test_a_dense_learner_says_that_there_is_no_parity_to_guard(
    workplace: Path, settings: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", *settings, "--method", "sparse-rl"]) == 0
    said = capsys.readouterr().out
    assert "the learner ignores the record" in said and "the learner is not the sampler" in said
    assert "learner = sampler" not in said
    row = read_metrics(workplace / "run")[0]
    assert row["sampling_gap/max"] > 100 * FLOAT32
    assert {"correction/rejected_fraction", "off_policy/ess", "gradient/group_noise"} <= row.keys()


def test_more_caches_are_evaluated(workplace: Path, settings: list[str]) -> None:
    caches = (
        '{"few": {"evictor": "random", "budget": 8, "evictor_kwargs": {"num_sinks": 1, "recent_window": 2}}}'
    )
    assert main(["train", *settings, "--eval_size", "2", "--eval_caches", caches]) == 0
    assert set(json.loads((workplace / "run/accuracy_after.json").read_text())) == {"dense", "evicted", "few"}
    assert set(json.loads((workplace / "run/accuracy_before.json").read_text())) == {"dense", "evicted"}


def test_a_half_written_checkpoint_is_passed_over(tmp_path: Path) -> None:
    for step, complete in ((2, True), (10, True), (12, False)):
        (tmp_path / f"checkpoint-{step}").mkdir()
        if complete:
            (tmp_path / f"checkpoint-{step}" / "trainer_state.json").touch()
    assert last_checkpoint(tmp_path) == str(tmp_path / "checkpoint-10")
    assert last_checkpoint(tmp_path / "checkpoint-2") is None


def test_two_processes_write_one_folder(workplace: Path, settings: list[str]) -> None:
    """The first process writes. Each has a seed of its own, so no run of one process equals this."""
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    halved = [*settings, "--per_device_train_batch_size", "4", "--ddp_backend", "gloo", "--eval_size", "2"]
    done = subprocess.run(
        [*launch, "-m", "shadowmask.cli", "train", *halved, "--use_cpu", "--output_dir", "two"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("step 1/3") == 1
    rows = read_metrics(workplace / "two")
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["sampling_gap/max"] <= FLOAT32 for row in rows)
    assert (workplace / "two" / "final" / "model.safetensors").is_file()
    assert (workplace / "two" / "accuracy_after.json").is_file()


def test_lora_saves_an_adapter(workplace: Path, settings: list[str]) -> None:
    assert main(["train", *settings, "--use_peft", "--lora_r", "4"]) == 0
    assert (workplace / "run" / "final" / "adapter_model.safetensors").is_file()
    assert not (workplace / "run" / "final" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (["--evictor", "snapvk"], "Did you mean 'snapkv'"),
        (["--budget", "8"], "below num_sinks=2 + recent_window=4"),
        (["--compression_ratio", "1.0"], "outside [0, 1)"),
        (["--reward", "tiny_rewards:short"], "returned 1 values for 8 completions"),
        (["--reward", "tiny_rewards:nan"], "returned nan for completion 0"),
        (["--reward", "tiny_rewards:broken"], "cannot score this"),
        (["--reward", "tiny_rewards:nothing"], "returned a NoneType, not a list"),
        (["--reward", "tiny_rewards:words"], "returned 'x' for completion 0"),
        (["--evictor_kwargs", "[1]"], "must be a mapping"),
        (["--load_in_4bit"], "load_in_4bit=True is not supported"),
        (["--resume"], "--resume needs the run's folder"),
        (["--reward", "tiny_rewards:missing"], "has no function 'missing'"),
        (["--reward", "no_such_module:f"], "cannot import 'no_such_module'"),
        (["--dataset", "nothing.jsonl"], "does not exist"),
        (["--dataset", "empty.jsonl"], "empty.jsonl"),
        (["--dataset", "columns.jsonl"], "no column 'prompt'; its columns are question"),
        (["--model_name_or_path", "./nothing"], "does not exist"),
        (["--model_name_or_path", "nobody/nothing"], "no network"),
        (["--method", "nave"], "method='nave' must be one of"),
        (["--method_kwargs", '{"cap": 2}'], "method 'smd' has no setting 'cap'"),
        (["--eval_caches", '{"x": {"evictor": "rndom"}}'], "unknown evictor 'rndom'"),
        (["--dense_guard_every", "2"], "needs held-out prompts"),
        (["--top_k", "50"], "top_k=50"),
        (["--temperature", "0"], "temperature=0.0 must be positive"),
        (["--distil_coef", "0.2"], "did you mean --distill_coef"),
        (["--max_steps", "many"], "invalid int value: 'many'"),
        (["--config", "nothing.yaml"], "does not exist"),
        (["--config", "misspelt.yaml"], "unknown setting 'evicter', did you mean 'evictor'"),
        (["--config", "list.yaml"], "must hold settings"),
        (["--resume", "--output_dir", "nowhere"], "not a run folder"),
    ],
)
def test_bad_input_is_one_clear_line(
    workplace: Path, settings: list[str], capfd: pytest.CaptureFixture[str], change: list[str], said: str
) -> None:
    (workplace / "empty.jsonl").write_text("")
    (workplace / "list.yaml").write_text("- 1\n")
    (workplace / "misspelt.yaml").write_text("evicter: snapkv\n")
    (workplace / "columns.jsonl").write_text('{"question": "1"}\n')
    if change[0] == "--budget":
        change = [
            *change,
            "--evictor_kwargs",
            '{"observation_window": 4, "num_sinks": 2, "recent_window": 8}',
        ]
        said = "below num_sinks=2 + recent_window=8"
    arguments = change if "--resume" in change else [*settings, *change]
    assert main(["train", *arguments]) == 1
    errors = [line for line in capfd.readouterr().err.splitlines() if line.startswith("shadowmask train:")]
    assert len(errors) == 1
    assert said in errors[0]
    assert not (workplace / "run").exists(), "something half-made stays behind"


def test_flags_with_equals_signs_are_flags(workplace: Path, settings: list[str]) -> None:
    joined = [f"{flag}={value}" for flag, value in zip(settings[::2], settings[1::2], strict=True)]
    assert main(["train", *joined, "--max_steps=4"]) == 0
    assert len(read_metrics(workplace / "run")) == 4
    assert main(["train", "--resume", "--output_dir=run", "--max_steps=5"]) == 0
    assert len(read_metrics(workplace / "run")) == 5


def test_chat_prompts_and_rewards_that_abstain(workplace: Path, settings: list[str]) -> None:
    rows = [{"prompt": [{"role": "user", "content": "ABCDEFGH" * 3 + "X" * n}]} for n in range(8)]
    (workplace / "chat.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (workplace / "chat_rewards.py").write_text(
        "def judge(prompts, completions, **kwargs):\n"
        "    texts = [completion[0]['content'] for completion in completions]\n"
        "    return [None if not text else float(len(text) % 3) for text in texts]\n"
    )
    change = ["--dataset", "chat.jsonl", "--reward", "chat_rewards:judge", "--eval_size", "2"]
    assert main(["train", *settings, *change]) == 1  # the tokenizer has no chat template
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}Z"
    folder = workplace / "chat_model"
    shutil.copytree(settings[1], folder)
    tokenizer.save_pretrained(folder)
    assert main(["train", *settings, *change, "--model_name_or_path", str(folder)]) == 0
    assert json.loads((workplace / "run" / "accuracy_after.json").read_text())["dense"]["prompts"] <= 2


def test_a_run_is_not_overwritten(
    workplace: Path, settings: list[str], capfd: pytest.CaptureFixture[str]
) -> None:
    (workplace / "run").mkdir()
    (workplace / "run" / "thesis.txt").write_text("years of work")
    assert main(["train", *settings]) == 1
    assert "not empty" in capfd.readouterr().err
    assert [path.name for path in (workplace / "run").iterdir()] == ["thesis.txt"]


def test_the_demo_on_the_bundled_model(workplace: Path) -> None:
    """The real command on the real model, cut down to two steps of four short completions."""
    pytest.importorskip("gguf")
    arguments = [
        *("--max_steps", "2", "--per_device_train_batch_size", "4", "--num_generations", "2"),
        *("--warmup_sft_steps", "0", "--eval_size", "2", "--save_steps", "100", "--output_dir", "demo"),
        *("--task_kwargs", '{"num_facts": 4, "num_fillers": 4}', "--temperature", "1.5"),
    ]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "shadowmask.cli", "train", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=280)
    assert done.returncode == 0, done.stderr
    assert "held-out accuracy before training, evicted cache" in done.stdout
    assert "step 2/2" in done.stdout
    rows = read_metrics(workplace / "demo")
    assert len(rows) == 2
    for row in rows:
        assert row["sampling_gap/max"] <= 1e-4  # the limit for this 30-layer model
        assert row["information_gap/max"] > 1e-2
        assert row["kv/bytes_peak"] < row["kv/bytes_dense"]
