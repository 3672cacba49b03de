"""Directories that are built once per machine and then only read.

A directory is built under a temporary name and renamed when complete, so a reader never meets half
of one, an interrupted build leaves nothing behind, and two processes that build the same one at a
time both end with a whole one.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path


def cache_root() -> Path:
    """Return the directory of all artifacts: `$SHADOWMASK_CACHE` or `~/.cache/shadowmask`.

    Raises:
        OSError: it cannot be created.
    """
    root = Path(os.environ.get("SHADOWMASK_CACHE") or Path.home() / ".cache" / "shadowmask")
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OSError(
            f"cannot create the cache directory {root} ({error.strerror}); "
            "set SHADOWMASK_CACHE to a directory that can be written"
        ) from error
    return root


def build_once(name: str, build: Callable[[Path], None]) -> Path:
    """Return the artifact `name`, filled by `build(directory)` if it is not there yet.

    The name must say everything that determines the content: nothing else is checked.
    """
    root = cache_root()
    target = root / name
    if target.is_dir():
        return target
    staging = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=root))
    try:
        build(staging)
        _publish(staging, target)
    finally:
        shutil.rmtree(staging, ignore_errors=True)
    return target


def _publish(staging: Path, target: Path) -> None:
    try:
        staging.rename(target)
    except OSError:
        if not target.is_dir():
            raise
        # Another process was faster. The name determines the content, so its copy serves us too.
