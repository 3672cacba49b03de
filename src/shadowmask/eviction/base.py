"""What an evictor is: a score per key; the base class turns scores into what stays.

    score -> select: sinks and recent window always stay, then the highest scores up to the budget

``budget`` (tokens per layer and KV head) is the primitive. ``compression_ratio`` is the fraction of
the *prompt* that is removed and is turned into a budget in one place, ``Evictor.budget_for``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import sink_softmax

SHARES = ("none", "heads")
NUM_SINKS = 4  # StreamingLLM (arXiv:2309.17453): the first tokens collect attention that has nowhere to go


@dataclass(frozen=True)
class LayerView:
    """What a scorer may look at: the occupied and empty slots of one layer for a batch of sequences.

    Slots are not in order of position: evicted ones are overwritten. An empty slot has
    ``positions == -1``; its key, value and attention are undefined and its score is ignored.
    """

    layer: int
    keys: Float[Tensor, "batch kv_heads slots head_dim"]
    values: Float[Tensor, "batch kv_heads slots value_dim"]
    positions: Int[Tensor, "batch kv_heads slots"]
    query_positions: Int[Tensor, " batch"]  # the last query that was computed, i
    seeds: Int[Tensor, " batch"]  # one integer per sequence, equal for equal prompt, sample and seed
    scaling: float
    softcap: float | None = None
    sliding_window: int | None = None
    sink_logits: Float[Tensor, " heads"] | None = None  # learned logits beside those of the keys (gpt-oss)
    # the last queries, in no particular order; only if the evictor sets observation_window
    window_queries: Float[Tensor, "batch heads window head_dim"] | None = None
    window_positions: Int[Tensor, "batch window"] | None = None
    # attention each key received from all queries so far, summed; only if accumulates_attention
    attention_received: Float[Tensor, "batch kv_heads slots"] | None = None


class Evictor(ABC):
    """Decides which keys stay in the cache. Subclass, set ``name``, write ``score``, register.

    Args:
        budget: keys that stay per layer and KV head after an eviction, sinks and recent window
            included. Give this or ``compression_ratio``.
        compression_ratio: fraction of the prompt that is *removed*, in [0, 1). The budget is then
            ``round((1 - compression_ratio) * prompt tokens)``, never below sinks + recent window.
            0 removes nothing.
        num_sinks: first tokens of the sequence that always stay.
        recent_window: last tokens that always stay; ``None`` takes the evictor's own default.
        share: ``"heads"`` keeps one set of positions for all KV heads of a layer, chosen by the mean
            of their scores; ``"none"`` lets every KV head choose; ``None`` takes the evictor's default.

    Raises:
        ValueError: neither or both of budget and ratio, a ratio outside [0, 1), a budget that
            does not exceed sinks + recent window, or an unknown ``share``.
    """

    name: ClassVar[str]
    default_recent_window: ClassVar[int] = 32
    default_share: ClassVar[str] = "none"
    shares: ClassVar[tuple[str, ...]] = SHARES  # that this evictor knows
    # whether the heads of a layer keep different numbers of keys, which add up to budget x heads
    ragged_heads: ClassVar[bool] = False
    # how many of the last queries the scorer looks at; 0 = none are stored
    observation_window: int = 0
    # whether the engine must sum the attention that every key receives
    accumulates_attention: ClassVar[bool] = False

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        share: str | None = None,
    ) -> None:
        if (budget is None) == (compression_ratio is None):
            raise ValueError(
                f"evictor {self.name!r} needs exactly one of budget and compression_ratio, got "
                f"budget={budget} and compression_ratio={compression_ratio}"
            )
        if compression_ratio is not None and not 0.0 <= compression_ratio < 1.0:
            raise ValueError(
                f"compression_ratio={compression_ratio} is outside [0, 1): it is the fraction of the "
                "prompt's keys that is removed"
            )
        if num_sinks < 0:
            raise ValueError(f"num_sinks={num_sinks} is negative")
        if recent_window is not None and recent_window < 1:
            raise ValueError(f"recent_window={recent_window} must be at least 1")
        share = self.default_share if share is None else share
        if share not in self.shares:
            raise ValueError(f"evictor {self.name!r}: share={share!r} is none of {', '.join(self.shares)}")
        self.budget = budget
        self.compression_ratio = compression_ratio
        self.num_sinks = num_sinks
        self._recent_window = recent_window
        self.share = share
        if budget is not None:
            protected = num_sinks + self.recent_window_for(budget)
            if budget < max(protected, 1):
                raise ValueError(
                    f"budget={budget} is below num_sinks={num_sinks} + recent_window="
                    f"{protected - num_sinks}: raise the budget to at least {protected} or lower "
                    "recent_window"
                )

    @abstractmethod
    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        """Importance of every slot, higher = keep. Values in empty slots are ignored."""

    def recent_window_for(self, budget: int) -> int:
        """Last tokens that always stay under this budget."""
        return self.default_recent_window if self._recent_window is None else self._recent_window

    def budget_for(self, prompt_length: int) -> int | None:
        """Keys that may stay for a prompt of this length; ``None`` = no bound, nothing is evicted."""
        if self.budget is not None:
            return self.budget
        assert self.compression_ratio is not None
        if self.compression_ratio == 0.0:
            return None
        kept = int((1.0 - self.compression_ratio) * prompt_length + 0.5)
        return max(kept, self.num_sinks + self.recent_window_for(kept), 1)

    def layer_budgets(self, budget: int, tokens: int, num_layers: int) -> tuple[int, ...]:
        """Keys that stay per KV head in each layer; ``()``: ``budget`` in all of them.

        They must add up to ``budget * num_layers``, and each must hold sinks and recent window.

        Args:
            tokens: most that the sequence can have when it is evicted; not below ``budget`` in any layer
                where that would evict from a sequence of ``budget`` tokens or fewer.
        """
        return ()

    def select(
        self,
        scores: Float[Tensor, "batch kv_heads slots"],
        positions: Int[Tensor, "batch kv_heads slots"],
        query_positions: Int[Tensor, " batch"],
        budget: Int[Tensor, " batch"],
        recent_window: Int[Tensor, " batch"],
    ) -> Bool[Tensor, "batch kv_heads slots"]:
        """Which occupied slots stay: at most ``budget`` per head, exactly that many if there are more.

        Ties go to the later position, so the choice depends neither on the order of slots nor on
        the sort that a device happens to use. Under ``share="heads"`` the heads of a layer must hold
        the same positions, as they do if that is how they were evicted from the start.
        """
        if self.share == "heads":
            scores = mean_over_heads(scores, positions)
        scores = self.protect(scores, positions, query_positions, recent_window)
        return (positions >= 0) & (ranks(scores, positions) < budget[:, None, None])

    def protect(
        self,
        scores: Float[Tensor, "batch kv_heads slots"],
        positions: Int[Tensor, "batch kv_heads slots"],
        query_positions: Int[Tensor, " batch"],
        recent_window: Int[Tensor, " batch"],
    ) -> Float[Tensor, "batch kv_heads slots"]:
        """Scores with sinks and recent window above everything, and empty slots below."""
        occupied = positions >= 0
        recent = positions > (query_positions - recent_window)[:, None, None]
        protected = occupied & ((positions < self.num_sinks) | recent)
        return scores.masked_fill(protected, torch.inf).masked_fill(~occupied, -torch.inf)

    def __repr__(self) -> str:
        size = (
            f"budget={self.budget}"
            if self.budget is not None
            else f"compression_ratio={self.compression_ratio}"
        )
        return f"{type(self).__name__}({size}, num_sinks={self.num_sinks})"


def ranks(
    scores: Float[Tensor, "*rows slots"], positions: Int[Tensor, "*rows slots"]
) -> Int[Tensor, "*rows slots"]:
    """Place of every slot when sorted by score, the best is 0; ties go to the later position."""
    by_position = positions.argsort(dim=-1, descending=True, stable=True)
    by_score = scores.gather(-1, by_position).argsort(dim=-1, descending=True, stable=True)
    order = by_position.gather(-1, by_score)
    places = torch.arange(order.shape[-1], device=order.device).expand_as(order)
    return torch.empty_like(order).scatter_(-1, order, places)


def mean_over_heads(
    scores: Float[Tensor, "batch kv_heads slots"],
    positions: Int[Tensor, "batch kv_heads slots"],
) -> Float[Tensor, "batch kv_heads slots"]:
    """Give every position the mean of its scores over the KV heads, which must hold the same positions.

    Aligned by position: the slot of a position may differ from head to head. Empty slots get 0.
    """
    order = positions.argsort(dim=-1, stable=True)
    aligned = scores.masked_fill(positions < 0, 0.0).gather(-1, order)
    mean = aligned.mean(dim=1, keepdim=True).expand_as(aligned)
    return torch.empty_like(scores).scatter_(-1, order, mean)


def widen(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The same in float32 or wider: what scores are computed in."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def window_logits(
    view: LayerView,
) -> tuple[
    Float[Tensor, "batch kv_heads per_kv window slots"], Bool[Tensor, "batch kv_heads 1 window slots"]
]:
    """Scaled and capped logits of the observation window's queries, and which slots each row sees.

    Recomputed from queries and keys (a window x slots product), so no attention kernel has to
    return its weights. A row sees occupied slots up to its own position, under a sliding window the
    last ones; a row that does not exist yet (position -1) sees none. Logits of other slots are undefined.
    """
    assert view.window_queries is not None and view.window_positions is not None
    queries = view.window_queries.unflatten(
        1, (view.keys.shape[1], -1)
    )  # (batch, kv_heads, per_kv, window, dim)
    logits = torch.einsum("bjrwd,bjsd->bjrws", queries, view.keys) * view.scaling
    if view.softcap is not None:
        logits = view.softcap * torch.tanh(logits / view.softcap)
    positions, rows = (
        view.positions[:, :, None, None, :],
        view.window_positions[:, None, None, :, None],
    )
    seen = (positions >= 0) & (positions <= rows)
    if view.sliding_window is not None:
        seen = seen & (positions > rows - view.sliding_window)
    return widen(logits), seen


def softmax_over(
    logits: Float[Tensor, "... slots"],
    seen: Bool[Tensor, "... slots"],
    sinks: Float[Tensor, ...] | None = None,
) -> Float[Tensor, "... slots"]:
    """Softmax over the slots that are ``seen``; 0 elsewhere, and everywhere in a row that sees none."""
    # a finite fill, or such a row would be NaN
    return sink_softmax(logits.masked_fill(~seen, torch.finfo(logits.dtype).min), sinks) * seen


def window_attention(view: LayerView) -> Float[Tensor, "batch kv_heads window slots"]:
    """Attention of the observation window's queries over the slots, averaged over each KV head's queries.

    Rows of the window that do not exist yet are zero.
    """
    logits, seen = window_logits(view)
    sinks = None if view.sink_logits is None else view.sink_logits.view(1, logits.shape[1], -1, 1)
    return softmax_over(logits, seen, sinks).mean(dim=2)
