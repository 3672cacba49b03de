"""``shadowmask report``: one page on a run, finished or not, or on several beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from shadowmask.commands.common import parse, split_positional
from shadowmask.commands.errors import UserError
from shadowmask.report.advice import warnings_of
from shadowmask.report.figures import draw_figures
from shadowmask.report.report_page import report_page
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.runs import experiments, read_run

ABOUT = """shadowmask report RUN [RUN ...]     run folders, finished or still going

Write one HTML page on a run or a comparison: reward, gaps, memory, times, gradients, completions,
settings and warnings in words. Runs that differ in their seed alone share a line with a band. The
figures are written beside it as PNG and SVG."""


@dataclass
class ReportArguments:
    """Settings of ``shadowmask report``."""

    output: str | None = field(
        default=None,
        metadata={"help": "The page to write. Default: report.html in the run's folder; of several, here."},
    )


def main(argv: Sequence[str]) -> None:
    names, rest = split_positional(argv)
    (args,) = parse([ReportArguments], rest, "report", ABOUT)
    if not names:
        raise UserError("name one or more run folders: shadowmask report runs/demo")
    if len(set(names)) < len(names):
        raise UserError(f"a run is named twice: {', '.join(names)}")
    runs = [read_run(Path(name)) for name in names]
    output = (
        Path(args.output) if args.output else (runs[0].path if len(runs) == 1 else Path()) / "report.html"
    )
    groups = experiments(runs)
    figures = draw_figures(groups, output.with_name(f"{output.stem}_figures"))
    write_atomically(output, report_page(runs, groups, figures))
    for run in runs:
        print(f"{run.name}: {run.state}")
        for line in warnings_of(run):
            print(f"  warning: {line}")
    print(f"wrote {output}: open it in a browser; figures are in {figures[0].svg.parent}")
