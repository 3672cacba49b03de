"""Evictors, one per file, and their registry."""

from __future__ import annotations

import difflib
import json
from typing import Any

from shadowmask.eviction.adakv import AdaKVEvictor
from shadowmask.eviction.base import Evictor, LayerView
from shadowmask.eviction.dense import DenseEvictor
from shadowmask.eviction.expected_attention import ExpectedAttentionEvictor
from shadowmask.eviction.h2o import H2OEvictor
from shadowmask.eviction.keydiff import KeyDiffEvictor
from shadowmask.eviction.knorm import KNormEvictor
from shadowmask.eviction.lagkv import LagKVEvictor
from shadowmask.eviction.pyramidkv import PyramidKVEvictor
from shadowmask.eviction.random import RandomEvictor
from shadowmask.eviction.recent import RecentEvictor
from shadowmask.eviction.rkv import RKVEvictor
from shadowmask.eviction.snapkv import SnapKVEvictor
from shadowmask.eviction.streaming import StreamingEvictor
from shadowmask.eviction.tova import TOVAEvictor

EVICTORS: dict[str, type[Evictor]] = {
    cls.name: cls
    for cls in (
        AdaKVEvictor,
        DenseEvictor,
        ExpectedAttentionEvictor,
        H2OEvictor,
        KeyDiffEvictor,
        KNormEvictor,
        LagKVEvictor,
        PyramidKVEvictor,
        RandomEvictor,
        RecentEvictor,
        RKVEvictor,
        SnapKVEvictor,
        StreamingEvictor,
        TOVAEvictor,
    )
}

DEFAULT_RATIO = 0.5  # the paper's main setting

__all__ = ["EVICTORS", "Evictor", "LayerView", "evictor_from_settings", "get_evictor", "list_evictors"]


def list_evictors() -> list[str]:
    """Names that ``get_evictor`` knows."""
    return sorted(EVICTORS)


def get_evictor(name: str, **settings: Any) -> Evictor:
    """Make an evictor by name: ``get_evictor("snapkv", budget=512)``.

    Raises:
        ValueError: unknown name (the nearest one is suggested) or settings it does not take.
    """
    if name not in EVICTORS:
        near = difflib.get_close_matches(name, EVICTORS, n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"unknown evictor {name!r}.{hint} Known: {', '.join(list_evictors())}")
    try:
        return EVICTORS[name](**settings)
    except TypeError as error:
        raise ValueError(f"evictor {name!r} does not take these settings: {error}") from error


def evictor_from_settings(
    name: str,
    budget: int | None,
    compression_ratio: float | None,
    more: dict[str, Any] | str | None,
) -> Evictor:
    """Make an evictor from what config files and flags hold; half of the prompt is removed by default.

    Args:
        more: the evictor's other settings, as a mapping or as JSON text.

    Raises:
        ValueError: names the setting and its value.
    """
    settings: Any = more
    if isinstance(more, str):
        try:
            settings = json.loads(more)
        except json.JSONDecodeError as error:
            raise ValueError(f"evictor_kwargs={more!r} is not JSON: {error}") from error
    settings = {} if settings is None else settings
    if not isinstance(settings, dict):
        raise ValueError(f"evictor_kwargs={more!r} must be a mapping of settings to values")
    if name == DenseEvictor.name:
        if budget is not None or compression_ratio:
            raise ValueError("evictor 'dense' evicts nothing: leave budget and compression_ratio unset")
        return get_evictor(name, **settings)
    if budget is None and compression_ratio is None:
        compression_ratio = DEFAULT_RATIO
    return get_evictor(name, **{**settings, "budget": budget, "compression_ratio": compression_ratio})
