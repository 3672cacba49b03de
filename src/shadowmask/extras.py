"""Optional libraries: imported when first used, and one clear line when they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

# module -> (what pip calls it, the extra of ours that brings it)
PACKAGES = {
    "math_verify": ("math-verify", "tasks"),
    "rouge_score": ("rouge-score", "tasks"),
    "hard_needle": ("hard-needle", "tasks"),
    "reasoning_gym": ("reasoning-gym", "gym"),
    "datasets": ("datasets", "trl"),
}


def check(module: str) -> None:
    """Raise ImportError if a module of ``PACKAGES`` is not installed; import nothing.

    Raises:
        ImportError: names the package and the command that installs it.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        package, extra = PACKAGES[root]
        raise ImportError(f"{package} is not installed: pip install 'shadowmask[{extra}]'")


def need(module: str) -> Any:
    """Import an optional module.

    Raises:
        ImportError: names the package and the command that installs it.
    """
    check(module)
    return importlib.import_module(module)
