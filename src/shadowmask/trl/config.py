"""SMDConfig: GRPOConfig plus eviction, distillation and parity."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from shadowmask.eviction import Evictor, get_evictor
from trl import GRPOConfig

PARITY_ACTIONS = ("raise", "log")


@dataclass
class SMDConfig(GRPOConfig):
    """Settings of ``SMDTrainer``. Everything of ``GRPOConfig`` keeps its meaning.

    With neither ``budget`` nor ``compression_ratio`` given, half of the prompt is evicted
    (``compression_ratio=0.5``, the paper's main setting).
    """

    evictor: str = field(
        default="snapkv", metadata={"help": "Which keys stay: dense, h2o, random, recent, snapkv."}
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
    evictor_kwargs: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "More settings of the evictor as JSON, e.g. "
            '\'{"observation_window": 16, "num_sinks": 4}\'.'
        },
    )
    distill_coef: float = field(
        default=0.1,
        metadata={"help": "lambda: weight of KL(dense || shadow). 0 trains on the shadow track alone."},
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
        if isinstance(self.evictor_kwargs, str):
            try:
                self.evictor_kwargs = json.loads(self.evictor_kwargs)
            except json.JSONDecodeError as error:
                raise ValueError(f"evictor_kwargs={self.evictor_kwargs!r} is not JSON: {error}") from error
        if self.parity_action not in PARITY_ACTIONS:
            raise ValueError(
                f"parity_action={self.parity_action!r} must be one of {', '.join(PARITY_ACTIONS)}"
            )
        if self.distill_coef < 0:
            raise ValueError(f"distill_coef={self.distill_coef} must not be negative")
        if self.evict_every is not None and self.evict_every < 1:
            raise ValueError(f"evict_every={self.evict_every} must be at least 1")
        self.make_evictor()  # wrong settings fail here, before any model is loaded
        super().__post_init__()

    def make_evictor(self) -> Evictor:
        """The evictor that these settings describe."""
        settings: dict[str, Any] = dict(self.evictor_kwargs or {})  # type: ignore[arg-type]
        if self.evictor != "dense":
            ratio = self.compression_ratio
            if self.budget is None and ratio is None:
                ratio = 0.5
            settings |= {"budget": self.budget, "compression_ratio": ratio}
        elif self.budget is not None or self.compression_ratio:
            raise ValueError("evictor='dense' evicts nothing: leave budget and compression_ratio unset")
        return get_evictor(self.evictor, **settings)
