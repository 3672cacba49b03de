"""A short supervised warm-up, so that RL has something to reinforce.

A model of this size answers none of the prompts at first, and a group without a single reward has
no gradient. A few dense steps on answer tokens (EOS included) bring it to mostly right answers when
it sees the whole prompt; what it loses to eviction is left to RL.

Questions about one document share its tokens, so a step is packed `[document | q1 a1 | q2 a2 | ...]`
with the layout of the learner: eight times the supervision at twice the cost.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowmask.attention.interface import run_decoder
from shadowmask.attention.replay import ReplaySession
from shadowmask.demo.artifacts import build_once
from shadowmask.demo.model import Loaded, demo_model_path, load_saved, save
from shadowmask.head import token_stats
from shadowmask.models import decoder, num_layers, output_head, prepare_model
from shadowmask.packing import pack
from shadowmask.record import ShadowMask
from shadowmask.tasks import RecallTask

Progress = Callable[[int, int, float], None]
"""Called after every step with the steps done, the steps in all, and the loss in nats per token."""

RECIPE = 1  # raise when the code below changes what comes out: it is part of the artifact's name
SEED_OFFSET = 10_000  # the documents of the warm-up are not those that RL starts with


@dataclass(frozen=True)
class WarmupRecipe:
    """What determines the warm-up, besides model and task."""

    steps: int = 5
    documents_per_step: int = 4
    questions_per_document: int = 8
    learning_rate: float = 3e-5
    max_grad_norm: float = 1.0
    seed: int = 0


@dataclass(frozen=True)
class Example:
    """One question: `prompt + target`, of which the target is supervised."""

    prompt: list[int]
    target: list[int]


def load_warm_model(
    task: RecallTask,
    recipe: WarmupRecipe | None = None,
    progress: Progress | None = None,
    dtype: torch.dtype = torch.float32,
) -> Loaded:
    """Load the demo model after its warm-up on `task`; the first call trains it and caches it."""
    return load_saved(warm_model_path(task, recipe, progress), dtype)


def warm_model_path(
    task: RecallTask, recipe: WarmupRecipe | None = None, progress: Progress | None = None
) -> Path:
    """Return the directory of the warmed-up model, training it first if needed."""
    recipe = recipe or WarmupRecipe()
    start = demo_model_path()
    settings = {
        "start": start.name,
        "task": {"name": task.name, **asdict(task)},
        "recipe": asdict(recipe),
        "version": RECIPE,
    }
    key = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]
    build = partial(_build, start, task, recipe, progress, settings)
    return build_once(f"warm-{task.name}-{key}", build)


def _build(
    start: Path,
    task: RecallTask,
    recipe: WarmupRecipe,
    progress: Progress | None,
    settings: dict,
    directory: Path,
) -> None:
    model, tokenizer = load_saved(start, torch.float32)
    losses = warm_up(model, tokenizer, task, recipe, progress)
    save(model, tokenizer, directory)
    (directory / "warmup.json").write_text(json.dumps(settings | {"losses": losses}, indent=2) + "\n")


def warm_up(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    task: RecallTask,
    recipe: WarmupRecipe,
    progress: Progress | None = None,
) -> list[float]:
    """Train `model` in place on answers to `task`; return the loss of every step.

    Nothing is drawn here: the seed decides the documents, and those decide everything else.
    """
    prepare_model(model).train()
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=recipe.learning_rate, betas=(0.9, 0.99), weight_decay=0.0
    )
    losses = []
    for step, examples in enumerate(_batches(tokenizer, task, recipe), start=1):
        loss = answer_loss(model, examples)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.max_grad_norm)
        optimizer.step()
        losses.append(loss.item())
        if progress:
            progress(step, recipe.steps, losses[-1])
    model.zero_grad()
    model.eval()
    return losses


def answer_loss(model: PreTrainedModel, documents: Sequence[Sequence[Example]]) -> Tensor:
    """Mean negative log-likelihood of the target tokens, in nats per token.

    Args:
        model: prepared by `prepare_model`.
        documents: examples that share a beginning, computed once, are listed together.
    """
    prefixes: list[list[int]] = []
    rests: list[list[int]] = []
    supervised: list[bool] = []
    for examples in documents:
        shared = _shared_prefix([example.prompt for example in examples])
        for example in examples:
            question = example.prompt[shared:]
            prefixes.append(example.prompt[:shared])
            rests.append(question + example.target)
            supervised += [False] * len(question) + [True] * len(example.target)
    packed = pack(prefixes, rests, model.device)
    session = ReplaySession(packed, ShadowMask.dense(prefixes, rests))
    layers = num_layers(model)
    hidden = run_decoder(decoder(model), packed.input_ids, packed.position_ids, session, layers)[0]
    counts = torch.tensor(supervised, device=model.device)
    rows, targets = packed.target_rows[counts], packed.targets[counts]
    return -token_stats(hidden[rows], targets, output_head(model)).logprobs.mean()


def _batches(
    tokenizer: PreTrainedTokenizerBase, task: RecallTask, recipe: WarmupRecipe
) -> list[list[list[Example]]]:
    """Return the examples, listed by step and document."""
    asked = min(recipe.questions_per_document, task.num_facts)
    task = replace(task, questions_per_document=asked)
    size = recipe.steps * recipe.documents_per_step * asked
    examples = [
        Example(
            tokenizer(row["prompt"])["input_ids"],
            [*tokenizer(task.target(row))["input_ids"], tokenizer.eos_token_id],
        )
        for row in task.dataset("train", size, recipe.seed + SEED_OFFSET)
    ]
    documents = [examples[i : i + asked] for i in range(0, size, asked)]
    per_step = recipe.documents_per_step
    return [documents[i : i + per_step] for i in range(0, len(documents), per_step)]


def _shared_prefix(prompts: Sequence[list[int]]) -> int:
    """Length of the longest common beginning."""
    columns = itertools.takewhile(lambda tokens: len(set(tokens)) == 1, zip(*prompts, strict=False))
    return sum(1 for _ in columns)
