"""What a sampler's cache is: it reads prompts, seats sequences in rows, decodes one token per row, evicts.

A cache has a fixed number of rows. A sequence sits in a row until it is finished; then the row takes
another one, so a rollout of any size runs in memory that is allocated once. Everything that a decode
step reads or writes is a tensor (counters included), per row: what a sequence keeps does not depend on
its neighbours, and a step needs no host synchronisation.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from shadowmask.attention.kernel import Scoring
from shadowmask.eviction.base import Evictor, LayerView
from shadowmask.record import NEVER


def slot_bytes(num_layers: int, num_kv_heads: int, key_dim: int, value_dim: int, itemsize: int) -> int:
    """Bytes that one token's keys and values take over all layers and KV heads."""
    return num_layers * num_kv_heads * (key_dim + value_dim) * itemsize


@dataclass(frozen=True)
class CachePlan:
    """What a cache must be able to hold. All of it is known before the first prefill."""

    rows: int  # sequences that decode at one time
    prompts: int  # prompts that are held at one time, where a group shares its prompt
    group: int  # most rows that one prompt may have
    kept: tuple[int, ...]  # most prompt keys that stay per KV head: in each layer, or one number for all
    new_tokens: int  # most tokens that are fed after a prompt
    slots: tuple[int, ...]  # per row and KV head, where rows own their prompt keys; by layer likewise
    tokens: int  # longest prompt + completion, the length of the record
    longest_prompt: int
    ragged_prompts: bool  # whether prompts differ in the number of keys that stay
    ragged_heads: bool  # whether heads do: the heads of a layer then share one pool of slots
    waiting: bool  # whether more sequences will come than there are rows
    observation_window: int
    accumulates_attention: bool

    def kept_at(self, layer: int) -> int:
        return at(self.kept, layer)

    def slots_at(self, layer: int) -> int:
        return at(self.slots, layer)


@dataclass(frozen=True)
class PromptInfo:
    """What a cache must know of a prompt."""

    length: int
    budget: int  # keys that may stay per layer and KV head; ``NEVER`` where the evictor sets no bound
    seed: int  # what a random evictor draws from in the prefill
    layer_budgets: tuple[int, ...] = ()  # where layers differ

    @property
    def budgets(self) -> tuple[int, ...]:
        """Of each layer, or one for all."""
        return self.layer_budgets or (self.budget,)

    @property
    def kept(self) -> tuple[int, ...]:
        return tuple(min(self.length, budget) for budget in self.budgets)


@dataclass(frozen=True)
class Chosen:
    """Keys of a prompt, one row for each pool of slots that they go to, in order of head and position."""

    head: Int[Tensor, "pools _kept"]  # its last axis is 1 where a pool has one head
    position: Int[Tensor, "pools kept"]

    @property
    def kept(self) -> int:
        return self.position.shape[1]

    def of(self, data: Float[Tensor, "kv_heads prompt *dim"]) -> Float[Tensor, "pools kept *dim"]:
        return data[self.head, self.position]

    @property
    def single_heads(self) -> bool:
        return self.head.shape[1] == 1 and self.head.shape[0] == self.position.shape[0]

    def record(self, kv_heads: int, prompt: int) -> Int[Tensor, "kv_heads prompt"]:
        """``evicted_at`` of all keys: the others are gone before the query after the prompt."""
        record = torch.full((kv_heads, prompt), prompt, dtype=torch.int32, device=self.position.device)
        record[self.head, self.position] = NEVER
        return record


