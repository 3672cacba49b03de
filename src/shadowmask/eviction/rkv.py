"""R-KV: keep what the last queries look at and what no other key repeats.

Source: R-KV (arXiv:2505.24133), ``Zefan-Cai/R-KV``.

    score = importance_weight * importance - (1 - importance_weight) * redundancy

Importance: of the query heads that share a KV head the largest logit counts; a softmax over the keys
before the recent window, averaged over the last ``observation_window`` queries and max-pooled over
``kernel_size`` neighbours. Redundancy: a key's mean cosine similarity to all keys, as a softmax; each
key spares its most recent neighbour above ``similarity_threshold``, so that of several alike the newest
stays. Defaults: window 8, kernel 7, threshold 0.5 and weight 0.1 (the paper's lambda; 0.07 in the
published class). Needs: the last queries, for which attention is recomputed, and keys.

Differences: sinks always stay. A key with no neighbour above the threshold spares nobody (the published
code then spares the first token in the cache). Rows of the window that do not exist yet are left out of
the average. Keys outside a sliding window have no importance. Keys are compared as they are cached,
rotated (as published).

Memory: similarities are taken in blocks of keys, at most ``BLOCK_ROWS`` x slots per head and
``BLOCK_NUMBERS`` in all; there is no slots x slots matrix. Time is quadratic in slots all the same.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from shadowmask.eviction.base import NUM_SINKS, Evictor, LayerView, softmax_over, window_logits
from shadowmask.eviction.keydiff import key_directions
from shadowmask.eviction.snapkv import pool_by_position

BLOCK_ROWS = 128
BLOCK_NUMBERS = 2**24  # 64 MiB in float32


class RKVEvictor(Evictor):
    """See module. ``recent_window`` defaults to ``observation_window``, as published."""

    name = "rkv"

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        observation_window: int = 8,
        kernel_size: int = 7,
        importance_weight: float = 0.1,
        similarity_threshold: float = 0.5,
        share: str | None = None,
    ) -> None:
        if observation_window < 1:
            raise ValueError(f"observation_window={observation_window} must be at least 1")
        if kernel_size < 1 or kernel_size % 2 == 0:
            raise ValueError(f"kernel_size={kernel_size} must be odd and at least 1")
        if not 0.0 <= importance_weight <= 1.0:
            raise ValueError(f"importance_weight={importance_weight} is outside [0, 1]")
        self.observation_window = observation_window
        self.kernel_size = kernel_size
        self.importance_weight = importance_weight
        self.similarity_threshold = similarity_threshold
        self.always_kept = observation_window if recent_window is None else recent_window
        super().__init__(budget, compression_ratio, num_sinks, self.always_kept, share)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        importance = pool_by_position(self.importance(view), view.positions, self.kernel_size, "max")
        redundancy = key_redundancy(view.keys, view.positions, self.similarity_threshold)
        return self.importance_weight * importance - (1 - self.importance_weight) * redundancy

    def importance(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        """Mean attention of the window's queries over the keys that are not in the recent window."""
        assert view.window_positions is not None
        logits, seen = window_logits(view)
        recent = view.positions > (view.query_positions - self.always_kept)[:, None, None]
        weights = softmax_over(logits.amax(dim=2), seen[:, :, 0] & ~recent[:, :, None])
        rows = (view.window_positions >= 0).sum(dim=-1).clamp(min=1)
        return weights.sum(dim=2) / rows[:, None, None]


def key_redundancy(
    keys: Float[Tensor, "batch kv_heads slots head_dim"],
    positions: Int[Tensor, "batch kv_heads slots"],
    threshold: float,
) -> Float[Tensor, "batch kv_heads slots"]:
    """How much a key is like the others, 0 to 1, summing to 1 over the occupied slots.

    The sum of a key's similarities to all is its product with the sum of all directions; only what is
    spared needs the pairs themselves, and takes them in blocks.
    """
    directions = key_directions(keys, positions)
    occupied = positions >= 0
    everybody = torch.einsum("bjsd,bjd->bjs", directions, directions.sum(dim=2))
    itself = directions.square().sum(dim=-1)
    spared = _spared_similarity(directions, positions, threshold)
    number = occupied.sum(dim=-1, keepdim=True).clamp(min=1)
    return softmax_over((everybody - itself - spared) / number, occupied)


def _spared_similarity(
    directions: Float[Tensor, "batch kv_heads slots head_dim"],
    positions: Int[Tensor, "batch kv_heads slots"],
    threshold: float,
) -> Float[Tensor, "batch kv_heads slots"]:
    """Sum of similarities to those keys whose most recent similar neighbour this one is."""
    batch, kv_heads, slots, _ = directions.shape
    rows = min(max(BLOCK_NUMBERS // (batch * kv_heads * slots), 1), BLOCK_ROWS)
    columns = torch.arange(slots, device=directions.device)
    spared = torch.zeros_like(directions[..., 0])
    for start in range(0, slots, rows):
        block = directions[:, :, start : start + rows]
        similarity = block @ directions.transpose(-1, -2)  # (batch, kv_heads, rows, slots)
        another = columns != columns[start : start + rows, None]
        neighbours = torch.where((similarity > threshold) & another, positions[:, :, None], -1)
        newest = neighbours.amax(dim=-1, keepdim=True)
        # a sum over comparisons: scatter_add would add in any order on a GPU
        spared += similarity.masked_fill((neighbours != newest) | (newest < 0), 0.0).sum(dim=2)
    return spared
