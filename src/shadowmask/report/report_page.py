"""The page of ``shadowmask report``: figures, warnings, settings and completions of one or more runs."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Iterable, Sequence
from typing import Any

from shadowmask.report.advice import warnings_of
from shadowmask.report.figures import Drawn
from shadowmask.report.page import fill, part
from shadowmask.report.runs import Experiment, Run, differences

MOST_SAMPLES = 120  # completions of a run on the page; samples.jsonl has all

escape = html.escape


def report_page(runs: Sequence[Run], experiments: Sequence[Experiment], figures: Sequence[Drawn]) -> str:
    """The whole page as text. Everything that comes from a run is escaped."""
    title = "shadowmask report: " + ", ".join(run.name for run in runs)
    return fill(
        "report.html",
        title=escape(title),
        style=part("common.css") + part("report.css"),
        runs=_runs(runs, experiments),
        warnings="".join(_warnings(run, len(runs) > 1) for run in runs),
        figures="".join(map(_figure, figures)),
        accuracies=_accuracies(runs),
        settings=_settings(runs),
        samples="".join(map(_samples, runs)),
    )


def _runs(runs: Sequence[Run], experiments: Sequence[Experiment]) -> str:
    of_run = {run.name: experiment.name for experiment in experiments for run in experiment.runs}
    rows = [
        [run.name, run.state, of_run[run.name], *map(run.settings.get, ("seed", "evictor")), code(run)]
        for run in runs
    ]
    return table(("run", "state", "line in the figures", "seed", "evictor", "code"), rows)


def code(run: Run) -> str | None:
    """The commit that ran, or the version where no commit is known."""
    return run.versions.get("git_commit") or run.versions.get("shadowmask")


def _warnings(run: Run, several: bool) -> str:
    lines = warnings_of(run)
    name = f"<h3>{escape(run.name)}</h3>" if several else ""
    if not lines:
        return f"{name}<p>Nothing to warn of.</p>"
    return name + "<ul>" + "".join(f'<li class="warning">{escape(line)}</li>' for line in lines) + "</ul>"


def _figure(drawn: Drawn) -> str:
    data = base64.b64encode(drawn.svg.read_bytes()).decode()
    alt = escape(f"{drawn.title}. {drawn.latest}")
    return (
        f'<figure id="{escape(drawn.name)}"><img alt="{alt}" src="data:image/svg+xml;base64,{data}">'
        f'<figcaption>{escape(drawn.meaning)} <span class="quiet">{escape(drawn.latest)}</span></figcaption>'
        "</figure>"
    )


def _accuracies(runs: Sequence[Run]) -> str:
    rows = []
    for run in runs:
        for cache in dict.fromkeys(c for measured in run.accuracies.values() for c in measured):
            before, after = (run.accuracies[moment].get(cache) for moment in ("before", "after"))
            rows.append([run.name, cache, *(_plus_minus(value) for value in (before, after))])
    if not rows:
        return "<p>No held-out prompts were answered (eval_size).</p>"
    return table(("run", "cache", "before", "after"), rows)


def _plus_minus(value: tuple[float, float] | None) -> str:
    return "not yet" if value is None else f"{value[0]:.3f} ± {value[1]:.3f}"


def _settings(runs: Sequence[Run]) -> str:
    names = [run.name for run in runs]
    content = ""
    if len(runs) > 1:
        different = differences(runs)
        content = "<h3>What differs</h3>" + (
            table(("setting", *names), [[key, *map(_value, row)] for key, row in different.items()])
            if different
            else "<p>Nothing: the settings are the same.</p>"
        )
    known = list(dict.fromkeys(key for run in runs for key in run.settings))
    rows = [[key, *(_value(run.settings.get(key)) for run in runs)] for key in known]
    return (
        f"{content}<details><summary>all {len(rows)} settings</summary>"
        f"{table(('setting', *names), rows)}</details>"
    )


def _value(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _samples(run: Run) -> str:
    """Completions over time, the prompt folded away; evenly thinned out in a long run."""
    every = -(-len(run.samples) // MOST_SAMPLES) or 1
    shown = run.samples[::every]
    if not shown:
        return f"<h3>{escape(run.name)}</h3><p>No completions were saved.</p>"
    note = "" if every == 1 else f" (every {every}th of {len(run.samples)})"
    look = (
        f'<p>Token by token: <code>shadowmask inspect "{escape(run.name)}" --step N</code>, N one of '
        f"{', '.join(map(str, run.saved_steps))}.</p>"
        if run.saved_steps
        else ""
    )
    rows = "".join(
        f"<tr><td>{sample['step']}</td><td>{escape(_rewards(sample))}</td>"
        f'<td class="said">{escape(_text(sample.get("completion")))}</td>'
        f"<td><details><summary>prompt</summary><pre>{escape(_text(sample.get('prompt')))}</pre></details></td>"
        "</tr>"
        for sample in shown
    )
    head = "<tr><th>step</th><th>reward</th><th>completion</th><th></th></tr>"
    return f"<h3>{escape(run.name)}{note}</h3>{look}<div class='wide'><table>{head}{rows}</table></div>"


def _rewards(sample: dict[str, Any]) -> str:
    rewards = sample.get("rewards") or {}
    if len(rewards) == 1:
        return _number(next(iter(rewards.values())))
    return ", ".join(f"{name} {_number(value)}" for name, value in rewards.items())


def _number(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, int | float) else "none"


def _text(content: Any) -> str:
    """Text, or the messages of a chat one after another."""
    if isinstance(content, list):
        return "\n".join(f"{m.get('role')}: {m.get('content')}" for m in content if isinstance(m, dict))
    return str(content or "")


def table(head: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """An HTML table; all cells are escaped."""
    top = "".join(f"<th>{escape(name)}</th>" for name in head)
    body = "".join(
        "<tr>" + "".join(f"<td>{escape('' if cell is None else str(cell))}</td>" for cell in row) + "</tr>"
        for row in rows
    )
    return f"<div class='wide'><table><tr>{top}</tr>{body}</table></div>"
