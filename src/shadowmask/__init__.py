"""shadowmask: RL post-training with an evicted KV cache that the learner replays exactly.

Public names are imported when they are first used, so ``shadowmask --help`` does not wait for torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shadowmask.eviction import Evictor, get_evictor, list_evictors
    from shadowmask.losses import SMDLoss, group_advantages, smd_loss
    from shadowmask.metrics import ParityError
    from shadowmask.models import UnsupportedModelError, prepare_model
    from shadowmask.record import NEVER, RecordError, ShadowMask
    from shadowmask.rollout import RolloutBatch, RolloutEngine
    from shadowmask.scoring import dense_logprobs, shadow_logprobs

__version__ = "0.1.0"

_HOMES = {
    "eviction": ("Evictor", "get_evictor", "list_evictors"),
    "losses": ("SMDLoss", "group_advantages", "smd_loss"),
    "metrics": ("ParityError",),
    "models": ("UnsupportedModelError", "prepare_model"),
    "record": ("NEVER", "RecordError", "ShadowMask"),
    "rollout": ("RolloutBatch", "RolloutEngine"),
    "scoring": ("dense_logprobs", "shadow_logprobs"),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "NEVER",
    "Evictor",
    "ParityError",
    "RecordError",
    "RolloutBatch",
    "RolloutEngine",
    "SMDLoss",
    "ShadowMask",
    "UnsupportedModelError",
    "dense_logprobs",
    "get_evictor",
    "group_advantages",
    "list_evictors",
    "prepare_model",
    "shadow_logprobs",
    "smd_loss",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
