"""The packed learner is the unpacked one: values and gradients, however a batch is cut into pieces.

The twin scores every completion alone behind a prompt of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from shadowmask import RolloutBatch
from shadowmask.models import base_model
from shadowmask.packing import pack
from shadowmask.scoring import score_packed
from slow_reference import flat_gradient
from tiny_models import make_learner, make_prompts, rollout
from tolerances import FLOAT64, GRADIENT_DIFFERS, GRADIENT_FLOAT64, relative_gap

PROMPTS = make_prompts((23, 9, 14))
GROUP = 3
ROWS = len(PROMPTS) * GROUP
SCHEDULES = [None, 5]
# a whole batch; groups cut in two and joined with neighbours; rows in another order, as after a shuffle
PIECES: dict[str, list[list[int]]] = {
    "at once": [list(range(ROWS))],
    "a group cut": [[0, 1], [2, 3, 4, 5, 6], [7, 8]],
    "shuffled": [[8, 0, 3, 6], [1, 7, 4, 2, 5]],
}
ALONE = [[n] for n in range(ROWS)]


def sample(evict_every: int | None, family: str = "llama-gqa") -> RolloutBatch:
    return rollout(make_learner(family), "snapkv", evict_every, PROMPTS, group_size=GROUP, max_new_tokens=15)


def learn(
    model: nn.Module, batch: RolloutBatch, pieces: Sequence[Sequence[int]], mixed_up: bool = False
) -> dict[int, Tensor]:
    """Accumulate gradients over the pieces; log-prob, entropy, KL and teacher of every completion."""
    scored: dict[int, Tensor] = {}
    for rows in pieces:
        prompts = [batch.prompts_per_completion[n] for n in rows]
        completions = [batch.completion_ids[n] for n in rows]
        records = [*rows[1:], rows[0]] if mixed_up else rows
        shadow = batch.shadow[list(records)]
        stats = score_packed(base_model(model), pack(prompts, completions), shadow, teacher=True)
        columns = torch.stack([stats.logprobs, stats.entropy, stats.kl, stats.teacher_logprobs])
        parts = columns.split([len(c) for c in completions], dim=1)
        loss = torch.zeros((), dtype=torch.float64)
        for n, part in zip(rows, parts, strict=True):
            scored[n] = part.detach()
            # another weight for every completion: an advantage
            loss = loss - (n - 3.5) * part[0].sum() + 0.1 * part[2].sum() - 0.01 * part[1].sum()
        loss.backward()
    return scored


@pytest.mark.parametrize("evict_every", SCHEDULES)
@pytest.mark.parametrize("pieces", PIECES)
def test_values_and_gradients_do_not_depend_on_packing(pieces: str, evict_every: int | None) -> None:
    batch = sample(evict_every)
    packed, alone = make_learner(), make_learner()
    ours, theirs = learn(packed, batch, PIECES[pieces]), learn(alone, batch, ALONE)
    for n in range(ROWS):
        assert float((ours[n] - theirs[n]).abs().max()) <= FLOAT64
    assert relative_gap(flat_gradient(packed), flat_gradient(alone)) <= GRADIENT_FLOAT64


@pytest.mark.parametrize("family", ["gemma3", "qwen3-moe"])
def test_other_families(family: str) -> None:
    batch = sample(None, family)
    packed, alone = make_learner(family), make_learner(family)
    ours, theirs = learn(packed, batch, PIECES["a group cut"]), learn(alone, batch, ALONE)
    for n in range(ROWS):
        assert float((ours[n] - theirs[n]).abs().max()) <= FLOAT64


@pytest.mark.parametrize("evict_every", SCHEDULES)
def test_a_neighbours_record_is_another_gradient(evict_every: int | None) -> None:
    """Negative control. Completions of one length: otherwise the record would not fit its tokens."""
    model = make_learner()
    batch = rollout(
        model,
        "random",
        evict_every,
        make_prompts((14, 14)),
        group_size=2,
        max_new_tokens=9,
        stop_token_ids=[],
    )
    packed, wrong = make_learner(), make_learner()
    pieces = [[0, 2], [1, 3]]
    learn(packed, batch, pieces)
    learn(wrong, batch, pieces, mixed_up=True)
    assert relative_gap(flat_gradient(wrong), flat_gradient(packed)) >= GRADIENT_DIFFERS


def with_lora() -> nn.Module:
    torch.manual_seed(5)
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(make_learner(), config).double()


def with_checkpointing() -> nn.Module:
    model = make_learner().train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    return model


@pytest.mark.parametrize("make", [with_lora, with_checkpointing])
def test_adapters_and_checkpointing(make: Callable[[], nn.Module]) -> None:
    batch = sample(5)
    packed, alone = make(), make()
    learn(packed, batch, PIECES["a group cut"])
    learn(alone, batch, ALONE)
    gradients = [
        torch.cat([p.grad.flatten() for p in m.parameters() if p.grad is not None]) for m in (packed, alone)
    ]
    assert relative_gap(*gradients) <= GRADIENT_FLOAT64


@pytest.mark.parametrize("evict_every", SCHEDULES)
def test_several_iterations_over_one_rollout_stay_together(evict_every: int | None) -> None:
    """``num_iterations`` > 1: the second pass replays the record under weights that moved."""
    batch = sample(evict_every)
    packed, alone = make_learner(), make_learner()
    for model, pieces in ((packed, PIECES["a group cut"]), (alone, ALONE)):
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        for _ in range(3):
            optimizer.zero_grad()
            learn(model, batch, pieces)
            optimizer.step()
    ours, theirs = (torch.cat([p.detach().flatten() for p in m.parameters()]) for m in (packed, alone))
    assert relative_gap(ours, theirs) <= GRADIENT_FLOAT64
    assert relative_gap(ours, torch.cat([p.detach().flatten() for p in make_learner().parameters()])) > 0
