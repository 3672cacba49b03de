"""A tiny random model with a character tokenizer, saved the way the demo model is."""

import string

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from shadowmask.demo.model import save

CHARACTERS = ["<eos>", "?", *string.ascii_letters, *string.digits, *" .,:\n"]


@pytest.fixture
def tokenizer():
    vocabulary = {character: i for i, character in enumerate(CHARACTERS)}
    characters = Tokenizer(models.WordLevel(vocabulary, unk_token="?"))
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", pad_token="<eos>", unk_token="?"
    )


@pytest.fixture
def tiny_model():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(CHARACTERS),
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            max_position_embeddings=1024,
            eos_token_id=0,
            pad_token_id=0,
        )
    )


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty artifact cache of this test's own."""
    root = tmp_path / "cache"
    monkeypatch.setenv("SHADOWMASK_CACHE", str(root))
    return root


@pytest.fixture
def saved_model(tiny_model, tokenizer, tmp_path):
    directory = tmp_path / "tiny"
    save(tiny_model, tokenizer, directory)
    return directory
