"""Which models are accepted, which are refused and why, and what is read off them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from shadowmask import RecordError, RolloutEngine, UnsupportedModelError, prepare_model, shadow_logprobs
from shadowmask.models import base_model, num_layers, output_head, unsupported_reason
from tiny_models import (
    FAMILIES,
    VOCAB,
    WITH_SINKS,
    make_evictor,
    make_learner,
    make_model,
    make_prompts,
    rollout,
    shared_rollout,
)
from tolerances import FLOAT32, FLOAT64

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "eos_token_id": 1,
    "pad_token_id": 0,
}


def build(name: str, **config: Any) -> transformers.PreTrainedModel:
    """``build("Llama", ...)``: LlamaForCausalLM of a LlamaConfig, on the meta device."""
    settings = getattr(transformers, f"{name}Config")(**config)
    with torch.device("meta"):
        return getattr(transformers, f"{name}ForCausalLM")(settings)


def without(*keys: str) -> dict[str, Any]:
    return {key: value for key, value in SMALL.items() if key not in keys}


def t5() -> transformers.PreTrainedModel:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "vocab_size": VOCAB}
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes))


def gpt2(**config: Any) -> transformers.PreTrainedModel:
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": VOCAB, "eos_token_id": 1}
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes | config))


def build_gemma3(**config: Any) -> transformers.PreTrainedModel:
    with torch.device("meta"):
        return transformers.Gemma3ForCausalLM(transformers.Gemma3TextConfig(**SMALL, **config))


def rope(kind: str) -> dict[str, Any]:
    rest = {"factor": 2.0, "rope_theta": 10000.0, "original_max_position_embeddings": 64}
    if kind == "longrope":
        rest |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    return {"rope_parameters": {"rope_type": kind, **rest}}


REFUSED = {
    "encoder-decoder": (t5, "T5ForConditionalGeneration is not supported: it is an encoder-decoder"),
    "hybrid": (
        lambda: build("Lfm2", **without("head_dim"), layer_types=["conv", "full_attention"]),
        r"Lfm2ForCausalLM .* layers of type \['conv'\] keep no evictable KV cache",
    ),
    "linear attention": (
        lambda: build("Qwen3Next", **SMALL, num_experts=2, num_experts_per_tok=1, moe_intermediate_size=16),
        r"layers of type \['linear_attention'\]",
    ),
    "latent attention": (
        lambda: build("DeepseekV2", **without("head_dim"), kv_lora_rank=8, q_lora_rank=8),
        r"multi-head latent attention \(MLA\)",
    ),
    "sinks of a family that was not tried": (
        lambda: build("GraniteSWA", **without("head_dim")),
        "it has attention sinks as parameters",
    ),
    "state space": (
        lambda: build("Mamba", vocab_size=VOCAB, hidden_size=32, num_hidden_layers=1, state_size=4),
        "MambaForCausalLM is not supported",
    ),
    "dropout in attention": (lambda: build("Llama", **SMALL, attention_dropout=0.1), "attention_dropout=0.1"),
    "dropout elsewhere": (
        lambda: gpt2(attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.2),
        r"dropout is active in transformer\.h\.0",
    ),
    "dynamic rope": (lambda: build("Llama", **SMALL, **rope("dynamic")), r"rotary embedding \['dynamic'\]"),
    "long rope": (lambda: build("Llama", **SMALL, **rope("longrope")), r"rotary embedding \['longrope'\]"),
    "bidirectional": (
        lambda: build_gemma3(use_bidirectional_attention=True),
        "its attention is not causal",
    ),
    "random routing": (
        lambda: build("Phimoe", **without("head_dim"), num_local_experts=2, num_experts_per_tok=1),
        "its experts are drawn at random",
    ),
    "jitter in routing": (
        lambda: build("Mixtral", **SMALL, num_local_experts=2, router_jitter_noise=0.1),
        "router_jitter_noise=0.1",
    ),
    "head with a transform": (
        lambda: build("ModernBertDecoder", **without("head_dim", "num_key_value_heads"), bos_token_id=2),
        r"its output head is more than one projection \(lm_head\.dense\.weight\)",
    ),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_replayed_is_refused_by_name(kind: str) -> None:
    make, message = REFUSED[kind]
    model = make()
    with pytest.raises(UnsupportedModelError, match=message) as caught:
        prepare_model(model)
    assert type(model).__name__ in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(UnsupportedModelError):
        RolloutEngine(model, None, make_evictor("recent"))


@pytest.mark.parametrize("family", FAMILIES)
def test_supported_families_are_accepted(family: str) -> None:
    assert unsupported_reason(make_model(family)) is None


def test_linear_rope_scaling_is_accepted() -> None:
    assert unsupported_reason(build("Llama", **SMALL, **rope("linear"))) is None


@pytest.mark.parametrize("family", [*FAMILIES, *WITH_SINKS])
def test_a_prepared_model_computes_what_it_did(family: str) -> None:
    """Without a session it is the plain model: with padding, with a cache, and when it generates."""
    model = make_model(family, torch.float32)
    ids = torch.tensor(make_prompts((20,)))
    padded = torch.cat([torch.zeros(1, 5, dtype=torch.int64), ids], dim=1)
    mask = (torch.arange(25) >= 5).long()[None]

    def outputs() -> list[torch.Tensor]:
        with torch.no_grad():
            greedy = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(ids)}
            return [
                model(ids).logits,
                model(padded, attention_mask=mask).logits[:, 5:],
                model.generate(ids, **greedy),
            ]

    before = outputs()
    prepare_model(model)
    for old, new in zip(before, outputs(), strict=True):
        assert float((old - new).abs().max()) <= FLOAT32


@pytest.mark.parametrize("family", FAMILIES)
def test_the_head_we_apply_is_the_models_own(family: str) -> None:
    """Scale and softcap included: hidden states through ``output_head`` give the model's logits."""
    model = make_model(family)
    ids = torch.tensor(make_prompts((9,)))
    head = output_head(model)
    with torch.no_grad():
        hidden = model.base_model(ids).last_hidden_state
        logits = hidden @ head.weight.T * head.scale
        if head.softcap is not None:
            logits = head.softcap * torch.tanh(logits / head.softcap)
        assert float((logits - model(ids).logits).abs().max()) <= FLOAT64


