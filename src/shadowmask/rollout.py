"""Sampling with an evicted KV cache: prefill once per prompt -> evict -> fan out -> decode.

A prompt is read alone (no padding), so what is kept of it cannot depend on other prompts. Its keys
are cut to the budget layer by layer while they are computed. All sequences then decode together, one
token per step; every ``evict_every`` decoded tokens the cache is cut down to the budget again.

Query ``i`` predicts token ``i + 1``: the first completion token is sampled by the last prompt query,
which saw the full prompt. Sampling noise is drawn per sequence from (seed, prompt, number of the
sample), so a rollout does not depend on its batch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowmask.attention.interface import run_decoder
from shadowmask.attention.sampling import DecodeSession, PrefillSession
from shadowmask.cache import CachePlan, KVCache, SlotCache
from shadowmask.eviction.base import Evictor
from shadowmask.head import head_logits
from shadowmask.models import base_model, decoder, num_layers, output_head, prepare_model
from shadowmask.record import NEVER, ShadowMask
from shadowmask.shared_cache import SharedPromptCache


@dataclass(frozen=True)
class RolloutBatch:
    """What the sampler did: tokens, their log-probabilities, and what every query could see."""

    prompt_ids: list[list[int]]
    group_sizes: list[int]  # completions of each prompt
    completion_ids: list[list[int]]  # prompt-major, the stop token included
    sparse_logprobs: list[Float[Tensor, " _completion"]]  # float32 or wider, temperature applied
    shadow: ShadowMask
    temperature: float  # of the log-probabilities; greedy rollouts report theirs at 1.0
    kv_bytes_peak: int  # slots of all layers + the largest full prompt of one layer
    kv_bytes_dense: int  # the same tokens in the same layout with nothing evicted
    kv_bytes_unshared: int  # the same with every completion holding a prompt of its own, as generate does

    @property
    def prompts_per_completion(self) -> list[list[int]]:
        """The prompt of every completion, in the order of ``completion_ids``."""
        return [
            prompt
            for prompt, size in zip(self.prompt_ids, self.group_sizes, strict=True)
            for _ in range(size)
        ]


class RolloutEngine:
    """Samples completions from an unmodified Hugging Face model with an evicting KV cache.

    Args:
        model: a causal language model; our attention is installed (see ``prepare_model``).
        tokenizer: encodes string prompts and names the EOS token; may be ``None`` for token ids.
        evictor: what stays, see ``get_evictor``.
        evict_every: decoded tokens between two evictions; ``None`` evicts from the prompt only.

    Raises:
        UnsupportedModelError: eviction could not be replayed exactly in this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        evictor: Evictor,
        evict_every: int | None = None,
    ) -> None:
        if evict_every is not None and evict_every < 1:
            raise ValueError(f"evict_every={evict_every} must be at least 1, or None for prompts only")
        self.model = prepare_model(model)
        self.tokenizer = tokenizer
        self.evictor = evictor
        self.evict_every = evict_every

    @torch.no_grad()
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        group_size: int | Sequence[int] = 1,
        max_new_tokens: int = 256,
        temperature: float = 1.0,
        seed: int = 0,
        stop_token_ids: Sequence[int] | None = None,
        **unsupported: object,
    ) -> RolloutBatch:
        """Sample ``group_size`` completions of every prompt.

        Args:
            group_size: one number, or one per prompt.
            temperature: divides the logits; 0 is greedy (for evaluation, not for training).
            stop_token_ids: end a completion; by default the model's and the tokenizer's EOS.

        Raises:
            ValueError: an empty or unusable prompt, or a sampling filter (top-k, top-p, ...), whose
                changed support the learner could not replay.
        """
        if unsupported:
            raise ValueError(
                f"{', '.join(sorted(unsupported))}: not supported. Sampling filters and penalties change "
                "the distribution in a way that the learner does not replay; use temperature only"
            )
        if max_new_tokens < 1 or temperature < 0:
            raise ValueError(
                f"max_new_tokens={max_new_tokens} must be at least 1 and temperature={temperature} "
                "not negative"
            )
        prompt_ids = [self._encode(n, prompt) for n, prompt in enumerate(prompts)]
        if not prompt_ids:
            raise ValueError("prompts is empty: give at least one prompt")
        sizes = [group_size] * len(prompt_ids) if isinstance(group_size, int) else list(group_size)
        if len(sizes) != len(prompt_ids) or min(sizes) < 1:
            raise ValueError(
                f"group_size={group_size!r}: one positive number, or one per prompt ({len(prompt_ids)})"
            )
        stops = self._stop_ids() if stop_token_ids is None else list(stop_token_ids)
        run = _Rollout(self, prompt_ids, sizes, max_new_tokens, temperature, seed, stops)
        return run.sample()

    def _encode(self, n: int, prompt: Any) -> list[int]:
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise ValueError(f"prompt {n} is a string, but the engine has no tokenizer")
            prompt = self.tokenizer(prompt)["input_ids"]
        ids = [int(token) for token in prompt]
        if not ids:
            raise ValueError(f"prompt {n} is empty: at least one token is needed")
        vocab = base_model(self.model).get_input_embeddings().weight.shape[0]
        if not 0 <= min(ids) <= max(ids) < vocab:
            raise ValueError(f"prompt {n} has token ids outside the model's vocabulary of {vocab}")
        return ids

    def _stop_ids(self) -> list[int]:
        config = getattr(base_model(self.model), "generation_config", None)
        eos = getattr(config, "eos_token_id", None)
        stops = set(eos if isinstance(eos, list) else [eos])
        if self.tokenizer is not None:
            stops.add(self.tokenizer.eos_token_id)
        return sorted(token for token in stops if token is not None)


