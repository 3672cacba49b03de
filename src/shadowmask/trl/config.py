"""SMDConfig: GRPOConfig plus eviction, distillation and parity."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from shadowmask.eviction import Evictor, evictor_from_settings, list_evictors
from shadowmask.planning import parse_bytes
from trl import GRPOConfig

PARITY_ACTIONS = ("raise", "log")
COMPILE_CHOICES: dict[str, bool | str] = {"auto": "auto", "true": True, "false": False}


@dataclass
class SMDConfig(GRPOConfig):
    """Settings of ``SMDTrainer``. Everything of ``GRPOConfig`` keeps its meaning.

    With neither ``budget`` nor ``compression_ratio`` given, half of the prompt is evicted
    (``compression_ratio=0.5``, the paper's main setting).
    """

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
        if self.parity_action not in PARITY_ACTIONS:
            raise ValueError(
                f"parity_action={self.parity_action!r} must be one of {', '.join(PARITY_ACTIONS)}"
            )
        if self.distill_coef < 0:
            raise ValueError(f"distill_coef={self.distill_coef} must not be negative")
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
