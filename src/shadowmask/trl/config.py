"""SMDConfig: GRPOConfig plus method, eviction, distillation and parity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

import torch

from shadowmask.corrections import METHODS, get_method, method_settings
from shadowmask.eviction import DEFAULT_RATIO, Evictor, evictor_from_settings, get_evictor, list_evictors
from shadowmask.planning import parse_bytes
from shadowmask.trl.teachers import TEACHERS
from trl import GRPOConfig

PARITY_ACTIONS = ("raise", "log")
DISTILL_SCHEDULES = ("constant", "gap")
COMPILE_CHOICES: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}


@dataclass
class SMDConfig(GRPOConfig):
    """Settings of ``SMDTrainer``. Everything of ``GRPOConfig`` keeps its meaning.

    With neither ``budget`` nor ``compression_ratio`` given, half of the prompt is evicted
    (``compression_ratio=0.5``, the paper's main setting). Under ``method="dense"`` the rollouts of training
    evict nothing; evictor and budget then describe the cache that held-out accuracy is measured under.
    """

    method: str = field(default="smd", metadata={"help": f"What the learner does: {', '.join(METHODS)}."})
    method_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "Settings of the method's correction as JSON, e.g. '{\"cap\": 8}'. Default: as published."
        },
    )
    evictor: str = field(
        default="snapkv", metadata={"help": f"Which keys stay: {', '.join(list_evictors())}."}
    )
    budget: int | None = field(
        default=None,
        metadata={"help": "Keys that stay per layer and KV head after an eviction (tokens)."},
    )
    compression_ratio: float | None = field(
        default=None,
        metadata={"help": "Fraction of the prompt's keys that is removed, in [0, 1). Default 0.5."},
    )
    evict_every: int | None = field(
        default=None,
        metadata={"help": "Evict again every so many decoded tokens. Default: only after the prompt."},
    )
    kv_memory_limit: str | None = field(
        default=None,
        metadata={
            "help": "Bytes that the rollout's keys and values may take per process, e.g. 8GB. Sequences that "
            "do not fit wait for others to finish. Default: all of a generation batch decode together."
        },
    )
    compile_rollout: str = field(
        default="auto",
        metadata={
            "help": "Compile the decode step with torch.compile: true, false, or auto (where it pays: on "
            "CUDA, completions of 256 tokens and more)."
        },
    )
    evictor_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "More settings of the evictor as JSON, e.g. "
            '\'{"observation_window": 16, "num_sinks": 4}\'.'
        },
    )
    distill_coef: float = field(
        default=0.1,
        metadata={"help": "lambda: weight of KL(dense || shadow), of method smd. 0 is method shadow."},
    )
    distill_schedule: str = field(
        default="constant",
        metadata={
            "help": "constant, or gap: lambda shrinks so that lambda x KL stays below distill_coef x "
            "distill_gap while the information gap is larger than distill_gap."
        },
    )
    distill_gap: float = field(
        default=0.1,
        metadata={"help": "Mean KL(dense || shadow) from which distill_schedule=gap acts (nats)."},
    )
    kl_cap: float | None = field(
        default=None,
        metadata={
            "help": "Tokens whose KL exceeds this give no distillation gradient (nats). Default: none."
        },
    )
    teacher: str = field(
        default="self",
        metadata={
            "help": f"Whose dense view is distilled: {', '.join(TEACHERS)}. The last two cost a second copy "
            "of the weights."
        },
    )
    teacher_decay: float = field(
        default=0.99, metadata={"help": "Decay per optimizer step of teacher=ema, in [0, 1)."}
    )
    agreement_floor: float | None = field(
        default=None,
        metadata={
            "help": "Grow the budget while the 5th percentile of per-token agreement with the dense policy "
            "is below this, in (0, 1); Sparrow reports 0.86 as what stability takes. Default: fixed budget."
        },
    )
    parity_action: str = field(
        default="raise",
        metadata={"help": "What to do when sampler and learner disagree beyond rounding: raise or log."},
    )
    parity_tolerance: float | None = field(
        default=None,
        metadata={
            "help": "Largest sampling gap in nats. Default: float32 1e-4 (max of tokens), bf16 5e-2 (mean)."
        },
    )

    def __post_init__(self) -> None:
        if self.parity_action not in PARITY_ACTIONS:
            raise ValueError(
                f"parity_action={self.parity_action!r} must be one of {', '.join(PARITY_ACTIONS)}"
            )
        self._check_method()
        if self.evict_every is not None and self.evict_every < 1:
            raise ValueError(f"evict_every={self.evict_every} must be at least 1")
        if self.compile_rollout not in COMPILE_CHOICES:
            raise ValueError(
                f"compile_rollout={self.compile_rollout!r} must be one of {', '.join(COMPILE_CHOICES)}"
            )
        self.kv_bytes_limit()
        on_cpu = not torch.accelerator.is_available()
        if on_cpu and self.bf16 is None and not self.fp16:  # type: ignore[has-type]
            self.bf16 = False  # TRL's default is bf16 even on a CPU, where it is slow and not exact
        self.make_evictor()  # wrong settings fail here, before any model is loaded
        super().__post_init__()

    def _check_method(self) -> None:
        method = get_method(self.method)
        self.correction_settings()
        choices = {"distill_schedule": DISTILL_SCHEDULES, "teacher": TEACHERS}
        for name, known in choices.items():
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r} must be one of {', '.join(known)}")
        if self.distill_coef < 0:
            raise ValueError(f"distill_coef={self.distill_coef} must not be negative")
        for name in ("distill_gap", "kl_cap"):
            value = getattr(self, name)
            if value is not None and not value > 0:
                raise ValueError(f"{name}={value} must be positive")
        if not 0 <= self.teacher_decay < 1:
            raise ValueError(f"teacher_decay={self.teacher_decay} must be in [0, 1)")
        if not method.distils:
            for name, neutral in (("teacher", "self"), ("kl_cap", None), ("distill_schedule", "constant")):
                if getattr(self, name) != neutral:
                    raise ValueError(
                        f"{name}={getattr(self, name)!r}: method {self.method!r} does not distil; "
                        f"use method 'smd' or leave {name} out"
                    )
        if self.agreement_floor is not None:
            if not 0 < self.agreement_floor < 1:
                raise ValueError(f"agreement_floor={self.agreement_floor} must be in (0, 1)")
            if not method.evicts or self.evictor == "dense":
                raise ValueError(f"agreement_floor={self.agreement_floor}: nothing is evicted; leave it out")
        if method.rule is not None and self.loss_type == "vespo":
            raise ValueError(
                f"loss_type='vespo' weighs sequences itself: use another with method {self.method!r}"
            )

    def correction_settings(self) -> dict[str, float]:
        """Settings of the method's correction: as published, unless ``method_kwargs`` says otherwise."""
        more: Any = self.method_kwargs
        if isinstance(more, str):
            try:
                more = json.loads(more)
            except json.JSONDecodeError as error:
                raise ValueError(f"method_kwargs={more!r} is not JSON: {error}") from error
        more = {} if more is None else more
        if not isinstance(more, dict):
            raise ValueError(f"method_kwargs={self.method_kwargs!r} must be a mapping of settings to values")
        return method_settings(self.method, more)

    def distill_weight(self, information_gap: float) -> float:
        """lambda of a batch whose mean KL(dense || shadow) is ``information_gap``, in nats."""
        if not get_method(self.method).distils:
            return 0.0
        if self.distill_schedule == "constant" or information_gap <= self.distill_gap:
            return self.distill_coef
        return self.distill_coef * self.distill_gap / information_gap

    def kv_bytes_limit(self) -> int | None:
        """``kv_memory_limit`` in bytes."""
        if self.kv_memory_limit is None:
            return None
        try:
            return parse_bytes(self.kv_memory_limit)
        except ValueError as error:
            raise ValueError(f"kv_memory_limit={error}") from error

    def make_evictor(self) -> Evictor:
        """The evictor that these settings describe."""
        return evictor_from_settings(self.evictor, self.budget, self.compression_ratio, self.evictor_kwargs)

    def rollout_evictor(self, scale: float = 1.0) -> Evictor:
        """The evictor of training rollouts: none under method ``dense``.

        Args:
            scale: multiplies what is kept, up to everything.
        """
        if not get_method(self.method).evicts or self.evictor == "dense":
            return get_evictor("dense")
        if self.budget is not None:
            budget, ratio = round(self.budget * scale), None
        else:
            kept = 1.0 - (DEFAULT_RATIO if self.compression_ratio is None else self.compression_ratio)
            budget, ratio = None, max(0.0, 1.0 - kept * scale)
            if scale == 1.0:
                return self.make_evictor()
        return evictor_from_settings(self.evictor, budget, ratio, self.evictor_kwargs)