class _Rollout:
    """One call of ``generate``: prompts, cache and the tokens sampled so far."""

    def __init__(
        self,
        engine: RolloutEngine,
        prompt_ids: list[list[int]],
        sizes: list[int],
        max_new_tokens: int,
        temperature: float,
        seed: int,
        stops: list[int],
    ) -> None:
        self.engine = engine
        self.decoder = decoder(engine.model)
        self.head = output_head(engine.model)
        self.num_layers = num_layers(engine.model)
        self.prompt_ids, self.sizes = prompt_ids, sizes
        self.max_new_tokens = max_new_tokens
        self.greedy = temperature == 0
        self.temperature = 1.0 if self.greedy else temperature
        self.device = self.head.weight.device
        self.stops = torch.tensor(stops, dtype=torch.int64, device=self.device)
        self.prompt_lengths = torch.tensor(
            [len(p) for p, size in zip(prompt_ids, sizes, strict=True) for _ in range(size)],
            device=self.device,
        )
        prompt_seeds, seeds = _sequence_seeds(prompt_ids, sizes, seed)
        self.noise = _noise(seeds, max_new_tokens).to(self.device)
        self.cache = self._make_cache(prompt_seeds, seeds)

    def _make_cache(self, prompt_seeds: list[int], seeds: list[int]) -> KVCache:
        evictor, every = self.engine.evictor, self.engine.evict_every
        lengths = self.prompt_lengths.tolist()
        budgets = [NEVER if (n := evictor.budget_for(length)) is None else n for length in lengths]
        slots = max(
            min(
                min(length, budget) + self.max_new_tokens,
                NEVER if every is None else budget + every,
            )
            for length, budget in zip(lengths, budgets, strict=True)
        )
        plan = CachePlan(
            rows=len(lengths),
            slots=slots,
            tokens=max(lengths) + self.max_new_tokens,
            observation_window=evictor.observation_window,
            accumulates_attention=evictor.accumulates_attention,
        )
        bounds, of_prompts, of_rows = (
            torch.tensor(x, device=self.device) for x in (budgets, prompt_seeds, seeds)
        )
        if every is None:
            # the last token of a completion is never fed, so one slot less than tokens
            new_tokens = max(self.max_new_tokens - 1, 1)
            return SharedPromptCache(
                plan, evictor, bounds, of_prompts, of_rows, self.prompt_lengths, self.sizes, new_tokens
            )
        return SlotCache(plan, evictor, bounds, of_prompts, of_rows)

    def sample(self) -> RolloutBatch:
        """Prefill, then decode until every sequence has stopped or is full."""
        token, logprob = self._pick(self._prefill(), 0)
        tokens, logprobs = [token], [logprob]
        stopped = torch.isin(token, self.stops)
        for step in range(1, self.max_new_tokens):
            if bool(stopped.all()):
                break
            hidden = self._decode(token, step - 1)
            self._evict_if_due(step)
            token, logprob = self._pick(hidden, step)
            tokens.append(token)
            logprobs.append(logprob)
            stopped = stopped | torch.isin(token, self.stops)
        return self._collect(torch.stack(tokens, dim=1), torch.stack(logprobs, dim=1))

    def _prefill(self) -> Float[Tensor, "rows hidden"]:
        """Read every prompt once; return the last hidden state, repeated over its group."""
        last = []
        start = 0
        for prompt, size in zip(self.prompt_ids, self.sizes, strict=True):
            session = PrefillSession(self.cache, slice(start, start + size))
            ids = torch.tensor([prompt], device=self.device)
            positions = torch.arange(len(prompt), device=self.device)[None]
            hidden = run_decoder(self.decoder, ids, positions, session, self.num_layers)
            # a copy: a view would keep the hidden states of the whole prompt
            last.append(hidden[:, -1].clone().expand(size, -1))
            start += size
        return torch.cat(last)

    def _decode(self, token: Int[Tensor, " rows"], step: int) -> Float[Tensor, "rows hidden"]:
        """Feed one token per row, the ``step``-th of each completion; return the hidden states."""
        positions = self.prompt_lengths + step
        session = DecodeSession(self.cache, positions, step)
        hidden = run_decoder(self.decoder, token[:, None], positions[:, None], session, self.num_layers)
        return hidden[:, -1]

    def _evict_if_due(self, decoded: int) -> None:
        every = self.engine.evict_every
        if every is not None and decoded % every == 0:
            self.cache.evict(self.prompt_lengths + decoded - 1)

    def _pick(
        self, hidden: Float[Tensor, "rows hidden"], step: int
    ) -> tuple[Int[Tensor, " rows"], Float[Tensor, " rows"]]:
        """Sample by inverting the cumulative distribution at this step's noise."""
        logprobs = head_logits(hidden, self.head, self.temperature).log_softmax(dim=-1)
        if self.greedy:
            token = logprobs.argmax(dim=-1)
        else:
            cumulative = logprobs.double().exp().cumsum(dim=-1)
            threshold = self.noise[:, step, None] * cumulative[:, -1:]
            # the first token whose cumulative probability exceeds the threshold
            token = torch.searchsorted(cumulative, threshold, right=True)[:, 0]
            token = token.clamp(max=logprobs.shape[-1] - 1)
        return token, logprobs.gather(-1, token[:, None])[:, 0]

    def _collect(
        self, tokens: Int[Tensor, "rows steps"], logprobs: Float[Tensor, "rows steps"]
    ) -> RolloutBatch:
        is_stop = torch.isin(tokens, self.stops)
        steps = tokens.shape[1]
        lengths = torch.where(is_stop.any(1), is_stop.int().argmax(1) + 1, steps).tolist()
        completions = [row[:n].tolist() for row, n in zip(tokens.cpu(), lengths, strict=True)]
        prompts = [p for p, size in zip(self.prompt_ids, self.sizes, strict=True) for _ in range(size)]
        entries = [
            self.cache.evicted_at(row, len(prompt) + n)
            for row, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
        ]
        return RolloutBatch(
            prompt_ids=self.prompt_ids,
            group_sizes=self.sizes,
            completion_ids=completions,
            sparse_logprobs=[row[:n].clone() for row, n in zip(logprobs.cpu(), lengths, strict=True)],
            shadow=ShadowMask.from_entries(entries, prompts, completions),
            temperature=self.temperature,
            kv_bytes_peak=self.cache.nbytes + self.cache.prefill_bytes,
            kv_bytes_dense=self.cache.token_bytes * self._tokens(lengths, self.cache.shares_prompts),
            kv_bytes_unshared=self.cache.token_bytes * self._tokens(lengths, shared=False),
        )

    def _tokens(self, lengths: list[int], shared: bool) -> int:
        """Tokens that a cache without eviction holds at the end, a group's prompt once or per row.

        The last token of a completion is never fed, so it is not among them.
        """
        groups = zip(self.prompt_ids, self.sizes, strict=True)
        prompts = sum(len(prompt) * (1 if shared else size) for prompt, size in groups)
        return prompts + sum(lengths) - len(lengths)


