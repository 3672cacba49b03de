"""shadowmask: RL post-training with an evicted KV cache that the learner replays exactly."""

from shadowmask.eviction import Evictor, get_evictor, list_evictors
from shadowmask.losses import SMDLoss, group_advantages, smd_loss
from shadowmask.metrics import ParityError
from shadowmask.models import UnsupportedModelError, prepare_model
from shadowmask.record import NEVER, RecordError, ShadowMask
from shadowmask.rollout import RolloutBatch, RolloutEngine
from shadowmask.scoring import dense_logprobs, shadow_logprobs

__version__ = "0.1.0"

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
