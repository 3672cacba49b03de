"""``configs/``: every combination is a valid run, fits its hardware by arithmetic, and takes a step."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from shadowmask.cli import main
from shadowmask.commands.common import parse
from shadowmask.commands.train import ReplayableModelConfig, TrainArguments
from shadowmask.tasks import get_task
from shadowmask.trl import SMDConfig

CONFIGS = Path(__file__).parents[2] / "configs"
DOCS = (Path(__file__).parents[2] / "docs" / "configs.md").read_text(encoding="utf-8")
COMMANDS = re.findall(r"^(?:shadowmask|torchrun .* -m shadowmask.cli) (train .*)$", DOCS, re.MULTILINE)
LIMITS = {"gsm8k": 400, "hotpotqa": 480, "tldr": 300, "govreport": 400}  # characters, with this tokenizer
CAPACITY = {"lora-24gb": 24, "full-80gb": 80, "lora-24gb + ddp-8gpu": 24}  # GiB
KINDS = [TrainArguments, SMDConfig, ReplayableModelConfig]
# what a CPU, a tiny model and four rows of data change
SMALL = [
    *("--dtype", "float32", "--bf16", "false", "--per_device_train_batch_size", "4"),
    *("--num_generations", "2", "--gradient_accumulation_steps", "1", "--max_completion_length", "6"),
    *("--max_steps", "1", "--train_size", "4", "--eval_size", "1", "--save_strategy", "no"),
    *("--output_dir", "run"),
]


@pytest.fixture(scope="module")
def memory() -> ModuleType:
    spec = importlib.util.spec_from_file_location("memory", CONFIGS / "memory.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def qwen_folder(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerFast) -> Path:
    folder = tmp_path_factory.mktemp("qwen")
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=16,
        max_position_embeddings=8192,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.15,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def arguments(*names: str) -> list[str]:
    return [word for name in names for word in ("--config", str(CONFIGS / f"{name}.yaml"))]


def test_the_docs_have_a_command_for_every_combination(memory: ModuleType) -> None:
    wanted = {(task, *hardware) for task in memory.TASKS for hardware in memory.HARDWARE.values()}
    found = {tuple(re.findall(r"configs/([\w-]+)\.yaml", command)) for command in COMMANDS}
    assert found == wanted
    used = {name for names in wanted for name in names}
    assert used == {path.stem for path in CONFIGS.glob("*.yaml")}


@pytest.mark.parametrize("command", COMMANDS, ids=lambda c: c.rsplit("/", 1)[-1])
def test_every_command_is_a_valid_run(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(CONFIGS.parent)
    words = command.split()[1:]
    args, config, model = parse(KINDS, [*words, "--bf16", "false"], "train", "")  # no bf16 on every CPU
    assert model.model_name_or_path == "Qwen/Qwen3-4B-Instruct-2507"
    assert repr(config.make_evictor()).startswith("SnapKVEvictor(compression_ratio=0.5")
    assert (config.distill_coef, config.num_generations) == (0.1, 8)
    assert model.use_peft == ("lora" in command)
    processes = 8 if "ddp" in command else 1
    assert processes * config.per_device_train_batch_size * config.gradient_accumulation_steps == 64
    assert args.max_prompt_tokens >= 512
    get_task(args.task)


def test_the_arithmetic_in_the_comments_is_up_to_date_and_fits(memory: ModuleType) -> None:
    for task in memory.TASKS:
        text = (CONFIGS / f"{task}.yaml").read_text(encoding="utf-8")
        assert text == memory.with_block(task), "run: python configs/memory.py"
        for name, hardware in memory.HARDWARE.items():
            figures = memory.expected(memory.merged(task, hardware))
            # a tenth is left for what the arithmetic does not have
            assert figures["peak"] < 0.9 * CAPACITY[name] * 2**30, (task, name)


def test_the_arithmetic_agrees_with_the_model(memory: ModuleType) -> None:
    whole, trained = memory.parameters(None)
    assert whole == trained == 4_022_468_096  # the published size
    assert memory.parameters(8)[1] == memory.parameters(4)[1] * 2
    less = memory.merged("govreport", ("lora-24gb",)) | {"compression_ratio": 0.75, "kv_memory_limit": "1TB"}
    more = less | {"compression_ratio": 0.0}
    assert memory.kv_bytes(less, 2) < memory.kv_bytes(more, 2)


@pytest.mark.parametrize(
    ("task", "hardware"),
    [
        *((task, ("lora-24gb",)) for task in LIMITS),
        ("gsm8k", ("full-80gb",)),
        ("govreport", ("lora-24gb", "ddp-8gpu")),
    ],
)
def test_a_step_on_a_tiny_qwen3(
    task: str,
    hardware: tuple[str, ...],
    qwen_folder: Path,
    fixtures: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    local = ["--model_name_or_path", str(qwen_folder), "--dataset", str(fixtures / f"{task}.jsonl")]
    limit = ["--max_prompt_tokens", str(LIMITS[task])]
    assert main(["train", *arguments(task, *hardware), *SMALL, *local, *limit]) == 0
    (row,) = (json.loads(line) for line in Path("run/metrics.jsonl").read_text().splitlines())
    assert row["sampling_gap/max"] < 1e-4
    assert 0 < row["kv/retained_fraction"] < 1
    adapter = Path("run/final/adapter_model.safetensors").is_file()
    assert adapter == ("lora-24gb" in hardware)


def settings_of(*files: str) -> Any:
    return parse(KINDS, [*files, "--bf16", "false", "--output_dir", "run"], "train", "")


def test_the_later_file_and_the_flag_win(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("learning_rate: 0.5\nlora_r: 4\n")
    files = [*arguments("gsm8k", "lora-24gb"), "--config", str(tmp_path / "mine.yaml")]
    _, config, model = settings_of(*files, "--lora_r", "2")
    assert (config.learning_rate, model.lora_r, model.lora_alpha) == (0.5, 2, 64)
