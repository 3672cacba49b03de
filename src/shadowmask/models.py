"""Which models the mechanism is exact for, and the few facts about a model that it needs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformers import PretrainedConfig, PreTrainedModel

from shadowmask.attention.interface import install

ModelT = TypeVar("ModelT", bound=nn.Module)

_KNOWN_SINKS = {"gpt_oss"}  # hands them to the attention function, one logit per query head
_SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}


class UnsupportedModelError(ValueError):
    """The model attends in a way that a shadow mask cannot replay exactly."""


@dataclass(frozen=True)
class OutputHead:
    """The projection from hidden states to logits, with what a family does to logits afterwards."""

    weight: Float[Tensor, "vocab hidden"]
    bias: Float[Tensor, " vocab"] | None
    scale: float = 1.0
    softcap: float | None = None


def prepare_model(model: ModelT) -> ModelT:
    """Check that eviction can be replayed exactly in this model and install our attention.

    Accepts a PEFT model too (its base model is prepared). The model is otherwise unchanged: called
    without a session it computes what it computed before.

    Raises:
        UnsupportedModelError: names the model class and what is not supported.
    """
    base = base_model(model)
    reason = unsupported_reason(base)
    if reason:
        raise UnsupportedModelError(f"{type(base).__name__} is not supported: {reason}")
    install(base)
    return model


def unsupported_reason(model: PreTrainedModel) -> str | None:
    """Why a model is refused, or ``None``. Looks at its config and modules, runs nothing."""
    config = model.config.get_text_config()
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    if model.config.is_encoder_decoder:
        return "it is an encoder-decoder"
    if model.config is not config:
        return "it is a multimodal model; load its text model instead"
    if layer_types - _SUPPORTED_LAYERS:
        return f"layers of type {sorted(layer_types - _SUPPORTED_LAYERS)} keep no evictable KV cache"
    if getattr(config, "kv_lora_rank", None):
        return "multi-head latent attention (MLA) caches latents that all heads share"
    if getattr(config, "num_kv_shared_layers", 0):
        return "some layers reuse the keys of other layers"
    if config.model_type == "phimoe":
        return "in training its experts are drawn at random, and its attention is not told its window"
    if getattr(config, "use_bidirectional_attention", False):
        return "its attention is not causal"
    if config.model_type not in _KNOWN_SINKS and _has_sinks(model):
        return "it has attention sinks as parameters, which were tried with gpt-oss only"
    if not model._supports_attention_backend:
        return "it does not take attention functions from the registry"
    extra = _parameters_behind_decoder(model)
    if extra:
        return f"its output head is more than one projection ({extra[0]})"
    return _unsupported_setting(model, config)


def _has_sinks(model: PreTrainedModel) -> bool:
    return any(name.rsplit(".", 1)[-1] == "sinks" for name, _ in model.named_parameters())


def _parameters_behind_decoder(model: PreTrainedModel) -> list[str]:
    """Parameters that are neither the decoder's nor the last projection's.

    We take hidden states from the decoder and project them ourselves, so such a layer would be left out
    by sampler and learner alike: they would agree with each other and not with the model (BERT's family,
    ModernBERT's decoder).
    """
    known = {id(p) for p in decoder(model).parameters()}
    head = model.get_output_embeddings()
    known |= {id(p) for p in head.parameters()} if head is not None else set()
    return [name for name, p in model.named_parameters() if id(p) not in known]


def _unsupported_setting(model: PreTrainedModel, config: PretrainedConfig) -> str | None:
    dropout = getattr(config, "attention_dropout", 0.0) or 0.0
    if dropout:
        return f"attention_dropout={dropout} makes sampler and learner differ; set it to 0"
    active = [name for name, m in model.named_modules() if isinstance(m, nn.Dropout) and m.p > 0]
    if active:
        return f"dropout is active in {active[0]}; set it to 0"
    for jitter in ("router_jitter_noise", "input_jitter_noise"):
        if getattr(config, jitter, 0.0):
            return f"{jitter}={getattr(config, jitter)} makes sampler and learner differ; set it to 0"
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {rope.get("rope_type")} | {r.get("rope_type") for r in rope.values() if isinstance(r, dict)}
    if kinds & {"dynamic", "longrope"}:
        return (
            f"rotary embedding {sorted(k for k in kinds if k)} changes with the length seen so far, so "
            "cached keys and replayed keys would differ"
        )
    return None


def base_model(model: nn.Module) -> PreTrainedModel:
    """The causal language model itself, out of PEFT and parallel wrappers."""
    unwrapped: Any = model
    while hasattr(unwrapped, "module"):  # DataParallel, DistributedDataParallel
        unwrapped = unwrapped.module
    if hasattr(unwrapped, "get_base_model"):
        unwrapped = unwrapped.get_base_model()
    return unwrapped


def decoder(model: nn.Module) -> nn.Module:
    """The part that maps tokens to hidden states."""
    return base_model(model).base_model


def num_layers(model: nn.Module) -> int:
    return base_model(model).config.get_text_config().num_hidden_layers


def output_head(model: nn.Module) -> OutputHead:
    """Weight, bias, scale and softcap of the language-model head, by family."""
    base = base_model(model)
    config = base.config.get_text_config()
    head = base.get_output_embeddings()
    if not isinstance(head, nn.Linear):
        raise UnsupportedModelError(
            f"{type(base).__name__}: its output head is a {type(head).__name__}, not a plain Linear "
            "(a LoRA on lm_head is not supported)"
        )
    scale = getattr(config, "logit_scale", None)  # Cohere multiplies
    scaling = getattr(config, "logits_scaling", None)  # Granite divides
    if scale is None:
        scale = 1.0 if scaling is None else 1.0 / scaling
    return OutputHead(head.weight, head.bias, float(scale), getattr(config, "final_logit_softcapping", None))


def wide_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32 or wider: what log-probabilities and losses are computed in."""
    return torch.promote_types(dtype, torch.float32)
