"""A drop-in for TRL's GRPO: ``SMDConfig(GRPOConfig)`` and ``SMDTrainer(GRPOTrainer)``."""

from shadowmask.trl.contract import check_trl_version

check_trl_version()

from shadowmask.trl.config import SMDConfig  # noqa: E402
from shadowmask.trl.trainer import SMDTrainer  # noqa: E402

__all__ = ["SMDConfig", "SMDTrainer"]
