"""The folder that a run leaves behind.

    config.yaml     the settings that matter or differ from their defaults; works as --config
    resolved.json   every setting
    versions.json   interpreter, libraries, commit, hardware
    metrics.jsonl   one object per logged step
    samples.jsonl   some completions with their rewards
    samples/        some of those with their records, for `shadowmask inspect`
    *.json          results, written whole or not at all

The two `.jsonl` files grow line by line and survive being cut off in the middle of one. On resume
they are cut back to the step of the checkpoint, so that no step stands there twice.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any

import yaml

from shadowmask.report.versions import collect_versions

Record = dict[str, Any]


class RunFolderError(ValueError):
    """The folder cannot be used; the message says what to do."""


class RunFolder:
    """The folder of one run, new or reopened. It is made when something is first written to it.

    Args:
        path: the folder; parents are made.
        resume: continue a run that is already there.

    Raises:
        RunFolderError: the folder has content and `resume` is false, or has none and it is true.
    """

    def __init__(self, path: str | os.PathLike[str], resume: bool = False) -> None:
        self.path = Path(path)
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"run folder {self.path} is a file; choose another output folder")
        filled = self.path.is_dir() and any(self.path.iterdir())
        if filled and not resume:
            raise RunFolderError(
                f"run folder {self.path} is not empty; choose another output folder, "
                "or continue that run with --resume"
            )
        if resume and not filled:
            raise RunFolderError(f"run folder {self.path} has no run to resume")
        self._started_empty = not filled

    def discard(self) -> None:
        """Remove the folder of a new run that failed before it had anything to show."""
        if self._started_empty and not self.read_metrics() and not list(self.path.glob("checkpoint-*")):
            shutil.rmtree(self.path, ignore_errors=True)

    @property
    def metrics_path(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def samples_path(self) -> Path:
        return self.path / "samples.jsonl"

    def records_path(self, step: int) -> Path:
        """Where the samples of a step stand that were saved with their records."""
        return self.path / "samples" / f"step-{step:06d}.samples.json.gz"

    def write_config(self, config: Mapping[str, Any]) -> None:
        """Write the resolved settings, in the order given."""
        text = yaml.safe_dump(_plain(config), sort_keys=False, allow_unicode=True)
        write_atomically(self.path / "config.yaml", text)

    def write_versions(self) -> None:
        """Write what ran: interpreter, libraries, commit, hardware."""
        self.write_json("versions.json", collect_versions())

    def write_json(self, name: str, content: Any) -> None:
        """Write `content` under `name`; a reader sees the old file or the new one, never half."""
        write_atomically(self.path / name, json.dumps(_plain(content), indent=2) + "\n")

    def append_metrics(self, metrics: Mapping[str, Any]) -> None:
        """Append one step to `metrics.jsonl`; it must have a `step`."""
        _append(self.metrics_path, [metrics])

    def append_samples(self, samples: Iterable[Mapping[str, Any]]) -> None:
        """Append completions to `samples.jsonl`; each must have the `step` that it was sampled in."""
        _append(self.samples_path, samples)

    def read_metrics(self) -> list[Record]:
        return read_records(self.metrics_path)

    def read_samples(self) -> list[Record]:
        return read_records(self.samples_path)

    def truncate_after(self, step: int) -> None:
        """Forget what was written after `step`, and half of a line at the end, if there is one."""
        for path in (self.metrics_path, self.samples_path):
            if path.exists():
                kept = [record for record in read_records(path) if record["step"] <= step]
                write_atomically(path, "".join(map(_line, kept)))
        for path in (self.path / "samples").glob("step-*.samples.json.gz"):
            if int(path.name[5:].split(".")[0]) > step:
                path.unlink()


class MutedRunFolder(RunFolder):
    """The folder as the other processes of a run see it: they read, and leave all writing to the first."""

    def __init__(self, path: str | os.PathLike[str], resume: bool = False) -> None:
        self.path = Path(path)  # the first process may have made it already, or not yet

    def discard(self) -> None: ...

    def write_config(self, config: Mapping[str, Any]) -> None: ...

    def write_json(self, name: str, content: Any) -> None: ...

    def append_metrics(self, metrics: Mapping[str, Any]) -> None: ...

    def append_samples(self, samples: Iterable[Mapping[str, Any]]) -> None: ...

    def truncate_after(self, step: int) -> None: ...


def last_checkpoint(folder: Path) -> str | None:
    """The newest complete checkpoint; one that was cut off while being written is passed over."""
    found = [
        path
        for path in folder.glob("checkpoint-*")
        if path.name.removeprefix("checkpoint-").isdigit() and (path / "trainer_state.json").is_file()
    ]
    return str(max(found, key=lambda path: int(path.name.split("-")[1]))) if found else None


def read_records(path: str | os.PathLike[str]) -> list[Record]:
    """Read a `.jsonl` file, leaving out a last line that was cut off.

    Raises:
        RunFolderError: a line before the last is no JSON.
    """
    if not Path(path).exists():
        return []
    # Not splitlines(): completions may hold other line separators, and a cut may fall inside a character.
    lines = Path(path).read_text(encoding="utf-8", errors="replace").removesuffix("\n").split("\n")
    records: list[Record] = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError as error:
            if number < len(lines):
                raise RunFolderError(f"{path}, line {number}: not JSON ({error.msg})") from error
    return records


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file under a temporary name beside it, then rename it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}-", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode("utf-8") if isinstance(content, str) else content)
        os.chmod(temporary, 0o644)  # mkstemp makes it private
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _append(path: Path, records: Iterable[Mapping[str, Any]]) -> None:
    lines = []
    for record in records:
        if "step" not in record:
            raise ValueError(f"a record for {path.name} has no 'step': {sorted(record)}")
        lines.append(_line(record))
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:  # closing flushes: a crash loses nothing older
        file.writelines(lines)


def _line(record: Mapping[str, Any]) -> str:
    return json.dumps(_plain(record), ensure_ascii=False, allow_nan=False) + "\n"


def _plain(value: Any) -> Any:
    """Reduce to what YAML and JSON both know; NaN and infinities, which JSON lacks, become null."""
    if isinstance(value, Enum):
        return _plain(value.value)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, str | int):
        return value
    raise TypeError(f"{value!r} of type {type(value).__name__} is no plain setting or metric")
