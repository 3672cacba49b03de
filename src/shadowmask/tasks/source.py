"""Records from a hub data set or local files, and a schema check that says what is missing."""

from __future__ import annotations

import hashlib
import json
import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from shadowmask.extras import need, package_file

FILES = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
PACKAGE = "package:"  # data inside an installed package
EVAL_NAMES = ("validation", "valid", "dev", "test")

Records = Mapping[str, Any]  # split -> datasets.Dataset


@dataclass(frozen=True)
class Hub:
    """Where a published data set lies, and which of its splits a task uses."""

    name: str
    config: str | None = None
    eval_split: str = "test"


def load_splits(name: str, config: str | None = None) -> Records:
    """Load a hub data set, a .jsonl, .json or .parquet file, or a folder of such files.

    ``package:name/file`` is a file inside an installed package.

    Raises:
        ValueError: it does not exist, is empty or cannot be read.
        ImportError: the library ``datasets`` is missing.
    """
    datasets = need("datasets")
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    path = package_file(name.removeprefix(PACKAGE)) if name.startswith(PACKAGE) else Path(name).expanduser()
    kind = FILES.get(path.suffix)
    if kind and not path.is_file():
        raise ValueError(f"data file {name!r} does not exist")
    if kind and not path.stat().st_size:
        raise ValueError(f"data file {name!r} is empty")
    if path.is_file() and not kind:
        raise ValueError(f"data file {name!r} has none of the endings {', '.join(FILES)}")
    if name.startswith((".", "/", "~")) and not path.exists():
        raise ValueError(f"data folder {name!r} does not exist")
    try:
        if kind:
            return datasets.load_dataset(kind, data_files=str(path))
        if path.is_dir() and ((path / "dataset_dict.json").is_file() or (path / "state.json").is_file()):
            stored = datasets.load_from_disk(str(path))
            return stored if isinstance(stored, Mapping) else {"train": stored}
        return datasets.load_dataset(str(path) if path.is_dir() else name, config)
    except (OSError, ValueError, datasets.exceptions.DatasetGenerationError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        hint = "" if path.exists() else "; --dataset takes a local file or folder instead"
        raise ValueError(f"data set {name!r} cannot be loaded: {reason}{hint}") from error


def choose_split(splits: Iterable[str], wanted: Iterable[str]) -> str | None:
    """Return the first of the wanted splits that there is."""
    present = set(splits)
    return next((name for name in wanted if name in present), None)


def find_columns(name: str, columns: Iterable[str], wanted: Mapping[str, tuple[str, ...]]) -> dict[str, str]:
    """Return which column holds each field; the first accepted name that there is counts.

    Raises:
        ValueError: names the missing column, what else it may be called, and the columns there are.
    """
    present, found = list(columns), {}
    for field, accepted in wanted.items():
        match = next((column for column in accepted if column in present), None)
        if match is None:
            others = f" (or {', '.join(accepted[1:])})" if accepted[1:] else ""
            raise ValueError(
                f"data set {name!r} has no column {accepted[0]!r}{others}; "
                f"its columns are {', '.join(present) or 'none'}"
            )
        found[field] = match
    return found


@dataclass(frozen=True)
class Table:
    """Rows of a loaded data set under a task's own field names, read one at a time."""

    rows: Any  # a datasets.Dataset
    columns: Mapping[str, str]  # our name -> the data set's
    where: str
    picked: Sequence[int]

    def __len__(self) -> int:
        return len(self.picked)

    def __getitem__(self, n: int) -> dict[str, Any]:
        """Return a record.

        Raises:
            ValueError: one of its fields is missing or empty; names the row and the column.
        """
        record = self.rows[self.picked[n]]
        for column in self.columns.values():
            if record[column] is None or record[column] == "":
                raise ValueError(
                    f"data set {self.where!r}, row {self.picked[n]}: column {column!r} is {record[column]!r}"
                )
        return {field: record[column] for field, column in self.columns.items()}

    def column(self, field: str) -> list[Any]:
        """Return one field of every row, unchecked."""
        values = self.rows[self.columns[field]]
        return [values[n] for n in self.picked]

    def pick(self, numbers: Iterable[int]) -> Table:
        """Return some of these rows, by their place here."""
        return replace(self, picked=[self.picked[n] for n in numbers])

    def hold_out(self, one_in: int) -> tuple[Table, Table]:
        """Divide the rows into those to train on and those held out, by the order of their digests.

        Which rows are held out depends on the data alone; equal rows stay together.
        """
        digests = [_digest(self.rows[n]) for n in self.picked]
        distinct = sorted(set(digests))
        held = set(distinct[: math.ceil(len(distinct) / one_in)]) if len(distinct) > 1 else set()
        places = range(len(self))
        return (
            self.pick(n for n in places if digests[n] not in held),
            self.pick(n for n in places if digests[n] in held),
        )


def _digest(record: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True, default=str).encode()).hexdigest()