def _sequence_seeds(prompt_ids: list[list[int]], sizes: list[int], seed: int) -> tuple[list[int], list[int]]:
    """Seeds from what a sequence *is*: (seed, prompt), and (seed, prompt, number of the sample).

    A prompt that occurs again goes on counting, so its samples differ from the earlier ones.
    """
    seen: dict[tuple[int, ...], int] = {}
    prompt_seeds, seeds = [], []
    for prompt, size in zip(prompt_ids, sizes, strict=True):
        for _ in range(size):
            number = seen.get(tuple(prompt), 0)
            seen[tuple(prompt)] = number + 1
            prompt_seeds.append(_hash(seed, prompt))
            seeds.append(_hash(seed, [*prompt, -1, number]))
    return prompt_seeds, seeds


def _hash(seed: int, numbers: Sequence[int]) -> int:
    data = torch.tensor([seed, *numbers], dtype=torch.int64).numpy().tobytes()
    return int.from_bytes(hashlib.sha256(data).digest()[:7], "big")


def _noise(seeds: list[int], steps: int) -> Float[Tensor, "rows steps"]:
    """Uniform numbers in [0, 1), one stream per sequence."""
    rows = []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        rows.append(torch.rand(steps, generator=generator, dtype=torch.float64))
    return torch.stack(rows)
