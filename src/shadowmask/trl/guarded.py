"""What ``SMDTrainer`` does between steps: guard rails follow, checkpoints hold them, metrics are logged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shadowmask.rollout import RolloutEngine
from shadowmask.trl.budget import BudgetController
from shadowmask.trl.config import SMDConfig
from shadowmask.trl.gradients import GradientSpread
from shadowmask.trl.learner_log import worst_side
from shadowmask.trl.teachers import StepEnd, Teacher, make_teacher
from trl import GRPOTrainer


class GuardedTrainer(GRPOTrainer):
    """GRPOTrainer with the state that guard rails keep. The engine and the loss are ``SMDTrainer``'s."""

    args: SMDConfig
    engine: RolloutEngine

    def _set_guards(self) -> None:
        """Make teacher and budget. The weights must be those of the start of the run."""
        args = self.args
        self.teacher: Teacher | None = make_teacher(self.model, args.teacher, args.teacher_decay)
        self.budget = None if args.agreement_floor is None else BudgetController(args.agreement_floor)
        self.spread = GradientSpread()
        self._agreements: list[float] = []  # 5th percentiles of this step
        self.add_callback(StepEnd(self._after_step))

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        loss = super().training_step(*args, **kwargs)
        if self.accelerator.sync_gradients:
            for name, value in self.spread.take().items():
                self._log(name, value)
        return loss

    def _after_step(self) -> None:
        """The optimizer has moved the weights: let the teacher and the budget follow."""
        if self.teacher is not None:
            self.teacher.update(self.model)
        if self.budget is not None and self._agreements:
            scale = self.budget.update(min(self._agreements))
            self.engine.evictor = self.args.rollout_evictor(scale)
            self._log("kv/budget_scale", scale)
        self._agreements.clear()

    @property
    def _guards(self) -> list[Teacher | BudgetController]:
        """What a checkpoint must hold besides TRL's own state."""
        parts: list[Teacher | BudgetController | None] = [self.teacher, self.budget]
        return [part for part in parts if part is not None]

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        folder = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        if self.args.should_save:
            for part in self._guards:
                part.save(folder)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        for part in self._guards:
            part.load(Path(resume_from_checkpoint))
        if self.budget is not None:
            self.engine.evictor = self.args.rollout_evictor(self.budget.scale)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, but a worst case over micro-batches stays one: TRL would average it."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in metrics.items():
            side = worst_side(name)
            if values and side is not None:
                metrics[name] = [max(values) if side == "max" else min(values)]
        super().log(logs, start_time)

    def _log(self, name: str, value: float, worst: str | None = None) -> float:
        """Append a metric; over processes its mean, or its worst side (``"max"``, ``"min"``)."""
        values = self.accelerator.gather(torch.tensor(float(value), device=self.accelerator.device))
        reduced = float({"max": values.max, "min": values.min, None: values.mean}[worst]())
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append(reduced)
        return reduced
