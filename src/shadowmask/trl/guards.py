"""A watch on what deployment without eviction would get: held-out dense accuracy.

The shadow track trains what the evicted cache answers, and distillation moves the teacher along with it. Both
can cost the dense policy its accuracy while every other curve looks fine, so this is measured, not inferred.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

METRIC = "held_out/dense_accuracy"


class DenseGuard(TrainerCallback):
    """Warn, or stop, when dense accuracy has fallen.

    Args:
        measure: held-out accuracy of the current weights with the full cache.
        every: optimizer steps between two measurements; the first is made before the first step.
        drop: fall below the first measurement that counts, absolute.
        stop: end training at the first fall.
        log: records a metric by name. ``say``: shows a line.
    """

    def __init__(
        self,
        measure: Callable[[], float],
        every: int,
        drop: float,
        stop: bool,
        log: Callable[[str, float], Any],
        say: Callable[[str], Any],
    ) -> None:
        if every < 1:
            raise ValueError(f"dense_guard_every={every} must be at least 1")
        if not 0 < drop < 1:
            raise ValueError(f"dense_guard_drop={drop} must be in (0, 1)")
        self.measure, self.every, self.drop, self.stop = measure, every, drop, stop
        self.log, self.say = log, say
        self.start: float | None = None
        self.stopped = False

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        # a resumed run compares with where the run began, not with where it was interrupted
        logged = [row[METRIC] for row in state.log_history if METRIC in row]
        self.start = logged[0] if logged else self.measure()
        if not logged:
            self.log(METRIC, self.start)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        if state.global_step % self.every or self.start is None:
            return
        accuracy = self.measure()
        self.log(METRIC, accuracy)
        if accuracy < self.start - self.drop:
            what = "stopping" if self.stop else "warning"
            self.say(
                f"{what}: held-out dense accuracy fell from {self.start:.3f} to {accuracy:.3f} by step "
                f"{state.global_step}; try teacher=initial, kl_cap, or a smaller distill_coef"
            )
            if self.stop:
                self.stopped = True
                control.should_save = control.should_training_stop = True
