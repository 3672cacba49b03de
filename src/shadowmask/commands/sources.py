"""What ``--model`` may be: the bundled model, a model's folder, a hub name, a training run's folder."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn

from shadowmask.commands.errors import UserError
from shadowmask.report.run_folder import last_checkpoint

MODEL_FILES = ("config.json", "adapter_config.json")
ENTRIES = 16  # of every parameter, that go into the fingerprint


@dataclass(frozen=True)
class Source:
    """What to load, and for a run folder the run's settings."""

    model: str
    settings: dict[str, Any] = field(default_factory=dict)
    run: Path | None = None


def find_source(name: str) -> Source:
    """Tell a run folder from everything else; of a run take its final model, else its last checkpoint.

    Raises:
        UserError: a run folder without a model, or a folder that is neither.
    """
    folder = Path(os.path.expanduser(name))
    if not folder.is_dir() or any((folder / file).is_file() for file in MODEL_FILES):
        return Source(name)
    config = folder / "config.yaml"
    if not config.is_file():
        raise UserError(
            f"{name} is neither a model folder (no config.json) nor a run folder (no config.yaml)"
        )
    final = folder / "final"
    model = str(final) if final.is_dir() else last_checkpoint(folder)
    if model is None:
        raise UserError(
            f"run folder {name} has no checkpoint and no final model yet; go on with: "
            f"shadowmask train --resume --output_dir {name}"
        )
    try:
        settings = yaml.safe_load(config.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"{config} is not valid YAML: {' '.join(str(error).split())}") from error
    if not isinstance(settings, dict):
        raise UserError(f"{config} holds no settings")
    return Source(model, settings, folder)


def fingerprint(model: nn.Module) -> str:
    """A digest of some entries of every parameter: other weights have another, whatever they are called."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        flat = parameter.detach().flatten()
        picked = flat[:: max(flat.numel() // ENTRIES, 1)][:ENTRIES]
        digest.update(name.encode() + picked.to("cpu", torch.float64).numpy().tobytes())
    return digest.hexdigest()[:16]