def choose(keep: Bool[Tensor, "kv_heads prompt"], kept: int, pooled: bool) -> Chosen:
    """Where the keys stand that stay.

    Args:
        kept: how many stay: per head, or the mean over heads where they are ``pooled``.
    """
    kv_heads, prompt = keep.shape
    # a stable sort puts those that stay first, in order
    if not pooled:
        index = (~keep).to(torch.uint8).argsort(dim=-1, stable=True)[:, :kept]
        return Chosen(torch.arange(kv_heads, device=keep.device)[:, None], index)
    index = (~keep).flatten().to(torch.uint8).argsort(stable=True)[None, : kept * kv_heads]
    return Chosen(index // prompt, index % prompt)


def at(values: Sequence[int], layer: int) -> int:
    """A layer's value in a sequence of one per layer, or of one for all."""
    return values[layer] if len(values) > 1 else values[0]


@dataclass(frozen=True)
class DecodeStep:
    """What all layers of one decode step share."""

    positions: Int[Tensor, " rows"]  # absolute position of each row's new token
    decoded: Int[Tensor, " rows"]  # tokens that each row has decoded before it
    width: int  # slots of its own tokens that a row reads: more than any row's ``decoded``
    masks: dict[tuple[str, int | None], Tensor] = field(default_factory=dict)  # made once per step


class KVCache(ABC):
    """An evictor's choice from each prompt, then one token per row at a time. See module."""

    shares_prompts: ClassVar[bool]  # whether a group holds its prompt once

    def __init__(self, plan: CachePlan, evictor: Evictor, device: torch.device) -> None:
        self.plan = plan
        self.evictor = evictor
        self.device = device
        self.in_use = plan.rows  # decode steps cover rows up to here
        self.prompt_lengths, self.decoded, self.active, self.seeds = (
            torch.zeros(plan.rows, dtype=torch.int64, device=device) for _ in range(4)
        )
        # by layer in their last axis, or one column for all layers
        self.budgets = torch.full((plan.rows, len(plan.kept)), NEVER, dtype=torch.int64, device=device)
        self.recent_windows = torch.zeros_like(self.budgets)
        self.prefill_bytes = 0  # largest keys + values of one layer's whole prompt seen so far
        self.token_bytes = 0  # keys and values of one token over all layers
        self._layers_filled: set[int] = set()

    # -- memory ---------------------------------------------------------------------------------

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes that keys and values really occupy."""

    @staticmethod
    @abstractmethod
    def slots_needed(plan: CachePlan, layer: int = 0) -> int:
        """Slots per KV head that a cache of this plan will allocate in a layer."""

    @classmethod
    def bytes_needed(cls, plan: CachePlan, bytes_of_layer: Sequence[int]) -> int:
        """Bytes of all slots that a cache of this plan will allocate.

        Args:
            bytes_of_layer: keys and values of one token in each layer.
        """
        return sum(cls.slots_needed(plan, layer) * size for layer, size in enumerate(bytes_of_layer))

    # -- prompts and rows -----------------------------------------------------------------------

    @abstractmethod
    def can_open(self, samples: int, seated_now: int) -> bool:
        """Whether there is room for another prompt with so many sequences to come."""

    @abstractmethod
    def open_prompt(self, prompt: PromptInfo, samples: int, rows: list[int]) -> int:
        """Make room for a prompt; ``rows`` are the ones that will be seated first. Returns its place."""

    @abstractmethod
    def store_prompt(
        self,
        layer: int,
        place: int,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        chosen: Chosen,
        attention_received: Float[Tensor, "1 kv_heads prompt"] | None,
        scoring: Scoring,
    ) -> None:
        """Store these keys of the prompt."""

    def seat(self, rows: list[int], place: int, prompt: PromptInfo, seeds: list[int]) -> None:
        """Let one sequence of the prompt begin in each of these free rows."""
        index = torch.tensor(rows, device=self.device)
        self.prompt_lengths[index] = prompt.length
        self.decoded[index] = 0
        self.active[index] = 1
        self.seeds[index] = torch.tensor(seeds, device=self.device)
        self.budgets[index] = torch.tensor(prompt.budgets, device=self.device)
        windows = [self.evictor.recent_window_for(budget) for budget in prompt.budgets]
        self.recent_windows[index] = torch.tensor(windows, device=self.device)
        self._seat(rows, place)

    @abstractmethod
    def _seat(self, rows: list[int], place: int) -> None: ...

    def release(self, row: int) -> None:
        """Free the row of a finished sequence, after its record was read."""
        self.active[row] = 0
        self.decoded[row] = 0
        self._release(row)

    @abstractmethod
    def _release(self, row: int) -> None: ...

    def shrink(self, moves: list[tuple[int, int]], in_use: int) -> None:
        """Move sequences (from row, to free row) and let steps cover the first ``in_use`` rows only."""
        for source, target in moves:
            for state in (
                self.prompt_lengths,
                self.decoded,
                self.active,
                self.seeds,
                self.budgets,
                self.recent_windows,
            ):
                state[target] = state[source]
            self.active[source] = 0
            self._move(source, target)
        self.in_use = in_use

    @abstractmethod
    def _move(self, source: int, target: int) -> None: ...

    # -- decoding -------------------------------------------------------------------------------

    def step(self, width: int) -> DecodeStep:
        """The coming decode step, over the rows in use."""
        rows = slice(0, self.in_use)
        return DecodeStep((self.prompt_lengths + self.decoded)[rows], self.decoded[rows], width)

    def advance(self) -> None:
        """Count one decoded token for every seated sequence."""
        self.decoded += self.active

    @abstractmethod
    def attend(
        self,
        layer: int,
        query: Float[Tensor, "rows heads 1 head_dim"],
        key: Float[Tensor, "rows kv_heads 1 head_dim"],
        value: Float[Tensor, "rows kv_heads 1 value_dim"],
        step: DecodeStep,
        scoring: Scoring,
    ) -> Float[Tensor, "rows heads 1 value_dim"]:
        """Store one new token per row and attend from it."""

    @abstractmethod
    def evict(self, rows: list[int]) -> None:
        """Cut every layer of these rows down to their budgets, after their last query was computed."""

    @abstractmethod
    def evicted_at(self, row: int, tokens: int) -> Int[Tensor, "layers kv_heads tokens"]:
        """The record of one row's first ``tokens`` tokens, on the CPU."""

    # -- eviction from a prompt -----------------------------------------------------------------

    def prefill(
        self,
        layer: int,
        place: int,
        prompt: PromptInfo,
        query: Float[Tensor, "1 heads prompt head_dim"],
        key: Float[Tensor, "1 kv_heads prompt head_dim"],
        value: Float[Tensor, "1 kv_heads prompt value_dim"],
        attention_received: Float[Tensor, "1 kv_heads prompt"] | None,
        scoring: Scoring,
    ) -> None:
        """Evict from one layer's full prompt and store what stays.

        Called as soon as that layer has attended, so at no time do two layers hold a full prompt.
        """
        size = key.numel() * key.element_size() + value.numel() * value.element_size()
        self.prefill_bytes = max(self.prefill_bytes, size)
        if layer not in self._layers_filled:
            self._layers_filled.add(layer)
            self.token_bytes += size // key.shape[2]
        kept = at(prompt.kept, layer)
        keep = torch.ones(key.shape[1:3], dtype=torch.bool, device=key.device)
        if key.shape[2] > at(prompt.budgets, layer):
            view = self._prompt_view(layer, prompt, query, key, value, attention_received, scoring)
            keep = self._select(view, prompt)[0]
        chosen = choose(keep, kept, self.plan.ragged_heads)
        self.store_prompt(layer, place, query, key, value, chosen, attention_received, scoring)

    def _select(self, view: LayerView, prompt: PromptInfo) -> Bool[Tensor, "1 kv_heads prompt"]:
        budget = at(prompt.budgets, view.layer)
        limits = (budget, self.evictor.recent_window_for(budget))
        return self.evictor.select(
            self.evictor.score(view),
            view.positions,
            view.query_positions,
            *(torch.tensor([n], device=self.device) for n in limits),
        )

    def _limits(self, rows: slice | Tensor, layer: int) -> tuple[Int[Tensor, " rows"], Int[Tensor, " rows"]]:
        """Budgets and recent windows of these rows in a layer."""
        column = layer if self.budgets.shape[1] > 1 else 0
        return self.budgets[rows, column], self.recent_windows[rows, column]

    def _prompt_view(
        self,
        layer: int,
        prompt: PromptInfo,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_received: Tensor | None,
        scoring: Scoring,
    ) -> LayerView:
        tokens = torch.arange(prompt.length, dtype=torch.int32, device=key.device)
        first = max(prompt.length - self.plan.observation_window, 0)
        watches = self.plan.observation_window > 0
        return LayerView(
            layer=layer,
            keys=key,
            values=value,
            positions=tokens.expand(1, key.shape[1], -1),
            query_positions=torch.tensor([prompt.length - 1], device=key.device),
            seeds=torch.tensor([prompt.seed], device=key.device),
            scaling=scoring.scaling,
            softcap=scoring.softcap,
            sliding_window=scoring.sliding_window,
            sink_logits=scoring.sink_logits,
            window_queries=query[:, :, first:] if watches else None,
            window_positions=tokens[None, first:] if watches else None,
            attention_received=attention_received,
        )
