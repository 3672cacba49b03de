"""A suite: which cells there are. Read from YAML, checked as a whole before anything runs.

    name: pocket
    train: {model_name_or_path: pocket, max_steps: 150}           # settings of `shadowmask train`
    tasks: {chain: {task: chain, task_kwargs: {num_facts: 12}}}   # names for groups of settings
    caches: {snapkv50: {evictor: snapkv, compression_ratio: 0.5}}
    arms: {smd-0.3: {method: smd, distill_coef: 0.3}}             # every method is an arm by its own name
    grid:
      - {task: [chain], cache: [snapkv50], arm: [dense, naive, smd, smd-0.3], seed: [0, 1, 2]}
    quick: {seeds: [0], train: {max_steps: 10}}                   # what --quick changes

A cell is one value of every axis. Blocks of the grid may overlap: a cell runs once. An arm that evicts
nothing while training (`dense`) is one cell for all caches. Every trained model is evaluated dense and under
its own cache; those of the arms in `matrix` (default: all arms) under every cache of the suite. The table
gives differences to the `baseline` (default: dense) and those of `pairs: [[smd, shadow], ...]`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import yaml

from shadowmask.corrections import METHODS

AXES = ("task", "cache", "arm", "seed")
KEYS = ("name", "train", "tasks", "caches", "arms", "grid", "quick", "baseline", "matrix", "pairs")
QUICK_KEYS = ("train", "seeds", "arms", "caches", "tasks")
NO_CACHE = "dense"
CACHE_KEYS = ("evictor", "budget", "compression_ratio", "evict_every", "evictor_kwargs")
Settings = dict[str, Any]


class SuiteError(ValueError):
    """The suite cannot be run; the message names the entry."""


@dataclass(frozen=True)
class Cell:
    """One run: its place in the grid and the settings of ``shadowmask train`` that make it."""

    task: str
    cache: str
    arm: str
    seed: int
    settings: Settings = field(compare=False)

    @property
    def name(self) -> str:
        """Unique within the suite, and a path: ``chain/snapkv50/smd/seed0``."""
        return f"{self.task}/{self.cache}/{self.arm}/seed{self.seed}"


@dataclass(frozen=True)
class Suite:
    """Cells in the order in which they run."""

    name: str
    cells: tuple[Cell, ...]
    caches: dict[str, Settings]
    baseline: str
    matrix: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...] = ()

    def eval_caches(self, cell: Cell) -> dict[str, Settings]:
        """Caches that the cell's model is evaluated under, besides none and its own."""
        if cell.arm not in self.matrix:
            return {}
        return {name: settings for name, settings in self.caches.items() if name != cell.cache}

    def order(self, axis: str) -> list[Any]:
        """The values of an axis in the order of the suite."""
        return list(dict.fromkeys(getattr(cell, axis) for cell in self.cells))


def load_suite(path: str | Path, quick: bool = False) -> Suite:
    """Read and check a suite.

    Raises:
        SuiteError: a missing file or key, an unknown name (the nearest one is suggested), an empty grid.
    """
    path = Path(path)
    if not path.is_file():
        raise SuiteError(f"suite {str(path)!r} does not exist")
    try:
        content = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise SuiteError(f"suite {path} is not valid YAML: {' '.join(str(error).split())}") from error
    return make_suite(content, path.stem, quick)


