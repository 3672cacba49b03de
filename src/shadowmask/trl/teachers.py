"""Whose dense view the shadow track is pulled to.

    self      the same weights (the paper): the teacher moves with the student, and with what it is taught
    ema       an exponential average of them: follows slowly
    initial   the weights at the start of the run: an anchor

The last two cost a second copy of the weights.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import TrainerCallback

from shadowmask.models import base_model, prepare_model

TEACHERS = ("self", "ema", "initial")
STATE = "teacher.safetensors"


class Teacher:
    """A copy of the weights without gradient.

    Args:
        decay: of the average per optimizer step, ``teacher <- decay teacher + (1 - decay) student``; 1 never
            moves.
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.model = prepare_model(copy.deepcopy(base_model(model))).requires_grad_(False).eval()
        self.decay = decay

    @torch.no_grad()
    def update(self, student: nn.Module) -> None:
        """Follow the student by one optimizer step."""
        if self.decay == 1.0:
            return
        theirs = dict(base_model(student).named_parameters())
        for name, mine in self.model.named_parameters():
            mine.lerp_(theirs[name].detach().to(mine), 1.0 - self.decay)

    def save(self, folder: Path) -> None:
        """Write the weights into a checkpoint; tied ones once."""
        save_file({n: p.detach().contiguous() for n, p in self.model.named_parameters()}, folder / STATE)

    @torch.no_grad()
    def load(self, folder: Path) -> None:
        """Take the weights of a checkpoint.

        Raises:
            ValueError: it was written by a run with another teacher.
        """
        if not (folder / STATE).is_file():
            raise ValueError(f"checkpoint {folder} has no {STATE}: that run's teacher was 'self'")
        stored = load_file(folder / STATE)
        for name, parameter in self.model.named_parameters():
            parameter.copy_(stored[name])


def make_teacher(model: nn.Module, kind: str, decay: float) -> Teacher | None:
    """The teacher of this kind; ``None`` for ``self``, whose weights are the student's.

    Raises:
        ValueError: the weights are sharded over processes and cannot be copied here.
    """
    if kind == "self":
        return None
    if any(hasattr(p, "ds_id") for p in model.parameters()):
        raise ValueError(f"teacher={kind!r} copies the weights, which ZeRO-3 shards; use teacher='self'")
    return Teacher(model, decay if kind == "ema" else 1.0)


class StepEnd(TrainerCallback):
    """Calls back after every optimizer step."""

    def __init__(self, then: Callable[[], None]) -> None:
        self.then = then

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self.then()