@pytest.mark.parametrize(
    ("name", "settings"), [("Cohere", {"logit_scale": 0.3}), ("Granite", {"logits_scaling": 4.0})]
)
def test_scaled_logits(name: str, settings: dict[str, float]) -> None:
    keys = without("head_dim")
    model = getattr(transformers, f"{name}ForCausalLM")(
        getattr(transformers, f"{name}Config")(**keys, **settings)
    )
    head = output_head(model)
    ids = torch.tensor(make_prompts((9,)))
    with torch.no_grad():
        logits = model.base_model(ids).last_hidden_state @ head.weight.T * head.scale
        assert float((logits - model(ids).logits).abs().max()) <= FLOAT32
    assert head.scale != 1.0


def test_peft_and_parallel_wrappers_are_seen_through() -> None:
    model = make_model(dtype=torch.float32)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules="all-linear"))
    assert base_model(wrapped) is model and num_layers(wrapped) == 2
    assert prepare_model(wrapped) is wrapped
    assert base_model(torch.nn.DataParallel(model)) is model


def test_a_lora_on_the_head_is_refused() -> None:
    model = get_peft_model(make_model(dtype=torch.float32), LoraConfig(r=2, target_modules=["lm_head"]))
    with pytest.raises(UnsupportedModelError, match="not a plain Linear"):
        output_head(model)


def test_active_lora_dropout_is_refused() -> None:
    lora = LoraConfig(r=2, target_modules="all-linear", lora_dropout=0.1)
    model = get_peft_model(make_model(dtype=torch.float32), lora)
    with pytest.raises(UnsupportedModelError, match="dropout is active"):
        prepare_model(model)


def test_differential_attention_is_one_clear_error() -> None:
    """DiffLlama asks for attention twice per layer; nothing is sampled from it."""
    model = transformers.DiffLlamaForCausalLM(transformers.DiffLlamaConfig(**SMALL)).eval()
    with pytest.raises((RecordError, UnsupportedModelError), match=r"more than once|not supported"):
        engine = RolloutEngine(model, None, make_evictor("recent"))
        engine.generate(make_prompts((5,)), max_new_tokens=3)


def test_a_mask_of_the_models_own_is_one_clear_error() -> None:
    """Doge hides keys by a learned rule of its own; a record does not know about it."""
    config = transformers.DogeConfig(**without("head_dim"), keep_window_size=4)
    engine = RolloutEngine(transformers.DogeForCausalLM(config).eval(), None, make_evictor("recent"))
    with pytest.raises(RecordError, match="makes an attention mask of its own"):
        engine.generate(make_prompts((9,)), max_new_tokens=3)


def test_a_model_without_our_attention_is_told_to_prepare() -> None:
    with pytest.raises(RecordError, match="prepare_model"):
        shadow_logprobs(make_model(), shared_rollout())
    shadow_logprobs(make_learner(), shared_rollout())


def test_kv_heads_are_counted_where_they_attend_not_in_the_config() -> None:
    """JetMoe repeats its keys per expert: four KV heads attend where the config says two."""
    config = transformers.JetMoeConfig(
        **without("num_attention_heads", "head_dim"), kv_channels=16, num_local_experts=4
    )
    model = transformers.JetMoeForCausalLM._from_config(config, experts_implementation="eager").eval()
    batch = rollout(model, "recent", 5, make_prompts((20, 3)), max_new_tokens=8)
    assert batch.shadow.num_kv_heads != config.num_key_value_heads
    with torch.no_grad():
        gap = torch.cat(shadow_logprobs(model, batch)) - torch.cat(batch.sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT32