def make_suite(content: Any, name: str, quick: bool = False) -> Suite:
    """The suite that the content of a YAML file describes. See ``load_suite``."""
    suite = _mapping(content, "the suite")
    _known(suite, KEYS, "the suite")
    short = _mapping(suite.get("quick"), "quick") if quick else {}
    _known(short, QUICK_KEYS, "quick")
    train = _mapping(suite.get("train"), "train") | _mapping(short.get("train"), "quick.train")
    arms = {method: {"method": method} for method in METHODS} | _named(suite, "arms")
    for arm, settings in arms.items():
        if settings.get("method", "smd") not in METHODS:
            raise SuiteError(_unknown(f"arm {arm!r}: method", settings["method"], METHODS))
    named = {"task": _named(suite, "tasks"), "cache": _named(suite, "caches"), "arm": arms}
    wanted = {axis: short.get(f"{axis}s") for axis in AXES}
    cells: dict[tuple[Any, ...], Cell] = {}
    blocks = suite.get("grid") or []
    if not isinstance(blocks, list):
        raise SuiteError(f"grid must be a list of blocks, not {type(blocks).__name__}")
    for number, block in enumerate(blocks):
        for place in _places(_mapping(block, f"grid[{number}]"), number, named, wanted):
            cell = _cell(place, train, named)
            cells.setdefault((cell.task, cell.cache, cell.arm, cell.seed), cell)
    if not cells:
        raise SuiteError(f"suite {suite.get('name', name)!r}: the grid is empty, there is nothing to run")
    baseline = suite.get("baseline", "dense")
    if baseline not in arms:
        raise SuiteError(_unknown("baseline", baseline, arms))
    matrix = suite.get("matrix", list(arms))
    for arm in matrix if isinstance(matrix, list) else [matrix]:
        if arm not in arms:
            raise SuiteError(_unknown("matrix: arm", arm, arms))
    pairs = _pairs(suite.get("pairs") or [], arms)
    # seeds outermost: a suite that is stopped half-way has whole comparisons of the first seeds
    ordered = sorted(cells.values(), key=lambda cell: cell.seed)
    used = {cell.cache for cell in ordered}
    common = {key: train[key] for key in CACHE_KEYS if key in train}
    caches = {cache: common | settings for cache, settings in named["cache"].items() if cache in used}
    return Suite(str(suite.get("name", name)), tuple(ordered), caches, baseline, tuple(matrix), pairs)


def _pairs(given: Any, arms: Iterable[str]) -> tuple[tuple[str, str], ...]:
    for pair in given if isinstance(given, list) else [given]:
        if not isinstance(pair, list) or len(pair) != 2:
            raise SuiteError(f"pairs: {pair!r} must be a list of two arms")
        for arm in pair:
            if arm not in arms:
                raise SuiteError(_unknown("pairs: arm", arm, arms))
    return tuple((one, other) for one, other in given)


def _places(
    block: Settings, number: int, named: Mapping[str, Mapping[str, Settings]], wanted: Mapping[str, Any]
) -> Iterable[dict[str, Any]]:
    where = f"grid[{number}]"
    _known(block, AXES, where)
    values: dict[str, list[Any]] = {}
    for axis in AXES:
        given = block.get(axis)
        given = given if isinstance(given, list) else [] if given is None else [given]
        if not given:
            raise SuiteError(f"{where}: {axis} is empty, so the block has no cells")
        for value in given:
            if axis == "seed":
                if isinstance(value, bool) or not isinstance(value, int):
                    raise SuiteError(f"{where}: seed {value!r} is no whole number")
            elif value not in named[axis]:
                raise SuiteError(_unknown(f"{where}: {axis}", value, named[axis]))
        values[axis] = [v for v in given if wanted[axis] is None or v in wanted[axis]]
    return (
        dict(zip(AXES, place, strict=True)) for place in itertools.product(*(values[axis] for axis in AXES))
    )


def _cell(place: dict[str, Any], train: Settings, named: Mapping[str, Mapping[str, Settings]]) -> Cell:
    arm = named["arm"][place["arm"]]
    evicts = METHODS[arm.get("method", "smd")].evicts
    cache = named["cache"][place["cache"]] if evicts else {"evictor": "dense"}
    settings = train | named["task"][place["task"]] | cache | arm | {"seed": place["seed"]}
    return Cell(place["task"], place["cache"] if evicts else NO_CACHE, place["arm"], place["seed"], settings)


def _mapping(value: Any, where: str) -> Settings:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise SuiteError(f"{where} must be a mapping, not {type(value).__name__}")
    return dict(value)


def _named(suite: Settings, key: str) -> dict[str, Settings]:
    found = {
        str(name): _mapping(settings, f"{key}.{name}")
        for name, settings in _mapping(suite.get(key), key).items()
    }
    for name in found:
        if "/" in name or not name:
            raise SuiteError(f"{key}: the name {name!r} must not be empty or contain '/'")
    return found


def _known(given: Settings, known: Iterable[str], where: str) -> None:
    for key in given:
        if key not in known:
            raise SuiteError(_unknown(f"{where}: key", key, known))


def _unknown(what: str, name: Any, known: Iterable[str]) -> str:
    near = get_close_matches(str(name), list(known), n=1)
    hint = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(known)}"
    return f"{what} {name!r} is unknown; {hint}"
