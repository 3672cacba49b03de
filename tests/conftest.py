"""Shared fixtures. Models, prompts and evictors are in ``tiny_models``, tolerances in ``tolerances``."""

from __future__ import annotations

import os

# every model and data set of the tests is made on the spot; a download is a bug
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
import torch


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)
