"""Evictors, one per file, and their registry."""

from __future__ import annotations

import difflib
from typing import Any

from shadowmask.eviction.base import Evictor, LayerView
from shadowmask.eviction.dense import DenseEvictor
from shadowmask.eviction.h2o import H2OEvictor
from shadowmask.eviction.random import RandomEvictor
from shadowmask.eviction.recent import RecentEvictor
from shadowmask.eviction.snapkv import SnapKVEvictor

EVICTORS: dict[str, type[Evictor]] = {
    cls.name: cls for cls in (DenseEvictor, H2OEvictor, RandomEvictor, RecentEvictor, SnapKVEvictor)
}

__all__ = ["EVICTORS", "Evictor", "LayerView", "get_evictor", "list_evictors"]


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
