"""``shadowmask bench``: what a step costs, as ratios of two things measured one after the other.

Every measurement runs in a process of its own (memory), on the same workload and threads. Absolute
seconds are of this machine; the ratios are what to compare.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shadowmask.bench.workload import SHAPES, Workload
from shadowmask.commands.common import parse
from shadowmask.commands.errors import UserError
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.versions import collect_versions

ABOUT = """Measure against stock TRL, transformers' generate and our own unpacked and dense paths.
  shadowmask bench step      one training step against stock TRL's GRPOTrainer
  shadowmask bench learner   packed against unpacked, both tracks against one
  shadowmask bench rollout   an evicted rollout against model.generate; a decode step at two prompt lengths"""

Row = tuple[str, str, float, str]  # what, how it is made up, the ratio, what is hoped for


@dataclass
class BenchArguments:
    """The workload. Lengths are in tokens."""

    what: str = field(default="step", metadata={"help": "step, learner or rollout."})
    shape: str = field(default="135m", metadata={"help": f"Model shape: {', '.join(SHAPES)}."})
    prompts: int | None = field(default=None, metadata={"help": "Distinct prompts. Default 1; rollout: 4."})
    prompt_length: int | None = field(default=None, metadata={"help": "Default 1024; rollout: 2048."})
    completion_length: int | None = field(default=None, metadata={"help": "Default 64; rollout: 128."})
    group_size: int = field(default=8, metadata={"help": "Completions per prompt."})
    compression_ratio: float = field(default=0.5, metadata={"help": "Fraction of the prompt's keys removed."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads of every process."})
    save: str | None = field(
        default=None, metadata={"help": "Write the figures with their conditions as JSON."}
    )


def main(argv: Sequence[str]) -> None:
    if argv and not argv[0].startswith("-"):
        argv = ["--what", *argv]
    (args,) = parse([BenchArguments], argv, "bench", ABOUT)
    if args.what not in SUITES:
        raise UserError(f"bench {args.what!r} is unknown: one of {', '.join(SUITES)}")
    if args.shape not in SHAPES:
        raise UserError(f"shape={args.shape!r} is unknown: one of {', '.join(SHAPES)}")
    workload = _workload(args)
    console = Console(highlight=False)
    console.print(f"workload: {', '.join(f'{k}={v}' for k, v in asdict(workload).items())}")
    figures: dict[str, Any] = {}

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
            "ratios": [{"what": w, "made_up_of": m, "ratio": r, "aim": a} for w, m, r, a in rows],
            "versions": collect_versions(),
        }
        write_atomically(Path(args.save), json.dumps(content, indent=2) + "\n")


def _workload(args: BenchArguments) -> Workload:
    rollout = args.what == "rollout"
    defaults = {"prompts": 4, "prompt_length": 2048, "completion_length": 128} if rollout else {}
    chosen = {
        name: value
        for name in (
            "prompts",
            "prompt_length",
            "completion_length",
            "group_size",
            "compression_ratio",
            "shape",
        )
        if (value := getattr(args, name)) is not None
    }
    return Workload(**{**defaults, **chosen})


def run_case(case: str, workload: Workload, threads: int | None, **change: Any) -> dict[str, float]:
    """Run one measurement in a process of its own.

    Raises:
        UserError: the process failed; the message is the end of what it said.
    """
    settings = {**asdict(workload), **change, "threads": threads}
    command = [sys.executable, "-m", "shadowmask.bench.cases", case, json.dumps(settings)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise UserError(f"measuring {case} failed: {done.stderr.strip().splitlines()[-1:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


Measure = Callable[..., dict[str, float]]


def _step(workload: Workload, measure: Measure) -> list[Row]:
    ours, theirs = measure("smd_step"), measure("trl_step")
    return [
        (
            "training step, stock TRL / SMD",
            _seconds(theirs, ours, "seconds"),
            theirs["seconds"] / ours["seconds"],
            ">= 5",
        ),
        (
            "  rollout",
            _seconds(theirs, ours, "rollout_seconds"),
            theirs["rollout_seconds"] / ours["rollout_seconds"],
            "",
        ),
        (
            "  learner",
            _seconds(theirs, ours, "learner_seconds"),
            theirs["learner_seconds"] / ours["learner_seconds"],
            "",
        ),
        (
            "peak memory of a step, SMD / stock TRL",
            f"{ours['peak_bytes'] / 1e9:.2f} / {theirs['peak_bytes'] / 1e9:.2f} GB",
            ours["peak_bytes"] / theirs["peak_bytes"],
            "<= 0.35",
        ),
    ]


def _learner(workload: Workload, measure: Measure) -> list[Row]:
    got = measure("learner")
    one, both, apart = (got[f"{name}_seconds"] for name in ("packed", "both_tracks", "unpacked"))
    return [
        (
            "learner, unpacked / packed",
            f"{apart:.1f} / {one:.1f} s",
            apart / one,
            f">= {0.85 * workload.rho:.2f}",
        ),
        ("learner, both tracks + KL / one track", f"{both:.1f} / {one:.1f} s", both / one, ""),
    ]


def _rollout(workload: Workload, measure: Measure) -> list[Row]:
    dense, ours = measure("generate_dense"), measure("rollout")
    short, long = (measure("decode", prompts=1, prompt_length=p)["seconds_per_step"] for p in (1024, 8192))
    quarter = measure("rollout", compression_ratio=0.75)
    return [
        (
            "rollout, generate / ours",
            _seconds(dense, ours, "seconds"),
            dense["seconds"] / ours["seconds"],
            ">= 4",
        ),
        (
            "decode step, prompt 8192 / 1024",
            f"{long * 1e3:.0f} / {short * 1e3:.0f} ms",
            long / short,
            "<= 1.1",
        ),
        (
            "KV bytes, 75 % removed / dense",
            f"{quarter['kv_bytes_peak'] / 1e6:.0f} / {quarter['kv_bytes_dense'] / 1e6:.0f} MB",
            quarter["kv_bytes_peak"] / quarter["kv_bytes_dense"],
            "<= 0.27",
        ),
    ]


def _seconds(numerator: dict[str, float], denominator: dict[str, float], key: str) -> str:
    return f"{numerator[key]:.1f} / {denominator[key]:.1f} s"


SUITES: dict[str, Callable[[Workload, Measure], list[Row]]] = {
    "step": _step,
    "learner": _learner,
    "rollout": _rollout,
}


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "measured", "ratio", "aim"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for what, parts, ratio, aim in rows:
        table.add_row(what, parts, f"{ratio:.2f}", aim)
    return table
