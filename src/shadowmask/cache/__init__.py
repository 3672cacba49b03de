"""The sampler's KV cache, written and evicted in place.

``base`` is what a cache is to the sampler, ``slots`` one layer's memory, ``owned`` the cache whose rows
own all of their slots (decode-time eviction), ``shared`` the one whose groups hold their prompt once
(prompt-only eviction).
"""

from shadowmask.cache.base import CachePlan, DecodeStep, KVCache, PromptInfo, slot_bytes
from shadowmask.cache.owned import OwnedSlotCache
from shadowmask.cache.shared import SharedPromptCache

__all__ = [
    "CachePlan",
    "DecodeStep",
    "KVCache",
    "OwnedSlotCache",
    "PromptInfo",
    "SharedPromptCache",
    "slot_bytes",
]
