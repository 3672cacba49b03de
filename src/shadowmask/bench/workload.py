"""What is measured on: a model shape, random prompts of an exact length, completions of a fixed length."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

# SmolLM2-135M's shape; weights are random, which costs the same as trained ones
SHAPES: dict[str, dict[str, int]] = {
    "135m": {
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "vocab_size": 49152,
    },
    # a fifth of it: sweeps with a point every few seconds
    "30m": {
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_hidden_layers": 12,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "vocab_size": 16384,
    },
    "tiny": {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 512,
    },
}
# what `bench scaling` goes through, each with the rest of the workload as it is
SWEEPS: dict[str, tuple[float, ...]] = {
    "prompt_length": (256, 512, 1024, 2048, 4096, 8192),
    "group_size": (2, 4, 8, 16, 32),
    "compression_ratio": (0.0, 0.25, 0.5, 0.75, 0.9),
}
EOS = 0  # one token of the vocabulary: with random weights it is hardly ever sampled


@dataclass(frozen=True)
class Workload:
    """One setting of a measurement; all lengths in tokens."""

    shape: str = "135m"
    prompts: int = 1
    prompt_length: int = 1024
    completion_length: int = 64
    group_size: int = 8
    compression_ratio: float = 0.5
    seed: int = 0

    @property
    def rho(self) -> float:
        """Learner tokens without prompt sharing over those with it: G (P + C) / (P + G C)."""
        group, prompt, completion = self.group_size, self.prompt_length, self.completion_length
        return group * (prompt + completion) / (prompt + group * completion)


def make_model(shape: str) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        **SHAPES[shape],
        max_position_embeddings=16384,
        tie_word_embeddings=True,
        eos_token_id=EOS,
        pad_token_id=1,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def make_prompts(workload: Workload) -> list[list[int]]:
    generator = torch.Generator().manual_seed(workload.seed)
    vocab = SHAPES[workload.shape]["vocab_size"]
    shape = (workload.prompts, workload.prompt_length)
    return torch.randint(2, vocab, shape, generator=generator).tolist()


def make_tokenizer(shape: str) -> PreTrainedTokenizerFast:
    """One token per word ``t<n>``: text of an exact number of tokens, as a text-based trainer needs."""
    vocab = {f"t{n}": n for n in range(SHAPES[shape]["vocab_size"])}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="t0", pad_token="t1")


def prompt_texts(workload: Workload) -> list[str]:
    return [" ".join(f"t{token}" for token in prompt) for prompt in make_prompts(workload)]


def varied_reward(completions: list[str], **_: Any) -> list[float]:
    """Differs within every group, so that every completion has an advantage."""
    return [float(n % 3) for n in range(len(completions))]
