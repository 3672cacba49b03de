"""The model families that we answer for, supported or refused: one row each.

``test_support.py`` holds every row to its word; ``python tests/families.py`` writes ``docs/models.md`` from
them. Sizes and weights are those of ``tiny_models``: what is tested is the architecture.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tiny_models import SLIDING_WINDOW, tiny_settings, widen_norms

PAGE = Path(__file__).parents[1] / "docs" / "models.md"
LAYERS = ["sliding_attention", "full_attention"]
ROUTED = {"num_experts_per_tok": 2, "moe_intermediate_size": 32}


@dataclass(frozen=True)
class Family:
    """A family, the class of transformers that it is, and what is special about its attention."""

    name: str
    kind: str  # <kind>ForCausalLM of a <kind>Config
    attention: str  # what its tests cover, for the page
    settings: dict[str, Any] = field(default_factory=dict)
    without: tuple[str, ...] = ()  # settings of the others that its config does not take
    refused: str = ""  # part of the refusal; empty = supported
    config: str = ""  # where it is not <kind>Config

    @property
    def class_name(self) -> str:
        return f"{self.kind}ForCausalLM"

    def make(self, dtype: torch.dtype = torch.float64, seed: int = 0) -> PreTrainedModel:
        """A fresh tiny model in eval mode; a float64 one is so throughout."""
        settings = {k: v for k, v in tiny_settings().items() if k not in self.without} | self.settings
        config = getattr(transformers, self.config or f"{self.kind}Config")(**settings)
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            model = getattr(transformers, self.class_name)(config).to(dtype).eval()
        if any("experts" in name for name, _ in model.named_modules()):
            model.set_experts_implementation("eager")
        if dtype == torch.float64:
            widen_norms(model)
        return model


ROWS = (
    Family("Llama 2, 3", "Llama", "full"),
    Family("SmolLM2", "Llama", "full, embeddings tied", {"tie_word_embeddings": True}),
    Family(
        "SmolLM3",
        "SmolLM3",
        "full, every n-th layer without positions",
        {"no_rope_layers": [1, 0], "no_rope_layer_interval": 2},
        without=("head_dim",),
    ),
    Family("Qwen2, Qwen2.5", "Qwen2", "full, biases on queries, keys and values", without=("head_dim",)),
    Family("Qwen3", "Qwen3", "full, queries and keys normed"),
    Family("Qwen3-MoE", "Qwen3Moe", "full, experts", {**ROUTED, "num_experts": 4, "mlp_only_layers": []}),
    Family("Mistral", "Mistral", "sliding window", {"sliding_window": SLIDING_WINDOW}),
    Family("Phi-3 (4k contexts)", "Phi3", "full, one projection", without=("head_dim",)),
    Family(
        "Gemma 2",
        "Gemma2",
        "sliding and full layers, softcap on attention and logits",
        {
            **{"sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 16},
            **{"attn_logit_softcapping": 2.0, "final_logit_softcapping": 4.0},
        },
    ),
    Family(
        "Gemma 3 (text)",
        "Gemma3",
        "sliding and full layers, one KV head, two rotary bases",
        {
            **{"sliding_window": SLIDING_WINDOW, "query_pre_attn_scalar": 16},
            **{"layer_types": LAYERS, "num_key_value_heads": 1},
        },
        config="Gemma3TextConfig",
    ),
    Family("OLMo 2", "Olmo2", "full, queries and keys normed over all heads", without=("head_dim",)),
    Family(
        "Granite 3",
        "Granite",
        "full, own scale of attention, residuals and logits",
        {
            **{"attention_multiplier": 0.2, "residual_multiplier": 0.5},
            **{"embedding_multiplier": 2.0, "logits_scaling": 2.0},
        },
        without=("head_dim",),
    ),
    Family("GLM-4", "Glm4", "full, rotary on half of each head", {"partial_rotary_factor": 0.5}),
    Family(
        "gpt-oss",
        "GptOss",
        "sliding and full layers, learned sink logits, experts",
        {
            **{"sliding_window": SLIDING_WINDOW, "layer_types": LAYERS, "max_position_embeddings": 256},
            **{"num_local_experts": 4, "num_experts_per_tok": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
    ),
    Family(
        "DeepSeek V2, V2-Lite",
        "DeepseekV2",
        "multi-head latent attention",
        {"kv_lora_rank": 8, "q_lora_rank": 8},
        without=("head_dim",),
        refused="multi-head latent attention (MLA) caches latents that all heads share",
    ),
    Family(
        "DeepSeek V3, R1, Kimi K2",
        "DeepseekV3",
        "multi-head latent attention",
        {"kv_lora_rank": 8, "q_lora_rank": 8, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        without=("head_dim",),
        refused="multi-head latent attention (MLA) caches latents that all heads share",
    ),
    Family(
        "Qwen3-Next",
        "Qwen3Next",
        "gated delta net between attention layers",
        {**ROUTED, "num_experts": 4},
        refused="layers of type ['linear_attention'] keep no evictable KV cache",
    ),
    Family(
        "Falcon-H1",
        "FalconH1",
        "attention and a state space side by side in each layer",
        {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8},
        refused="FalconH1ForCausalLM",
    ),
    Family(
        "Jamba",
        "Jamba",
        "state-space layers between attention layers",
        {"num_hidden_layers": 2, "attn_layer_period": 2, "attn_layer_offset": 1},
        without=("head_dim",),
        refused="JambaForCausalLM",
    ),
)
SUPPORTED = {row.name: row for row in ROWS if not row.refused}
REFUSED = {row.name: row for row in ROWS if row.refused}


def refusal(family: Family) -> str:
    """What ``prepare_model`` says of it, asked of the code."""
    from shadowmask.models import unsupported_reason

    return str(unsupported_reason(family.make(torch.float32)))


def page() -> str:
    """The text of ``docs/models.md``."""
    supported = [f"| {row.name} | `{row.class_name}` | {row.attention} |" for row in SUPPORTED.values()]
    refused = [f"| {row.name} | `{row.class_name}` | {refusal(row)} |" for row in REFUSED.values()]
    return "\n".join([HEAD, *supported, MIDDLE, *refused, TAIL])


HEAD = """<!-- Written by `python tests/families.py` from the rows that the tests run over. Do not edit. -->

# Models

Eviction works on unmodified `transformers` models that attend through its attention registry. For each
family below a tiny random model of that class is sampled with evictions, from the prompt alone and while
decoding too, and replayed by the learner in float64: log-probabilities agree to 1e-12, under the full context
they are the untouched model's own, and records shifted by one query or without evictions do not fit
(`tests/test_support.py`). Released weights were not loaded for this.

| family | class | attention that the test covers |
|---|---|---|"""
MIDDLE = """
Refused, with this reason in one line, before anything is sampled:

| family | class | reason |
|---|---|---|"""
TAIL = """
Refused in any family: active dropout, jitter in routing, dynamic and longrope rotary embeddings,
bidirectional attention, encoder-decoders, multimodal wrappers (load the text model), several uses of
attention in one layer, masks of a model's own. The slow test `tests/invariants/test_families.py` builds every
causal language model that `transformers` knows and demands that it is exact or refused.
"""


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
