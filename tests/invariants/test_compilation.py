"""The decode step compiles as one graph, once for a whole rollout."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from compile_probe import CASES
from tolerances import FLOAT64

TESTS = Path(__file__).parents[1]


@functools.cache
def probes() -> dict[str, dict[str, Any]]:
    path = os.pathsep.join([str(TESTS), str(TESTS.parent / "src")])
    done = subprocess.run(
        [sys.executable, str(TESTS / "compile_probe.py")],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("case", [f"{a} {b} {n}" for a, b in CASES for n in (None, 5)])
def test_one_graph_and_no_recompilation(case: str) -> None:
    """``fullgraph=True`` would raise at a break or a host sync; refills and evictions change no shape."""
    probe = probes()[case]
    assert probe["compilations"] == 1 and probe["operations"] > 100
    assert probe["waited"] and probe["same_tokens"] and probe["same_record"]
    assert probe["gap"] <= FLOAT64


def test_the_count_does_see_recompilations() -> None:
    assert probes()["control"]["compilations"] > 2
