"""Expected memory of the configs in this folder, by arithmetic, written into the task files' comments.

    python configs/memory.py          # rewrites the blocks; a test checks that they are up to date

GB are 10^9 bytes, per GPU; a card's size is in GiB, so 24 are 25.8 GB and 80 are 85.9 GB. A step's peak is
what stays all the time plus the larger of two phases: the rollout (keys and values, one prompt's prefill) and
the learner (activations of one backward pass). The CUDA context, workspaces and fragmentation come on top.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from shadowmask.cache import PromptInfo, SharedPromptCache
from shadowmask.eviction import evictor_from_settings
from shadowmask.planning import parse_bytes, plan_cache

HERE = Path(__file__).parent
TASKS = ("gsm8k", "hotpotqa", "tldr", "govreport")
HARDWARE = {
    "lora-24gb": ("lora-24gb",),
    "full-80gb": ("full-80gb",),
    "lora-24gb + ddp-8gpu": ("lora-24gb", "ddp-8gpu"),
}
BEGIN, END = "# memory:", "# end of memory"
BYTES = {"float32": 4, "bfloat16": 2}
# Qwen3-4B-Instruct-2507, from its published config
SHAPE = Qwen3Config(
    vocab_size=151936,
    hidden_size=2560,
    intermediate_size=9728,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    tie_word_embeddings=True,
)


def merged(task: str, hardware: tuple[str, ...]) -> dict[str, Any]:
    """The settings of a task's file with those of the hardware's on top."""
    settings: dict[str, Any] = {}
    for name in (task, *hardware):
        settings |= yaml.safe_load((HERE / f"{name}.yaml").read_text(encoding="utf-8"))
    return settings


def parameters(lora_r: int | None) -> tuple[int, int]:
    """Parameters of the model, and those that train: all of them, or LoRA's on every linear layer."""
    with torch.device("meta"):
        model = Qwen3ForCausalLM(SHAPE)
    whole = sum(p.numel() for p in model.parameters())
    linear = [m for name, m in model.named_modules() if isinstance(m, nn.Linear) and name != "lm_head"]
    return whole, whole if lora_r is None else sum(lora_r * (m.in_features + m.out_features) for m in linear)


def expected(settings: dict[str, Any]) -> dict[str, float]:
    """Bytes by what they are for."""
    lora_r = settings["lora_r"] if settings.get("use_peft") else None
    whole, trained = parameters(lora_r)
    size = BYTES[settings["dtype"]]
    prompt, new = settings["max_prompt_tokens"], settings["max_completion_length"]
    group, batch = settings["num_generations"], settings["per_device_train_batch_size"]
    static = {
        "weights": whole * size + (trained * 4 if lora_r else 0),  # adapters are float32
        "gradients": trained * 4,
        "AdamW": trained * 8,
    }
    heads = (SHAPE.num_attention_heads + 2 * SHAPE.num_key_value_heads) * SHAPE.head_dim
    rollout = {
        "KV": kv_bytes(settings, size),
        "prefill": prompt * (2 * SHAPE.intermediate_size + 4 * SHAPE.hidden_size + heads) * size,
    }
    # packed: the prompt once for every group that the batch has a part of, then its completions
    tokens = math.ceil(batch / group) * prompt + batch * new
    stream = tokens * SHAPE.hidden_size * size
    learner = {
        "checkpoints": stream * SHAPE.num_hidden_layers,  # one hidden state per layer and token
        # a recomputed layer and the gradients of what it holds
        "one layer": 2 * tokens * (3 * SHAPE.intermediate_size + 6 * SHAPE.hidden_size + heads) * size,
        # the teacher's: prompt keys and values of all layers
        "teacher": prompt * token_bytes(size),
        # both tracks' tiles of logits; the head's own gradient, in float32, if it trains
        "head": 6 * 2**23 * 4 + (0 if lora_r else SHAPE.vocab_size * SHAPE.hidden_size * 4),
    }
    peak = sum(static.values()) + max(sum(rollout.values()), sum(learner.values()))
    return {**static, **rollout, **learner, "peak": peak}


def token_bytes(size: int) -> int:
    """Keys and values of one token in all layers."""
    return 2 * SHAPE.num_hidden_layers * SHAPE.num_key_value_heads * SHAPE.head_dim * size


def kv_bytes(settings: dict[str, Any], size: int) -> float:
    """Slots that a generation batch of longest prompts needs, or the limit, whichever is less."""
    samples = settings["per_device_train_batch_size"] * settings["gradient_accumulation_steps"]
    group, prompt = settings["num_generations"], settings["max_prompt_tokens"]
    evictor = evictor_from_settings(settings["evictor"], None, settings["compression_ratio"], None)
    info = PromptInfo(prompt, evictor.budget_for(prompt) or prompt, 0)
    prompts = max(samples // group, 1)
    plan = plan_cache(evictor, None, [info] * prompts, [group] * prompts, settings["max_completion_length"])
    layer = prompt * token_bytes(size) / SHAPE.num_hidden_layers  # one full layer while a prompt is read
    needed = SharedPromptCache.slots_needed(plan) * token_bytes(size) + layer
    return min(needed, parse_bytes(settings["kv_memory_limit"]))


def block(task: str) -> str:
    """The comment of a task's file."""
    rows = {name: expected(merged(task, hardware)) for name, hardware in HARDWARE.items()}
    names = list(next(iter(rows.values())))
    width = max(map(len, rows))
    lines = [
        f"{BEGIN} written by `python configs/memory.py`, arithmetic and not measured. GB per GPU:",
        f"#   {'':{width}} {' '.join(f'{name:>{max(len(name), 5)}}' for name in names)}",
    ]
    for name, figures in rows.items():
        cells = (f"{figures[key] / 1e9:>{max(len(key), 5)}.1f}" for key in names)
        lines.append(f"#   {name:{width}} {' '.join(cells)}")
    lines += [
        "# peak = weights + gradients + AdamW + the larger of rollout (KV + prefill) and learner (the rest)",
        END,
    ]
    return "\n".join(lines)


def with_block(task: str) -> str:
    """The task's file with an up-to-date comment."""
    text = (HERE / f"{task}.yaml").read_text(encoding="utf-8")
    start, stop = text.index(BEGIN), text.index(END) + len(END)
    return text[:start] + block(task) + text[stop:]


if __name__ == "__main__":
    for name in TASKS:
        (HERE / f"{name}.yaml").write_text(with_block(name), encoding="utf-8")
