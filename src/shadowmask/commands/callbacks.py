"""Trainer callbacks of ``shadowmask train``: record, display, stop cleanly."""

from __future__ import annotations

import signal
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from shadowmask.report.progress import ProgressDisplay
from shadowmask.report.run_folder import RunFolder

SAMPLES_PER_STEP = 4


class Recorder(TrainerCallback):
    """Write every logged step to the run folder and hand it to the display."""

    def __init__(self, folder: RunFolder, display: ProgressDisplay) -> None:
        self.folder, self.display = folder, display
        self.trainer: Any = None  # set once the trainer exists

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.folder.truncate_after(state.global_step)
        self.display.start(state.max_steps, state.global_step)

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
