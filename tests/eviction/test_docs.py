"""``docs/evictors.md`` and the README name every evictor, with the defaults that the code has."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest

from shadowmask import get_evictor, list_evictors
from shadowmask.eviction import EVICTORS, Evictor

ROOT = Path(__file__).parents[2]
DOCS = (ROOT / "docs" / "evictors.md").read_text()
COMMON = set(inspect.signature(Evictor).parameters)


def rows(text: str, name: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(f"| `{name}` |")]


@pytest.mark.parametrize("name", list_evictors())
def test_every_evictor_has_its_row(name: str) -> None:
    assert len(rows((ROOT / "README.md").read_text(), name)) == 1
    (row,) = (row for row in rows(DOCS, name) if row.count("|") == 6)
    if EVICTORS[name].default_share == "heads":
        assert row.endswith("| heads |")


@pytest.mark.parametrize("name", [name for name in list_evictors() if name != "dense"])
def test_settings_are_listed_with_their_defaults(name: str) -> None:
    own = {k: p.default for k, p in inspect.signature(EVICTORS[name]).parameters.items() if k not in COMMON}
    listed = dict(re.findall(r"`(\w+)=([\d.]+)`", " ".join(rows(DOCS, name))))
    assert listed == {k: str(v) for k, v in own.items()}


@pytest.mark.parametrize("call", re.findall(r"^sm\.(get_evictor\(.*\))", DOCS, re.MULTILINE))
def test_examples_run(call: str) -> None:
    assert isinstance(eval(call, {"get_evictor": get_evictor}), Evictor)
