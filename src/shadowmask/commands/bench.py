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
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from shadowmask.bench.workload import SHAPES, SWEEPS, Workload
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
  shadowmask bench scaling   all of it over prompt length, group size and compression, with a picture"""

SHORT_PROMPT, LONG_PROMPT = 1024, 8192

Row = tuple[str, str, float, str]  # what, how it is made up, the ratio, what is hoped for


@dataclass
class BenchArguments:
    """The workload. Lengths are in tokens."""

    what: str = field(default="step", metadata={"help": "step, learner, rollout, memory or scaling."})
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
            "ratios": [{"what": w, "made_up_of": m, "ratio": r, "aim": a} for w, m, r, a in rows],
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
        ("share of our step", "", 1.0, ""),
        *_stages(ours),
    ]


def _stages(ours: dict[str, float]) -> list[Row]:
    """Where our step's time goes."""
    return [
        (f"  {name.removeprefix('stage ')}", f"{seconds:.1f} s", seconds / ours["seconds"], "")
        for name, seconds in ours.items()
        if name.startswith("stage ")
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
        _whole_step(got, "<= 1.10" if workload.completion_length < workload.prompt_length else "<= 1.25"),
        (
            "learner above weights, both tracks + KL / one track",
            _megabytes(got["both_tracks_peak_bytes"], got["packed_peak_bytes"]),
            got["both_tracks_peak_bytes"] / got["packed_peak_bytes"],
            "",
        ),
    ]


def _whole_step(got: dict[str, float], aim: str) -> Row:
    both, one = (got["rollout_seconds"] + got[f"{name}_seconds"] for name in ("both_tracks", "packed"))
    return "rollout + learner, both tracks + KL / one track", f"{both:.1f} / {one:.1f} s", both / one, aim


def _rollout(workload: Workload, measure: Measure) -> list[Row]:
    dense, ours = measure("generate_dense"), measure("rollout")
    short, long = (
        measure("decode", prompts=1, prompt_length=p)["seconds_per_step"] for p in (SHORT_PROMPT, LONG_PROMPT)
    )
    quarter = measure("rollout", compression_ratio=0.75)
    alone = measure("rollout", compression_ratio=0.75, prompts=1, group_size=1, completion_length=32)
    layer = 1 / SHAPES[workload.shape]["num_hidden_layers"]
    return [
        (
            "rollout, generate / ours",
            _seconds(dense, ours, "seconds"),
            dense["seconds"] / ours["seconds"],
            ">= 4",
        ),
        (
            f"decode step, prompt {LONG_PROMPT} / {SHORT_PROMPT}",
            f"{long * 1e3:.0f} / {short * 1e3:.0f} ms",
            long / short,
            "<= 1.1",
        ),
        (
            "KV bytes, 75 % removed / generate's cache",
            _megabytes(quarter["kv_bytes_peak"], quarter["kv_bytes_unshared"]),
            quarter["kv_bytes_peak"] / quarter["kv_bytes_unshared"],
            "<= 0.27",
        ),
        (
            "KV bytes, 75 % removed / dense, one sequence",
            _megabytes(alone["kv_bytes_peak"], alone["kv_bytes_dense"]),
            alone["kv_bytes_peak"] / alone["kv_bytes_dense"],
            f"<= 0.27 + {layer:.2f}",
        ),
    ]


def _memory(workload: Workload, measure: Measure) -> list[Row]:
    ours = measure("rollout_memory")
    long = measure("rollout_memory", prompts=1, prompt_length=LONG_PROMPT, group_size=4)
    few = {"completion_length": 16}  # generate copies its cache at every token
    short, theirs = measure("rollout_memory", **few), measure("generate_memory", **few)
    rows = [
        (
            f"rollout of {what}, peak / weights + KV formula",
            _megabytes(got["weights_bytes"] + got["peak_bytes"], got["weights_bytes"] + got["kv_bytes_peak"]),
            (got["weights_bytes"] + got["peak_bytes"]) / (got["weights_bytes"] + got["kv_bytes_peak"]),
            aim,
        )
        for what, got, aim in (("the workload", ours, "<= 1.05"), (f"one prompt of {LONG_PROMPT}", long, ""))
    ]
    return [
        *rows,
        (
            "rollout of 16 tokens above weights, ours / generate",
            _megabytes(short["peak_bytes"], theirs["peak_bytes"]),
            short["peak_bytes"] / theirs["peak_bytes"],
            "",
        ),
        (
            "KV bytes by formula, ours / dense in the same layout",
            _megabytes(ours["kv_bytes_peak"], ours["kv_bytes_dense"]),
            ours["kv_bytes_peak"] / ours["kv_bytes_dense"],
            "",
        ),
    ]


def _scaling(workload: Workload, measure: Measure) -> list[Row]:
    """One process per point; the rows are generate / ours, unpacked / packed and ours / dense bytes."""
    rows: list[Row] = []
    for axis, values in SWEEPS.items():
        for value in values:
            change: dict[str, Any] = {axis: value}
            got = measure("scaling_point", **change)
            rows += [
                (
                    f"{axis}={value}: rollout, generate / ours",
                    f"{got['generate_seconds']:.1f} / {got['rollout_seconds']:.1f} s",
                    got["generate_seconds"] / got["rollout_seconds"],
                    "",
                ),
                (
                    f"{axis}={value}: learner, unpacked / packed",
                    f"{got['unpacked_seconds']:.1f} / {got['packed_seconds']:.1f} s",
                    got["unpacked_seconds"] / got["packed_seconds"],
                    f"rho {replace(workload, **change).rho:.2f}",
                ),
                (
                    f"{axis}={value}: KV bytes, ours / generate's",
                    _megabytes(got["kv_bytes_peak"], got["kv_bytes_unshared"]),
                    got["kv_bytes_peak"] / got["kv_bytes_unshared"],
                    "",
                ),
            ]
    return rows


def _megabytes(numerator: float, denominator: float) -> str:
    return f"{numerator / 1e6:.0f} / {denominator / 1e6:.0f} MB"


def _seconds(numerator: dict[str, float], denominator: dict[str, float], key: str) -> str:
    return f"{numerator[key]:.1f} / {denominator[key]:.1f} s"


SUITES: dict[str, Callable[[Workload, Measure], list[Row]]] = {
    "step": _step,
    "learner": _learner,
    "rollout": _rollout,
    "memory": _memory,
    "scaling": _scaling,
}


def _table(rows: list[Row]) -> Table:
    table = Table(box=None, pad_edge=False)
    for name in ("figure", "measured", "ratio", "aim"):
        table.add_column(name, justify="left" if name == "figure" else "right")
    for what, parts, ratio, aim in rows:
        table.add_row(what, parts, f"{ratio:.2f}", aim)
    return table
