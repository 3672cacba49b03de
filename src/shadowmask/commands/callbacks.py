"""Trainer callbacks of ``shadowmask train``: record, display, stop cleanly."""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shadowmask.models import base_model
from shadowmask.report.progress import ProgressDisplay
from shadowmask.report.run_folder import RunFolder
from shadowmask.report.sample import save_samples
from shadowmask.report.sampling import make_samples, restore
from shadowmask.rollout import RolloutBatch

SAMPLES_PER_STEP = 4
MOST_SPANS, FEWEST_SPANS = 32, 4  # parts of a prompt that are given back one at a time
RESTORED_TOKENS = 2048  # answer tokens that this may score again, per sample


class Recorder(TrainerCallback):
    """Write every logged step to the run folder and hand it to the display."""

    def __init__(
        self,
        folder: RunFolder,
        display: ProgressDisplay,
        saved_samples: int = 0,
        facts: Mapping[str, str] | None = None,
    ) -> None:
        self.folder, self.display = folder, display
        self.saved_samples, self.facts = saved_samples, facts or {}
        self.moments: set[int] = set()  # steps whose samples are saved with their records
        self.trainer: Any = None

    def watch(self, trainer: Any) -> None:
        """Look into the rollouts of this trainer, which has this callback already."""
        self.trainer = trainer
        trainer.on_rollout = self._save_records

    def _save_records(self, batch: RolloutBatch, order: list[int]) -> None:
        """Save the best and the worst completion of the prompt whose rewards differ most."""
        step = self.trainer.state.global_step + 1
        due = {moment for moment in self.moments if moment <= step}  # not every step samples
        if not due:
            return
        self.moments -= due
        columns = {
            name: list(values)[-len(order) :] for name, values in self.trainer._logs["rewards"].items()
        }
        rewards = reward_of_rows(columns, self.trainer.reward_weights.tolist())
        rows = telling_pair(batch, order, rewards)
        model = base_model(self.trainer.model)
        samples = make_samples(
            model,
            self.trainer.processing_class,
            batch,
            [order[row] for row in rows],
            [f"step {step}, {word}" for word in ("best of its prompt", "worst of its prompt")],
            self.facts,
            [rewards[row] for row in rows],
        )
        # the weights will be gone when somebody asks which lost part mattered
        spans = [min(MOST_SPANS, RESTORED_TOKENS // len(sample.completion_ids)) for sample in samples]
        samples = [
            restore(model, sample, most) if most >= FEWEST_SPANS else sample
            for sample, most in zip(samples, spans, strict=True)
        ]
        save_samples(samples, self.folder.records_path(step))

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.folder.truncate_after(state.global_step)
        self.display.start(state.max_steps, state.global_step)
        self.moments = {s for s in spread(state.max_steps, self.saved_samples) if s > state.global_step}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        row = {"step": state.global_step, **logs}
        self.folder.append_metrics(row)
        self.folder.append_samples(self._samples(state.global_step))
        self.display.update(row)

    def _samples(self, step: int) -> list[dict[str, Any]]:
        """A few of the last rollout's completions with their rewards."""
        logs = self.trainer._logs
        rewards = {name: list(values) for name, values in logs["rewards"].items()}
        rows = zip(list(logs["prompt"]), list(logs["completion"]), strict=True)
        return [
            {
                "step": step,
                "prompt": prompt,
                "completion": completion,
                "rewards": {name: values[n] for name, values in rewards.items()},
            }
            for n, (prompt, completion) in enumerate(rows)
            if n < SAMPLES_PER_STEP
        ]


def spread(steps: int, count: int) -> set[int]:
    """``count`` steps from the first to the last of a run, evenly."""
    if count < 1:
        return set()
    if count == 1:
        return {steps}
    return {1 + round(n * (steps - 1) / (count - 1)) for n in range(count)}


def reward_of_rows(rewards: Mapping[str, Sequence[float]], weights: Sequence[float]) -> list[float]:
    """The weighted sum of the reward functions for every row; what a function left out counts as 0."""
    return [
        sum(w * v for w, v in zip(weights, row, strict=True) if v is not None and math.isfinite(v))
        for row in zip(*rewards.values(), strict=True)
    ]


def telling_pair(batch: RolloutBatch, order: list[int], rewards: Sequence[float]) -> tuple[int, int]:
    """Rows with the highest and the lowest reward of the prompt whose rewards differ most."""
    of_prompt = [n for n, size in enumerate(batch.group_sizes) for _ in range(size)]
    groups: dict[int, list[int]] = {}
    for row, place in enumerate(order):
        groups.setdefault(of_prompt[place], []).append(row)
    pairs = [
        (max(rows, key=lambda row: rewards[row]), min(reversed(rows), key=lambda row: rewards[row]))
        for rows in groups.values()
    ]
    return max(pairs, key=lambda pair: rewards[pair[0]] - rewards[pair[1]])


class StopOnInterrupt(TrainerCallback):
    """First Ctrl-C (or SIGTERM): finish the step, save a checkpoint, stop. Second: stop at once."""

    def __init__(self, display: ProgressDisplay) -> None:
        self.display = display
        self.asked = False
        self.previous: dict[int, Any] = {}

    def on_train_begin(self, *args: Any, **kwargs: Any) -> None:
        for number in (signal.SIGINT, signal.SIGTERM):
            self.previous[number] = signal.signal(number, self._ask)

    def on_train_end(self, *args: Any, **kwargs: Any) -> None:
        for number, handler in self.previous.items():
            signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if _anyone(self.asked) and state.global_step < state.max_steps:
            control.should_save = True
            control.should_training_stop = True

    def _ask(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True
        self.display.say("stopping after this step and saving; Ctrl-C again stops at once")


def _anyone(asked: bool) -> bool:
    """Whether any process was asked to stop: signals reach them at different steps, and all must agree."""
    if not dist.is_initialized():
        return asked
    device = torch.accelerator.current_accelerator() if dist.get_backend() == "nccl" else "cpu"
    flag = torch.tensor(int(asked), device=device)
    dist.all_reduce(flag, dist.ReduceOp.MAX)
    return bool(flag)
