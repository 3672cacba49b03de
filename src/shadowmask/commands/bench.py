"""``shadowmask bench``: what a step costs, as ratios of two things measured one after the other.

Every measurement runs in a process of its own (memory), on the same workload and threads. Absolute
seconds are of this machine; the ratios are what to compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shadowmask.bench.suites import SUITES, Row
from shadowmask.bench.workload import SHAPES, Workload
from shadowmask.commands.common import parse
from shadowmask.commands.errors import UserError
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.scaling import plot_scaling
from shadowmask.report.versions import collect_versions

ABOUT = """Measure against stock TRL, transformers' generate and our own unpacked and dense paths.
  shadowmask bench step      one training step against stock TRL's GRPOTrainer
  shadowmask bench learner   packed against unpacked, both tracks against one
  shadowmask bench rollout   an evicted rollout against model.generate; a decode step at two prompt lengths
  shadowmask bench memory    bytes at the peak of each stage, against the formula and against peers
  shadowmask bench slicing   eviction and learner written plainly, kept keys gathered, against ours
  shadowmask bench scaling   all of it over prompt length, group size and compression, with a picture"""


@dataclass
class BenchArguments:
    """The workload. Lengths are in tokens."""

    what: str = field(
        default="step", metadata={"help": "step, learner, rollout, memory, slicing or scaling."}
    )
    shape: str | None = field(
        default=None,
        metadata={"help": f"Model shape: {', '.join(SHAPES)}. Default 135m; scaling: 30m."},
    )
    prompts: int | None = field(
        default=None, metadata={"help": "Distinct prompts. Default 1; rollout and memory: 4."}
    )
    prompt_length: int | None = field(
        default=None, metadata={"help": "Default 1024; rollout and memory: 2048."}
    )
    completion_length: int | None = field(
        default=None, metadata={"help": "Default 64; rollout and memory: 128; scaling: 16."}
    )
    group_size: int | None = field(
        default=None, metadata={"help": "Completions per prompt. Default 8; scaling: 4."}
    )
    compression_ratio: float = field(default=0.5, metadata={"help": "Fraction of the prompt's keys removed."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of every process."})
    save: str | None = field(
        default=None,
        metadata={
            "help": "Write the figures with their conditions to this JSON file; scaling also draws a PNG "
            "and an SVG beside it."
        },
    )


def main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--what", *argv]
    (args,) = parse([BenchArguments], argv, "bench", ABOUT)
    if args.what not in SUITES:
        raise UserError(f"bench {args.what!r} is unknown: one of {', '.join(SUITES)}")
    if args.shape is not None and args.shape not in SHAPES:
        raise UserError(f"shape={args.shape!r} is unknown: one of {', '.join(SHAPES)}")
    workload = _workload(args)
    console = Console(highlight=False)
    console.print(f"workload: {', '.join(f'{k}={v}' for k, v in asdict(workload).items())}")
    figures: dict[str, Any] = {}
    _check_target(args.save)

    def measure(case: str, **change: Any) -> dict[str, float]:
        console.print(f"measuring {case} {change or ''} ...")
        key = case + "".join(f" {k}={v}" for k, v in change.items())
        figures[key] = run_case(case, workload, args.threads, **change)
        return figures[key]

    rows = SUITES[args.what](workload, measure)
    console.print(_table(rows))
    if args.save:
        content = {
            "command": "shadowmask bench " + " ".join(argv[1:] if argv[:1] == ["--what"] else argv),
            "workload": asdict(workload),
            "figures": figures,
            "ratios": [row._asdict() for row in rows],
            "versions": collect_versions(),
        }
        write_atomically(Path(args.save), json.dumps(content, indent=2) + "\n")
        if args.what == "scaling":
            drawn = plot_scaling(figures, workload, Path(args.save))
            console.print(f"drawn: {', '.join(map(str, drawn))}")


DEFAULTS: dict[str, dict[str, Any]] = {
    "rollout": {"prompts": 4, "prompt_length": 2048, "completion_length": 128},
    "memory": {"prompts": 4, "prompt_length": 2048, "completion_length": 128},
    "scaling": {"shape": "30m", "completion_length": 16, "group_size": 4},
}


def _workload(args: BenchArguments) -> Workload:
    given = {f.name: getattr(args, f.name, None) for f in fields(Workload)}
    return Workload(**DEFAULTS.get(args.what, {}) | {k: v for k, v in given.items() if v is not None})


def _check_target(save: str | None) -> None:
    if save is not None and not Path(save).absolute().parent.is_dir():
        raise UserError(f"--save {save}: folder {Path(save).parent} does not exist")


def run_case(case: str, workload: Workload, threads: int | None, **change: Any) -> dict[str, float]:
    """Run one measurement in a process of its own.

    Raises:
        UserError: the process failed; the message is the end of what it said.
    """
    settings = {**asdict(workload), **change, "threads": threads}
    command = [sys.executable, "-m", "shadowmask.bench.cases", case, json.dumps(settings)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    if case.endswith("_memory"):
        # the C library keeps freed blocks for later; without that, resident memory is what is allocated
        environment["MALLOC_MMAP_THRESHOLD_"] = "65536"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"measuring {case} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "measured", "ratio", "aim"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for what, parts, ratio, aim in rows:
        table.add_row(what, parts, f"{ratio:.2f}", aim)
    return table
