"""One rollout: prefill once per prompt -> evict -> fan out -> decode, in a fixed number of rows.

A prompt is read alone (no padding), so what is kept of it cannot depend on other prompts. Its keys
are cut to the budget layer by layer while they are computed. Seated sequences decode together, one
token per step; each evicts again after every ``evict_every`` tokens of its own. A finished sequence
leaves its row to one that waits. When none waits any more and half of the rows are empty, the rest moves
together and a step computes only what is left.

Query ``i`` predicts token ``i + 1``: the first completion token is sampled by the last prompt query,
which saw the full prompt. Sampling noise is drawn per sequence from (seed, prompt, number of the
sample), so a sequence depends neither on its batch nor on when it was seated.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor, nn

from shadowmask.attention.interface import AttentionSession, run_decoder
from shadowmask.attention.sampling import DecodeSession, PrefillSession
from shadowmask.cache import KVCache, PromptInfo
from shadowmask.chunking import chunked_mlps
from shadowmask.few_rows import from_weight_side
from shadowmask.head import head_logits
from shadowmask.models import OutputHead, wide_dtype

WIDTH_STEP = 64  # an eager decode step reads own slots up to the next multiple of this
CHECK_EVERY = 8  # steps between two looks at which sequences stopped, where looking waits for the device
PREFILL_CHUNK = 512  # prompt tokens whose MLP activations exist at one time

Forward = Callable[
    [nn.Module, Int[Tensor, "rows 1"], Int[Tensor, "rows 1"], AttentionSession, int],
    Float[Tensor, "rows 1 hidden"],
]


@dataclass
class Prompt:
    """A distinct prompt and the completions that are asked of it."""

    ids: list[int]
    info: PromptInfo
    seeds: list[int]  # one per completion
    numbers: list[int]  # of its completions in the batch
    begun: int = 0  # how many of them were seated
    finished: int = 0
    place: int = -1  # in the cache
    last_hidden: Tensor | None = None  # (1, hidden), until all have begun

    @property
    def left(self) -> int:
        return len(self.seeds) - self.begun


@dataclass(frozen=True)
class Sampled:
    """One finished completion."""

    completion_ids: list[int]
    logprobs: Float[Tensor, " completion"]
    evicted_at: Int[Tensor, "layers kv_heads tokens"]


@dataclass(frozen=True)
class SamplingSettings:
    max_new_tokens: int
    temperature: float  # of the log-probabilities
    greedy: bool
    stops: list[int]
    evict_every: int | None
    static_shapes: bool  # the forward is compiled: no step may look different from the one before


@dataclass
class _Tokens:
    """Tokens that a cache without eviction would hold now and at most, a prompt once or per row."""

    once: int = 0
    per_row: int = 0
    most_once: int = 0
    most_per_row: int = 0

    def add(self, once: int, per_row: int) -> None:
        self.once += once
        self.per_row += per_row
        self.most_once = max(self.most_once, self.once)
        self.most_per_row = max(self.most_per_row, self.per_row)


@dataclass
class Sampler:
    """Runs one rollout. ``forward`` is ``run_decoder`` or its compiled twin."""

    decoder: nn.Module
    head: OutputHead
    num_layers: int
    cache: KVCache
    prompts: list[Prompt]
    settings: SamplingSettings
    forward: Forward
    finished: dict[int, Sampled] = field(default_factory=dict)
    tokens_held: _Tokens = field(default_factory=_Tokens)

    def __post_init__(self) -> None:
        rows, new = self.cache.plan.rows, self.settings.max_new_tokens
        device = self.device = self.cache.device
        # on a CPU looking costs nothing; elsewhere it waits for the device, so it is done now and then
        self.look_every = 1 if device.type == "cpu" else CHECK_EVERY
        self.stops = torch.tensor(self.settings.stops, dtype=torch.int64, device=device)
        # what a seated sequence consists of besides its cache
        self.next_token = torch.zeros(rows, dtype=torch.int64, device=device)
        self.stopped = torch.zeros(rows, dtype=torch.bool, device=device)
        self.noise = torch.zeros(rows, new, dtype=torch.float64, device=device)
        self.tokens = torch.zeros(rows, new, dtype=torch.int64, device=device)
        wide = wide_dtype(self.head.weight.dtype)
        self.logprobs = torch.zeros(rows, new, dtype=wide, device=device)
        # the host's side of it: completion number, prompt and tokens fed, by row
        self.seated: dict[int, tuple[int, Prompt]] = {}
        self.fed: dict[int, int] = {}
        self.waiting = deque(self.prompts)
        self.steps = 0

    @property
    def in_use(self) -> int:
        return self.cache.in_use

    def run(self) -> list[Sampled]:
        """Sample every completion of every prompt; returned in the order of their numbers."""
        with nullcontext() if self.settings.static_shapes else from_weight_side(self.decoder):
            while self.waiting or self.seated:
                self._admit()
                if self._retire():
                    continue
                self._close_ranks()
                self._step()
        return [self.finished[n] for n in sorted(self.finished)]

    # -- who sits where -------------------------------------------------------------------------

    def _admit(self) -> None:
        """Seat waiting sequences in free rows, in order; read a prompt when its first one is seated."""
        free = [row for row in range(self.in_use) if row not in self.seated]
        while self.waiting and free:
            prompt = self.waiting[0]
            rows, free = free[: prompt.left], free[prompt.left :]
            if prompt.begun == 0:
                if not self.cache.can_open(len(prompt.seeds), len(rows)):
                    return
                prompt.place = self.cache.open_prompt(prompt.info, len(prompt.seeds), rows)
                prompt.last_hidden = self._prefill(prompt)
                self.tokens_held.add(prompt.info.length, 0)
            self._seat(prompt, rows)
            if prompt.left == 0:
                prompt.last_hidden = None
                self.waiting.popleft()

    def _seat(self, prompt: Prompt, rows: list[int]) -> None:
        chosen = slice(prompt.begun, prompt.begun + len(rows))
        prompt.begun += len(rows)
        seeds = prompt.seeds[chosen]
        self.cache.seat(rows, prompt.place, prompt.info, seeds)
        index = torch.tensor(rows, device=self.device)
        self.noise[index] = _noise(seeds, self.settings.max_new_tokens).to(self.device)
        for row, number in zip(rows, prompt.numbers[chosen], strict=True):
            self.seated[row] = (number, prompt)
            self.fed[row] = 0
        self.tokens_held.add(0, len(rows) * prompt.info.length)
        assert prompt.last_hidden is not None
        self._sample(prompt.last_hidden.expand(len(rows), -1), index)

    def _retire(self) -> int:
        """Take finished sequences out of their rows. Returns how many."""
        new = self.settings.max_new_tokens
        full = [row for row, fed in self.fed.items() if fed + 1 == new]
        if self.steps % self.look_every == 0:
            stopped = self.stopped.tolist()
            full += [row for row in self.seated if stopped[row] and row not in full]
        for row in full:
            self._finish(row)
        return len(full)

    def _finish(self, row: int) -> None:
        number, prompt = self.seated.pop(row)
        fed = self.fed.pop(row)
        tokens = self.tokens[row, : fed + 1]
        # a device that is looked at now and then has gone on after the stop
        is_stop = torch.isin(tokens, self.stops).tolist()
        length = is_stop.index(True) + 1 if True in is_stop else fed + 1
        self.finished[number] = Sampled(
            tokens[:length].tolist(),
            self.logprobs[row, :length].clone().cpu(),  # a copy: the row goes on
            self.cache.evicted_at(row, prompt.info.length + length),
        )
        self.cache.release(row)
        self.stopped[row] = False
        prompt.finished += 1
        whole = prompt.finished == len(prompt.seeds)
        self.tokens_held.add(-fed - (prompt.info.length if whole else 0), -fed - prompt.info.length)

    def _close_ranks(self) -> None:
        """When nobody waits and half of the rows are empty, let steps cover the other half only."""
        if self.waiting or self.settings.static_shapes or 2 * len(self.seated) > self.in_use:
            return
        in_use = len(self.seated)
        free = [row for row in range(in_use) if row not in self.seated]
        moves = [(row, free.pop(0)) for row in sorted(self.seated) if row >= in_use]
        for source, target in moves:
            for state in (self.next_token, self.stopped, self.noise, self.tokens, self.logprobs):
                state[target] = state[source]
            self.stopped[source] = False
            self.seated[target] = self.seated.pop(source)
            self.fed[target] = self.fed.pop(source)
        self.cache.shrink(moves, in_use)

    # -- computing ------------------------------------------------------------------------------

    def _prefill(self, prompt: Prompt) -> Float[Tensor, "1 hidden"]:
        """Read a prompt once; return its last hidden state."""
        session = PrefillSession(self.cache, prompt.place, prompt.info)
        ids = torch.tensor([prompt.ids], device=self.device)
        positions = torch.arange(len(prompt.ids), device=self.device)[None]
        with chunked_mlps(self.decoder, PREFILL_CHUNK):
            hidden = run_decoder(self.decoder, ids, positions, session, self.num_layers)
        # a copy: a view would keep the hidden states of the whole prompt
        return hidden[:, -1].clone()

    def _step(self) -> None:
        """Feed every row its last token, evict where it is time, and sample the next one."""
        step = self.cache.step(self._width())
        hidden = self.forward(
            self.decoder,
            self.next_token[: self.in_use, None],
            step.positions[:, None],
            DecodeSession(self.cache, step),
            self.num_layers,
        )[:, -1]
        self.cache.advance()
        self.steps += 1
        for row in self.fed:
            self.fed[row] += 1
        self.tokens_held.add(len(self.fed), len(self.fed))
        every = self.settings.evict_every
        due = [] if every is None else sorted(row for row, fed in self.fed.items() if fed % every == 0)
        if due:
            self.cache.evict(due)
        self._sample(hidden, slice(0, self.in_use))

    def _width(self) -> int:
        longest = self.cache.plan.new_tokens
        if self.settings.static_shapes:
            return longest
        return min((max(self.fed.values()) // WIDTH_STEP + 1) * WIDTH_STEP, longest)

    def _sample(self, hidden: Float[Tensor, "rows hidden"], rows: Tensor | slice) -> None:
        """Sample each row's next token by inverting the cumulative distribution at its noise."""
        place = self.cache.decoded[rows, None]
        logits = head_logits(hidden, self.head, self.settings.temperature)
        if self.settings.greedy:
            token = logits.argmax(dim=-1)
        else:
            token = _invert(logits, self.noise[rows].gather(1, place))
        logprob = logits.gather(-1, token[:, None])[:, 0] - logits.logsumexp(dim=-1)
        self.next_token[rows] = token
        # an index copies: read, write, put back
        self.tokens[rows] = self.tokens[rows].scatter(1, place, token[:, None])
        self.logprobs[rows] = self.logprobs[rows].scatter(1, place, logprob[:, None])
        self.stopped[rows] = self.stopped[rows] | torch.isin(token, self.stops)


def _invert(logits: Float[Tensor, "rows vocab"], noise: Float64[Tensor, "rows 1"]) -> Int[Tensor, " rows"]:
    """The first token whose cumulative probability exceeds the noise."""
    cumulative = logits.softmax(dim=-1, dtype=torch.float64).cumsum_(dim=-1)
    token = torch.searchsorted(cumulative, noise * cumulative[:, -1:], right=True)[:, 0]
    return token.clamp(max=logits.shape[-1] - 1)


def sequence_seeds(seed: int, prompt: Sequence[int], samples: int) -> tuple[int, list[int]]:
    """Seeds from what a sequence *is*: (seed, prompt), and (seed, prompt, number of the sample)."""
    return _hash(seed, prompt), [_hash(seed, [*prompt, -1, number]) for number in range(samples)]


def _hash(seed: int, numbers: Sequence[int]) -> int:
    data = torch.tensor([seed, *numbers], dtype=torch.int64).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _noise(seeds: list[int], steps: int) -> Float64[Tensor, "rows steps"]:
    """Uniform numbers in [0, 1), one stream per sequence."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(steps, generator=generator, dtype=torch.float64))
    return torch.stack(rows)
