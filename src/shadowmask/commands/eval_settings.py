"""Settings of ``shadowmask eval``: what the user gave, what a run folder adds, and the cells that follow."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shadowmask.commands.common import DEMO_MODEL
from shadowmask.commands.errors import UserError
from shadowmask.commands.sources import Source
from shadowmask.evaluation import BATCH
from shadowmask.eviction import DEFAULT_RATIO, Evictor, evictor_from_settings, list_evictors
from shadowmask.report.matrix import DENSE
from shadowmask.tasks import list_tasks

MAX_NEW_TOKENS = 256


@dataclass
class EvalArguments:
    """Settings of ``shadowmask eval``. Defaults marked "the run's" come from a run folder, if given."""

    model: str = field(
        default=DEMO_MODEL,
        metadata={"help": "A model folder, a hub name, demo (bundled), or the folder of a training run."},
    )
    dtype: str | None = field(
        default=None, metadata={"help": "float32, bfloat16, ... Default: the run's, or float32."}
    )
    task: str | None = field(
        default=None,
        metadata={
            "help": f"{', '.join(list_tasks())}, or reasoning-gym:<data set>. Default: the run's, or recall."
        },
    )
    task_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Settings of the task as JSON. Default: the run's."}
    )
    dataset: str | None = field(
        default=None, metadata={"help": "Data of the task's schema: a hub name, a file or a folder."}
    )
    dataset_config: str | None = field(default=None, metadata={"help": "Configuration of the data set."})
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Cut longer prompts. Default: the run's, or the task's limit."}
    )
    limit: int = field(default=200, metadata={"help": "Held-out prompts; all there are, if fewer."})
    evictor: list[str] | None = field(
        default=None,
        metadata={
            "help": f"One or several: {', '.join(list_evictors())}. Dense is always run. Default: the run's, "
            "or snapkv."
        },
    )
    compression_ratio: list[float] | None = field(
        default=None,
        metadata={
            "help": "Fractions of the prompt's keys to remove, one or several. Default: the run's, or 0.5."
        },
    )
    budget: list[int] | None = field(
        default=None, metadata={"help": "One or several numbers of keys to keep per layer and KV head."}
    )
    evict_every: int | None = field(
        default=None, metadata={"help": "Also evict every so many decoded tokens. Default: the run's."}
    )
    evictor_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "More evictor settings, as JSON."}
    )
    max_new_tokens: int | None = field(
        default=None, metadata={"help": f"Longest completion. Default: the run's, or {MAX_NEW_TOKENS}."}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    seed: int | None = field(
        default=None, metadata={"help": "Which prompts, and the sampling. Default: the run's, or 0."}
    )
    batch_size: int = field(default=BATCH, metadata={"help": "Prompts that decode together."})
    kv_memory_limit: str | None = field(
        default=None, metadata={"help": "Bytes for keys and values, e.g. 8GB; prompts that do not fit wait."}
    )
    threads: int | None = field(default=None, metadata={"help": "CPU threads. Default: torch's choice."})
    save: str | None = field(
        default=None,
        metadata={
            "help": "JSON file of the results, plots beside it. Finished cells in it are not run again. "
            "Default: eval.json, in the run folder if there is one."
        },
    )


# ours -> the name in a training run's config
OF_THE_RUN = {
    **{name: name for name in ("dtype", "task", "task_kwargs", "dataset", "dataset_config", "seed")},
    **{name: name for name in ("max_prompt_tokens", "evict_every", "kv_memory_limit")},
    "max_new_tokens": "max_completion_length",
}


@dataclass(frozen=True)
class Cell:
    """One column of the comparison: an evictor under one budget."""

    name: str
    evictor: Evictor
    evict_every: int | None


def take_defaults(args: EvalArguments, source: Source) -> None:
    """Fill what the command line left open: from the run, then with our own defaults.

    Raises:
        UserError: the run had no registered task, and none is given.
    """
    run = dict(source.settings)
    if source.run and not args.task and not run.get("task"):
        raise UserError(f"run {source.run} trained on data of its own: name a --task to evaluate it on")
    if args.task and args.task != run.get("task"):
        for name in ("task_kwargs", "dataset", "dataset_config", "max_prompt_tokens"):
            run.pop(name, None)  # they belong to the run's task
    for name, theirs in OF_THE_RUN.items():
        if getattr(args, name) is None:
            setattr(args, name, run.get(theirs))
    if args.evictor is None:
        args.evictor = [run.get("evictor", "snapkv")]
        args.evictor_kwargs = args.evictor_kwargs or run.get("evictor_kwargs")
    if args.compression_ratio is None and args.budget is None:
        size = {name: run.get(name) for name in ("compression_ratio", "budget")}
        args.compression_ratio = None if size["compression_ratio"] is None else [size["compression_ratio"]]
        args.budget = None if size["budget"] is None else [size["budget"]]
    if args.compression_ratio is None and args.budget is None:
        args.compression_ratio = [DEFAULT_RATIO]
    if isinstance(args.evictor_kwargs, str):
        with suppress(json.JSONDecodeError):  # what is no JSON is named where evictors are made
            args.evictor_kwargs = json.loads(args.evictor_kwargs)
    args.task = args.task or "recall"
    args.dtype = args.dtype or "float32"
    args.seed = args.seed or 0
    args.max_new_tokens = args.max_new_tokens or MAX_NEW_TOKENS


def make_cells(args: EvalArguments) -> list[Cell]:
    """Dense first, then every evictor under every ratio and budget. A ratio of 0 is dense.

    Raises:
        ValueError: an unknown evictor, or a setting that it does not take.
    """
    cells = {DENSE: Cell(DENSE, evictor_from_settings(DENSE, None, None, None), None)}
    sizes: list[tuple[int | None, float | None]] = [(None, ratio) for ratio in args.compression_ratio or ()]
    sizes += [(budget, None) for budget in args.budget or ()]
    for name in args.evictor or ():
        if name == DENSE:
            continue
        for budget, ratio in sizes:
            evictor = evictor_from_settings(name, budget, ratio, args.evictor_kwargs)
            if ratio != 0:
                size = f"compression_ratio={ratio:g}" if budget is None else f"budget={budget}"
                cells[f"{name} {size}"] = Cell(f"{name} {size}", evictor, args.evict_every)
    return list(cells.values())
