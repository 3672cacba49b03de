"""Every causal model of transformers is replayed exactly or refused; none is silently wrong.

Slow: builds a tiny model of each family in the registry.
"""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from shadowmask import (
    RecordError,
    RolloutEngine,
    UnsupportedModelError,
    dense_logprobs,
    get_evictor,
    prepare_model,
    shadow_logprobs,
)
from tiny_models import make_prompts
from tolerances import FLOAT32

LARGEST = 30_000_000  # parameters; what our settings cannot shrink is left out
# Under any of the names by which configs call these quantities.
SETTINGS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "n_inner"), 96),
    **dict.fromkeys(("num_hidden_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_head", "num_heads"), 4),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 256),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("attention_dropout", "hidden_dropout", "resid_pdrop", "embd_pdrop"), 0.0),
    **dict.fromkeys(("attn_pdrop", "dropout", "attention_dropout_rate", "hidden_dropout_prob"), 0.0),
    **dict.fromkeys(("attention_probs_dropout_prob", "residual_dropout", "embedding_dropout"), 0.0),
    **dict.fromkeys(("activation_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0),
    "vocab_size": 64,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rotary_dim": 8,
    "initializer_range": 0.15,
    "eos_token_id": 1,
    "pad_token_id": 0,
    "bos_token_id": 2,
    "sliding_window": 12,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "is_decoder": True,
}
# Accepted and exact when this was written; a change of transformers or of ours that drops one is noticed.
MUST_WORK = {
    "LlamaConfig", "Qwen2Config", "Qwen2MoeConfig", "Qwen3Config", "Qwen3MoeConfig", "MistralConfig",
    "MixtralConfig", "GemmaConfig", "Gemma2Config", "Gemma3TextConfig", "PhiConfig", "Phi3Config",
    "OlmoConfig", "Olmo2Config", "Olmo3Config", "OlmoeConfig", "CohereConfig", "Cohere2Config",
    "GraniteConfig", "GraniteMoeConfig", "GlmConfig", "Glm4Config", "Glm4MoeConfig", "GPT2Config",
    "GPTNeoXConfig", "SmolLM3Config", "Starcoder2Config", "HeliumConfig", "ArceeConfig", "SeedOssConfig",
    "Ernie4_5Config", "Exaone4Config", "HunYuanDenseV1Config", "ApertusConfig", "NanoChatConfig",
}  # fmt: skip


def tiny(config_class: type, model_class: type) -> Any:
    """A tiny float32 model of that family, or None if our settings do not fit it."""
    try:
        default = config_class()
        config = config_class(**{k: v for k, v in SETTINGS.items() if hasattr(default, k)})
        with torch.device("meta"):
            size = sum(p.numel() for p in model_class(config).parameters())
        if config.is_encoder_decoder or config.get_text_config() is not config or size > LARGEST:
            return None
        torch.manual_seed(0)
        model = model_class(config).float().eval()
    except Exception:  # every family has its own way of disliking a setting
        return None
    if any("experts" in name for name, _ in model.named_modules()):
        model.set_experts_implementation("eager")
    return model


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("config_class", MODEL_FOR_CAUSAL_LM_MAPPING, ids=lambda c: c.__name__)
def test_exact_or_refused(config_class: type) -> None:
    warnings.simplefilter("ignore")
    model_class = MODEL_FOR_CAUSAL_LM_MAPPING[config_class]
    if isinstance(model_class, tuple):
        model_class = model_class[0]
    model = tiny(config_class, model_class)
    required = config_class.__name__ in MUST_WORK
    if model is None:
        assert not required
        pytest.skip("no tiny model of it")
    untouched = copy.deepcopy(model)
    try:
        prepare_model(model)
        evictor = get_evictor("snapkv", budget=12, num_sinks=2, observation_window=4)
        engine = RolloutEngine(model, None, evictor, evict_every=5)
        batch = engine.generate(
            make_prompts((30, 9)), group_size=2, max_new_tokens=20, seed=3, stop_token_ids=[]
        )
    except (UnsupportedModelError, RecordError) as error:
        assert not required, error
        return
    assert batch.shadow.retained_fraction() < 1
    with torch.no_grad():
        shadow, dense = shadow_logprobs(model, batch), dense_logprobs(model, batch)
        tokens = batch.prompt_ids[0] + batch.completion_ids[0]
        logits = untouched(torch.tensor([tokens])).logits[0, len(batch.prompt_ids[0]) - 1 : -1]
    own = logits.float().log_softmax(-1).gather(1, torch.tensor(batch.completion_ids[0])[:, None])[:, 0]
    gap = (torch.cat(shadow) - torch.cat(batch.sparse_logprobs)).abs().max()
    assert float(gap) <= FLOAT32, "sampler and learner disagree"
    assert float((dense[0] - own).abs().max()) <= FLOAT32, "sampler and learner agree on another model"
