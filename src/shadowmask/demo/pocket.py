"""The pocket models: Llamas of a million parameters that learn one procedural task in minutes on a CPU.

They are for comparing methods over many seeds. Each is trained from scratch, dense and supervised, on answer
tokens only, with a curriculum on the number of facts (retrieval appears suddenly, and much earlier on few
facts), and stops as soon as it answers a given share of held-out prompts: partly right is where RL starts.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Int
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from shadowmask.demo.artifacts import build_once
from shadowmask.demo.model import save
from shadowmask.tasks import Task

POCKET_MODEL = "pocket"

Progress = Callable[[int, float, float], None]
"""Called with the step, the loss in nats per token and the held-out accuracy (on all facts)."""

RECIPE = 1  # raise when the code below changes what comes out: it is part of the artifact's name
SEED_OFFSET = 20_000  # prompts of the pretraining are not those that RL starts with
PIECES = r" ?[A-Za-z]+| ?[0-9]|[^A-Za-z0-9]"
VOCABULARY_ROWS = 2000  # rows that are read to collect the words of a task


@dataclass(frozen=True)
class PocketRecipe:
    """What determines a pocket model, besides its task."""

    hidden_size: int = 192
    num_layers: int = 3
    num_heads: int = 6
    num_kv_heads: int = 3
    intermediate_size: int = 384
    max_steps: int = 3000
    batch_size: int = 64
    learning_rate: float = 1e-3
    warmup_steps: int = 100
    first_facts: int = 3  # the curriculum starts here ...
    curriculum_steps: int = 1000  # ... and reaches the task's own number after so many steps
    stop_at: float = 0.7  # held-out accuracy
    check_every: int = 20
    check_rows: int = 256
    seed: int = 0


class PocketError(RuntimeError):
    """The model did not learn its task within the steps of its recipe."""


def pocket_model_path(
    task: Task, recipe: PocketRecipe | None = None, progress: Progress | None = None
) -> Path:
    """Return the folder of the pocket model of this task, training it first if it is not there yet.

    Raises:
        PocketError: it did not reach ``stop_at``.
    """
    recipe = recipe or PocketRecipe()
    settings = {
        "task": {"name": task.name, **asdict(task)},  # type: ignore[call-overload]
        "recipe": asdict(recipe),
        "version": RECIPE,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    return build_once(f"pocket-{task.name}-{key}", partial(_build, task, recipe, progress, settings))


def _build(
    task: Task, recipe: PocketRecipe, progress: Progress | None, settings: dict[str, Any], folder: Path
) -> None:
    tokenizer = make_tokenizer(task)
    model = make_model(len(tokenizer), tokenizer, recipe)
    history = pretrain(model, tokenizer, task, recipe, progress)
    save(model, tokenizer, folder)
    (folder / "pocket.json").write_text(json.dumps(settings | {"history": history}, indent=2) + "\n")


def make_tokenizer(task: Task) -> PreTrainedTokenizerFast:
    """One token per word (with the space before it) and per digit, for the words of one task."""
    split = pre_tokenizers.Split(Regex(PIECES), "isolated")
    pieces: set[str] = set()
    for row in task.dataset("train", VOCABULARY_ROWS, SEED_OFFSET - 1):
        pieces |= {piece for piece, _ in split.pre_tokenize_str(row["prompt"] + task.target(row))}
    words = ["<pad>", "<eos>", *sorted(pieces)]
    tokenizer = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")


def make_model(vocabulary: int, tokenizer: PreTrainedTokenizerFast, recipe: PocketRecipe) -> PreTrainedModel:
    """A Llama with untied embeddings: tied ones did not learn to look anything up."""
    torch.manual_seed(recipe.seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=recipe.hidden_size,
            intermediate_size=recipe.intermediate_size,
            num_hidden_layers=recipe.num_layers,
            num_attention_heads=recipe.num_heads,
            num_key_value_heads=recipe.num_kv_heads,
            max_position_embeddings=1024,
            tie_word_embeddings=False,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def pretrain(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerFast,
    task: Task,
    recipe: PocketRecipe,
    progress: Progress | None = None,
) -> list[dict[str, float]]:
    """Train in place until ``stop_at`` is reached; returns what was measured on the way.

    Raises:
        PocketError: after ``max_steps`` without getting there.
    """
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.95), weight_decay=0.1
    )
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min(1.0, (n + 1) / recipe.warmup_steps))
    held_out = encode(tokenizer, task, task.dataset("eval", recipe.check_rows, SEED_OFFSET))
    history: list[dict[str, float]] = []
    model.train()
    for step in range(1, recipe.max_steps + 1):
        easier = _easier(task, step, recipe)
        ids, prompt = encode(
            tokenizer, easier, easier.dataset("train", recipe.batch_size, SEED_OFFSET + step)
        )
        logits = model(input_ids=ids[:, :-1]).logits[:, prompt - 1 :]
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, prompt:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        warm.step()
        if step % recipe.check_every == 0:
            accuracy = exact_share(model, *held_out)
            history.append({"step": step, "loss": loss.item(), "accuracy": accuracy})
            if progress:
                progress(step, loss.item(), accuracy)
            if accuracy >= recipe.stop_at:
                model.zero_grad()
                model.eval()
                return history
    raise PocketError(
        f"the pocket model of task {task.name!r} answers {history[-1]['accuracy']:.2f} of the prompts after "
        f"max_steps={recipe.max_steps}, below stop_at={recipe.stop_at}"
    )


def encode(
    tokenizer: PreTrainedTokenizerFast, task: Task, rows: Sequence[dict[str, Any]]
) -> tuple[Int[Tensor, "rows tokens"], int]:
    """Token ids of prompts with their answers and EOS, and the one length of all prompts."""
    prompts = [tokenizer(row["prompt"])["input_ids"] for row in rows]
    answers = [[*tokenizer(task.target(row))["input_ids"], tokenizer.eos_token_id] for row in rows]
    if len({len(p) for p in prompts}) > 1 or len({len(a) for a in answers}) > 1:
        raise ValueError(f"prompts of task {task.name!r} differ in length: a pocket model takes equal ones")
    ids = torch.tensor([prompt + answer for prompt, answer in zip(prompts, answers, strict=True)])
    return ids, len(prompts[0])


@torch.no_grad()
def exact_share(model: PreTrainedModel, ids: Int[Tensor, "rows tokens"], prompt: int) -> float:
    """Share of the rows whose whole answer is what greedy decoding would write."""
    choice = model(input_ids=ids[:, :-1]).logits[:, prompt - 1 :].argmax(dim=-1)
    return float((choice == ids[:, prompt:]).all(dim=-1).float().mean())


def _easier(task: Task, step: int, recipe: PocketRecipe) -> Task:
    """The task with the number of facts that this step of the curriculum has reached."""
    full: int = task.num_facts  # type: ignore[attr-defined]
    first = min(recipe.first_facts, full)
    reached = first + (full - first) * min(1.0, step / recipe.curriculum_steps)
    # a mixture below what was reached: few facts are not forgotten
    facts = random.Random(step).randint(first, max(first, round(reached)))
    least = max(getattr(task, "num_hops", 0) + 1, getattr(task, "num_asked", 0))
    return dataclasses.replace(task, num_facts=max(facts, least))  # type: ignore[type-var]
