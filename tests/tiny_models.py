"""Tiny random models of every supported kind, prompts that are ragged, and evictors that bite.

Vocabulary 64, two or three layers, head_dim 16. Weights are drawn wide enough (``initializer_range``)
for attention to be far from uniform, so that hiding a key changes the output visibly.
"""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from shadowmask import RolloutBatch, RolloutEngine, get_evictor, prepare_model
from shadowmask.eviction import EVICTORS, Evictor

EOS = 1
# EOS and two more, so that in every family some completions stop early and some do not
STOPS = (EOS, 2, 3)
VOCAB = 64
SLIDING_WINDOW = 12

BUDGET = 12
NUM_SINKS = 2
RECENT_WINDOW = 4
TINY_SETTINGS = {"observation_window": 4, "lag_size": 3}  # given to the evictors that take them
MAX_NEW_TOKENS = 24
GROUP = 3
SEED = 3
PROMPT_LENGTHS = (30, 17, 7, 1)  # above the budget twice, below it, and the shortest possible

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "initializer_range": 0.15,
    "eos_token_id": EOS,
    "pad_token_id": 0,
    "bos_token_id": None,
}


def tiny_settings() -> dict[str, Any]:
    """What the configs of all tiny models have in common."""
    return dict(_COMMON)


def _llama(kv_heads: int) -> Callable[[], PreTrainedModel]:
    return lambda: LlamaForCausalLM(LlamaConfig(**_COMMON | {"num_key_value_heads": kv_heads}))


def _qwen3() -> PreTrainedModel:
    return Qwen3ForCausalLM(Qwen3Config(**_COMMON))


def _gemma2() -> PreTrainedModel:
    # caps low enough to bend most logits; layers alternate between sliding and full
    config = Gemma2Config(
        **_COMMON,
        sliding_window=SLIDING_WINDOW,
        attn_logit_softcapping=2.0,
        final_logit_softcapping=4.0,
        query_pre_attn_scalar=16,
    )
    return Gemma2ForCausalLM(config)


def _gemma3() -> PreTrainedModel:
    config = Gemma3TextConfig(
        **_COMMON | {"num_hidden_layers": 3},
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"],
        query_pre_attn_scalar=16,
    )
    return Gemma3ForCausalLM(config)


def _mistral() -> PreTrainedModel:
    return MistralForCausalLM(MistralConfig(**_COMMON, sliding_window=SLIDING_WINDOW))


def _qwen3_moe() -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **_COMMON, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2, mlp_only_layers=[]
    )
    return Qwen3MoeForCausalLM._from_config(config, experts_implementation="eager")


def _gpt_oss() -> PreTrainedModel:
    config = GptOssConfig(
        **_COMMON,
        sliding_window=SLIDING_WINDOW,
        layer_types=["sliding_attention", "full_attention"],
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    return GptOssForCausalLM._from_config(config, experts_implementation="eager")


FAMILIES: dict[str, Callable[[], PreTrainedModel]] = {
    "llama-mha": _llama(4),
    "llama-gqa": _llama(2),
    "llama-mqa": _llama(1),
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "mistral-sliding": _mistral,
    "qwen3-moe": _qwen3_moe,
}
# sinks in the softmax: run where attention and its gradient are tested, not in every invariant
WITH_SINKS: dict[str, Callable[[], PreTrainedModel]] = {"gpt-oss": _gpt_oss}
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16}


def make_model(
    family: str = "llama-gqa", dtype: torch.dtype = torch.float64, seed: int = 0
) -> PreTrainedModel:
    """A fresh model in eval mode. float64 models are float64 throughout, see ``widen_norms``."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = (FAMILIES | WITH_SINKS)[family]().to(dtype).eval()
    if dtype == torch.float64:
        widen_norms(model)
    return model


def make_learner(family: str = "llama-gqa", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A fresh model with our attention installed, as ``smd_loss`` and the scoring functions want it."""
    return prepare_model(make_model(family, dtype))


def shared_model(family: str = "llama-gqa", dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A learner made once per test process: for tests that change neither weights nor gradients."""
    return _shared_model(family, dtype)


def shared_rollout(
    family: str = "llama-gqa",
    dtype: torch.dtype = torch.float64,
    evictor: str = "snapkv",
    evict_every: int | None = None,
) -> RolloutBatch:
    """The ragged rollout of a shared model, made once."""
    return _shared_rollout(family, dtype, evictor, evict_every)


# the caches see positional arguments only: a default and the same value given are one key
@functools.cache
def _shared_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    return make_learner(family, dtype).requires_grad_(False)


@functools.cache
def _shared_rollout(family: str, dtype: torch.dtype, evictor: str, evict_every: int | None) -> RolloutBatch:
    return rollout(_shared_model(family, dtype), evictor, evict_every)


def widen_norms(model: nn.Module) -> None:
    """Take out the cast to float32 inside RMSNorm.

    transformers normalises in float32 whatever the model's dtype. In a float64 model that rounds small
    differences away, and a parity test sees exact zeros where it should see 1e-15.
    """
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = types.MethodType(_wide_norm, module)


def _wide_norm(self: nn.Module, hidden: Tensor) -> Tensor:
    gemma = type(self).__name__.startswith("Gemma")
    eps = self.eps if gemma else self.variance_epsilon
    normed = hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True) + eps)
    return normed * (1 + self.weight if gemma else self.weight)


def make_prompts(lengths: tuple[int, ...] = PROMPT_LENGTHS, seed: int = 1) -> list[list[int]]:
    """Random prompts without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in lengths]


def make_evictor(name: str, budget: int = BUDGET, **settings: Any) -> Evictor:
    """Any registered evictor, set so that it evicts in the tiny rollouts."""
    if name == "dense":
        return get_evictor("dense")
    takes = inspect.signature(EVICTORS[name]).parameters
    tiny = {setting: size for setting, size in TINY_SETTINGS.items() if setting in takes}
    settings = {"num_sinks": NUM_SINKS, "recent_window": RECENT_WINDOW} | tiny | settings
    return get_evictor(name, budget=budget, **settings)


def layer_budgets(name: str, prompt: int, evict_every: int | None, layers: int = 2) -> list[int]:
    """Keys that stay per KV head in each layer of a tiny rollout, for a prompt of that many tokens."""
    longest = prompt if evict_every is None else prompt + MAX_NEW_TOKENS
    return list(make_evictor(name).layer_budgets(BUDGET, longest, layers)) or [BUDGET] * layers


def rollout(
    model: PreTrainedModel,
    evictor: str | Evictor = "snapkv",
    evict_every: int | None = None,
    prompts: list[list[int]] | None = None,
    **settings: Any,
) -> RolloutBatch:
    """A ragged rollout under eviction."""
    if isinstance(evictor, str):
        evictor = make_evictor(evictor)
    settings = {
        "group_size": GROUP,
        "max_new_tokens": MAX_NEW_TOKENS,
        "seed": SEED,
        "stop_token_ids": STOPS,
    } | settings
    engine = RolloutEngine(model, None, evictor, evict_every)
    return engine.generate(prompts or make_prompts(), **settings)
