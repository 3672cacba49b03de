"""Sampling with an evicted KV cache: prefill once per prompt -> evict -> fan out -> decode.

``RolloutEngine`` checks what it is given and plans the memory; ``sampler`` does the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from shadowmask.attention.interface import run_decoder
from shadowmask.attention.sampling import ShapeSession
from shadowmask.cache import CachePlan, KVCache, OwnedSlotCache, PromptInfo, SharedPromptCache
from shadowmask.eviction.base import Evictor
from shadowmask.models import base_model, decoder, num_layers, output_head, prepare_model
from shadowmask.planning import fit_memory, plan_cache
from shadowmask.record import NEVER, ShadowMask
from shadowmask.sampler import Forward, Prompt, Sampler, SamplingSettings, sequence_seeds

COMPILE_FROM = 256  # new tokens from which compiling a decode step pays, on devices where it does


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
    kv_bytes_dense: int  # most that the same sequences need in the same layout with nothing evicted
    kv_bytes_unshared: int  # the same with every completion holding a prompt of its own, as generate does
    rows: int  # sequences that decoded at one time

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
        kv_memory_limit: bytes that keys and values may take, the one full layer of a prompt included.
            Sequences that do not fit wait until others are finished. ``None``: all decode together.
        compile: compile the decode step with ``torch.compile``. ``"auto"`` does so where it pays: on CUDA,
            for completions of 256 tokens and more.

    Raises:
        UnsupportedModelError: eviction could not be replayed exactly in this model.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        evictor: Evictor,
        evict_every: int | None = None,
        kv_memory_limit: int | None = None,
        compile: bool | str = "auto",
    ) -> None:
        if evict_every is not None and evict_every < 1:
            raise ValueError(f"evict_every={evict_every} must be at least 1, or None for prompts only")
        if compile not in (True, False, "auto"):
            raise ValueError(f"compile={compile!r} must be True, False or 'auto'")
        if kv_memory_limit is not None and kv_memory_limit < 1:
            raise ValueError(f"kv_memory_limit={kv_memory_limit} must be a positive number of bytes, or None")
        self.model = prepare_model(model)
        self.tokenizer = tokenizer
        self.evictor = evictor
        self.evict_every = evict_every
        self.kv_memory_limit = kv_memory_limit
        self.compile = compile
        self.compile_backend = "inductor"
        self._compiled: Forward | None = None

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
                changed support the learner could not replay; a ``kv_memory_limit`` below one sequence.
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
        settings = SamplingSettings(
            max_new_tokens=max_new_tokens,
            temperature=1.0 if temperature == 0 else temperature,
            greedy=temperature == 0,
            stops=stops,
            evict_every=self.evict_every,
            static_shapes=self._compiles(max_new_tokens),
        )
        sampler = self._make_sampler(self._distinct(prompt_ids, sizes, seed, max_new_tokens), settings)
        return _collect(sampler, prompt_ids, sizes)

    def _distinct(
        self, prompt_ids: list[list[int]], sizes: list[int], seed: int, max_new_tokens: int
    ) -> list[Prompt]:
        """Every distinct prompt once. One that occurs again goes on counting its samples."""
        numbers: dict[tuple[int, ...], list[int]] = {}
        start = 0
        for ids, size in zip(prompt_ids, sizes, strict=True):
            numbers.setdefault(tuple(ids), []).extend(range(start, start + size))
            start += size
        prompts = []
        for prompt, mine in numbers.items():
            ids = list(prompt)
            of_prompt, of_samples = sequence_seeds(seed, ids, len(mine))
            info = self._info(len(ids), of_prompt, max_new_tokens)
            prompts.append(Prompt(ids, info, of_samples, mine))
        return prompts

    def _info(self, length: int, seed: int, max_new_tokens: int) -> PromptInfo:
        budget = self.evictor.budget_for(length)
        if budget is None:
            return PromptInfo(length, NEVER, seed)
        longest = length if self.evict_every is None else length + max_new_tokens
        layers = num_layers(self.model)
        return PromptInfo(length, budget, seed, self.evictor.layer_budgets(budget, longest, layers))

    def _make_sampler(self, prompts: list[Prompt], settings: SamplingSettings) -> Sampler:
        head = output_head(self.model)
        plan = self._plan([p.info for p in prompts], [len(p.seeds) for p in prompts], settings)
        return Sampler(
            decoder=decoder(self.model),
            head=head,
            num_layers=num_layers(self.model),
            cache=self._cache_type(plan, self.evictor, head.weight.device),
            prompts=prompts,
            settings=settings,
            forward=self._forward(settings.static_shapes),
        )

    @property
    def _cache_type(self) -> type[KVCache]:
        return SharedPromptCache if self.evict_every is None else OwnedSlotCache

    def _plan(self, prompts: list[PromptInfo], sizes: list[int], settings: SamplingSettings) -> CachePlan:
        plan = plan_cache(self.evictor, self.evict_every, prompts, sizes, settings.max_new_tokens)
        if self.kv_memory_limit is None:
            return plan
        bytes_of_layer = self.bytes_of_layer()
        return fit_memory(plan, sizes, self._cache_type, bytes_of_layer, self.kv_memory_limit)

    @torch.no_grad()
    def bytes_of_layer(self) -> list[int]:
        """Keys and values of one token in each layer, found by running one token."""
        session = ShapeSession()
        token = torch.zeros(1, 1, dtype=torch.int64, device=output_head(self.model).weight.device)
        run_decoder(decoder(self.model), token, token, session, num_layers(self.model))
        return list(session.bytes_of_layer.values())

    def _compiles(self, max_new_tokens: int) -> bool:
        if self.compile == "auto":
            on_cuda = output_head(self.model).weight.device.type == "cuda"
            return on_cuda and max_new_tokens >= COMPILE_FROM
        return bool(self.compile)

    def _forward(self, compiled: bool) -> Forward:
        if not compiled:
            return run_decoder
        if self._compiled is None:
            self._compiled = torch.compile(
                run_decoder, fullgraph=True, dynamic=False, backend=self.compile_backend
            )
        return self._compiled

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


def _collect(sampler: Sampler, prompt_ids: list[list[int]], sizes: list[int]) -> RolloutBatch:
    done = sampler.run()
    cache, held = sampler.cache, sampler.tokens_held
    held_bytes = {
        "kv_bytes_peak": cache.nbytes + cache.prefill_bytes,
        "kv_bytes_dense": cache.token_bytes * (held.most_once if cache.shares_prompts else held.most_per_row),
        "kv_bytes_unshared": cache.token_bytes * held.most_per_row,
        "rows": cache.plan.rows,
    }
    del cache, sampler.cache  # makes room before the records are joined
    completions = [sampled.completion_ids for sampled in done]
    prompts = [ids for ids, size in zip(prompt_ids, sizes, strict=True) for _ in range(size)]
    return RolloutBatch(
        prompt_ids=prompt_ids,
        group_sizes=sizes,
        completion_ids=completions,
        sparse_logprobs=[sampled.logprobs for sampled in done],
        shadow=ShadowMask.from_entries([sampled.evicted_at for sampled in done], prompts, completions),
        temperature=sampler.settings.temperature,
        **held_bytes,
    )
