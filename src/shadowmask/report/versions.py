"""What ran: a number without interpreter, libraries, commit and hardware cannot be repeated."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PACKAGES = ("shadowmask", "torch", "transformers", "trl", "peft", "accelerate", "datasets")


def collect_versions() -> dict[str, Any]:
    """Return versions by name; `None` for what is not installed or not known."""
    return {
        "python": platform.python_version(),
        **{package: _installed(package) for package in PACKAGES},
        "git_commit": git_commit(Path(__file__)),
        "platform": platform.platform(),
        "cpus": os.cpu_count(),
        "torch_threads": torch.get_num_threads(),
        "cuda_device": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
    }


def git_commit(file: Path) -> str | None:
    """Return the commit that `file` is checked out from, with `-dirty` if tracked files differ.

    `None` for a file that git does not track: an environment inside somebody's checkout must not
    report that checkout's commit.
    """
    if _git(file.parent, "ls-files", "--error-unmatch", file.name) is None:
        return None
    commit = _git(file.parent, "rev-parse", "HEAD")
    if not commit:
        return None
    changed = _git(file.parent, "status", "--porcelain", "--untracked-files=no")
    return f"{commit}-dirty" if changed else commit


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(directory: Path, *arguments: str) -> str | None:
    """Return what git prints, or `None` if it fails or is not there."""
    try:
        done = subprocess.run(["git", *arguments], cwd=directory, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
