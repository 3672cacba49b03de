"""What tasks with data of their own share: loading, the schema check, splits, and order by seed."""

import random
from abc import abstractmethod
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from shadowmask.tasks.base import Row, Task, check_split
from shadowmask.tasks.source import EVAL_NAMES, Hub, Records, Table, choose_split, find_columns, load_splits

HOLD_OUT = 5  # of data without a split for evaluation, one row in five is held out


@dataclass(frozen=True)
class DataTask(Task):
    """A task whose rows are made from records of a data set.

    Published splits are taken as they are. Where there is one split only, records are held out by their
    content: the same ones under every seed, and equal records always together.
    """

    hub: ClassVar[Hub]
    columns: ClassVar[dict[str, tuple[str, ...]]]
    """Fields that a record must have, and the column names that are accepted for each."""

    source: str | None = None
    """A hub name, or a .jsonl, .json or .parquet file or folder of the same schema. Default: the hub's."""
    config: str | None = None
    """The data set's configuration on the hub."""
    eval_split: str | None = None
    """The split to evaluate on. Default: the published one, else validation or test, else held-out rows."""
    chat: bool = True
    """Ask in chat messages; plain text otherwise."""

    def dataset(self, split: str, size: int, seed: int) -> list[Row]:
        check_split(split)
        if size < 1:
            return []
        records = self.records(split)
        order = list(range(len(records)))
        random.Random(f"{split}/{seed}").shuffle(order)
        return [self.row(records[n]) for n in order[:size]]

    def records(self, split: str) -> Table:
        """The records of a split under our field names, in the data set's order."""
        train, held_out = self._records
        chosen = train if split == "train" else held_out
        if not len(chosen):
            raise ValueError(f"data set {self.where!r} has no rows for the split {split!r}")
        return chosen

    @abstractmethod
    def row(self, record: dict[str, Any]) -> Row:
        """Make the prompt and the columns of the reward from a record."""

    @property
    def where(self) -> str:
        """The name of the data, as the user or the hub writes it."""
        return self.source or self.hub.name

    def fields(self) -> dict[str, tuple[str, ...]]:
        """The columns to look for; a task may let the user name them."""
        return self.columns

    def usable(self, table: Table) -> Table:
        """Leave out records that the task has no use for. The default keeps all."""
        return table

    @cached_property
    def _records(self) -> tuple[Table, Table]:
        own = self.source is None
        splits = load_splits(self.where, self.config or (self.hub.config if own else None))
        train = choose_split(splits, ("train",)) or next(iter(splits))
        wanted = (self.eval_split,) if self.eval_split else (self.hub.eval_split, *EVAL_NAMES)
        held_out = choose_split([name for name in splits if name != train], wanted)
        if self.eval_split and held_out is None:
            raise ValueError(
                f"eval_split={self.eval_split!r}: data set {self.where!r} has the splits {', '.join(splits)}"
            )
        records = self._read(splits, train)
        if held_out is None:
            return records.hold_out(HOLD_OUT)
        return records, self._read(splits, held_out)

    def _read(self, splits: Records, split: str) -> Table:
        rows = splits[split]
        where = self.where if len(splits) == 1 else f"{self.where} ({split})"
        found = find_columns(where, rows.column_names, self.fields())
        return self.usable(Table(rows, found, where, range(len(rows))))
