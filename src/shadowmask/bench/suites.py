"""What ``shadowmask bench`` compares with what: each suite measures its cases and says the ratios."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple

from shadowmask.bench.workload import SHAPES, SWEEPS, Workload

SHORT_PROMPT, LONG_PROMPT = 1024, 8192

Figures = dict[str, float]
Measure = Callable[..., Figures]  # case, changes of the workload -> what was measured
UNITS = {"s": (1.0, 1), "ms": (1e3, 0), "MB": (1e-6, 0), "GB": (1e-9, 2)}  # factor, digits


class Row(NamedTuple):
    """One figure: what it is, what it is made up of, the ratio, what is hoped for."""

    what: str
    made_up_of: str
    ratio: float
    aim: str


def ratio(what: str, numerator: float, denominator: float, unit: str = "s", aim: str = "") -> Row:
    """A row from two measurements in seconds or bytes, printed in ``unit``."""
    factor, digits = UNITS[unit]
    over, under = (f"{value * factor:.{digits}f}" for value in (numerator, denominator))
    return Row(what, f"{over} / {under} {unit}", numerator / denominator, aim)


def step(workload: Workload, measure: Measure) -> list[Row]:
    ours, theirs = measure("smd_step"), measure("trl_step")
    return [
        ratio("training step, stock TRL / SMD", theirs["seconds"], ours["seconds"], aim=">= 5"),
        ratio("  rollout", theirs["rollout_seconds"], ours["rollout_seconds"]),
        ratio("  learner", theirs["learner_seconds"], ours["learner_seconds"]),
        ratio(
            "peak memory of a step, SMD / stock TRL",
            ours["peak_bytes"],
            theirs["peak_bytes"],
            "GB",
            "<= 0.35",
        ),
        *(
            ratio(f"  our {name.removeprefix('stage ')} / step", seconds, ours["seconds"])
            for name, seconds in ours.items()
            if name.startswith("stage ")
        ),
    ]


def learner(workload: Workload, measure: Measure) -> list[Row]:
    got = measure("learner")
    one, both, apart = (got[f"{name}_seconds"] for name in ("packed", "both_tracks", "unpacked"))
    sampling = got["rollout_seconds"]
    long_prompt = workload.completion_length < workload.prompt_length
    return [
        ratio("learner, unpacked / packed", apart, one, aim=f">= {0.85 * workload.rho:.2f}"),
        ratio("learner, both tracks + KL / one track", both, one),
        ratio(
            "rollout + learner, both tracks + KL / one track",
            sampling + both,
            sampling + one,
            aim="<= 1.10" if long_prompt else "<= 1.25",
        ),
        ratio(
            "learner above weights, both tracks + KL / one track",
            got["both_tracks_peak_bytes"],
            got["packed_peak_bytes"],
            "MB",
        ),
    ]


def rollout(workload: Workload, measure: Measure) -> list[Row]:
    dense, ours = measure("generate_dense"), measure("rollout")
    short, long = (
        measure("decode", prompts=1, prompt_length=length)["seconds_per_step"]
        for length in (SHORT_PROMPT, LONG_PROMPT)
    )
    quarter = measure("rollout", compression_ratio=0.75)
    alone = measure("rollout", compression_ratio=0.75, prompts=1, group_size=1, completion_length=32)
    layer = 1 / SHAPES[workload.shape]["num_hidden_layers"]
    return [
        ratio("rollout, generate / ours", dense["seconds"], ours["seconds"], aim=">= 4"),
        ratio(f"decode step, prompt {LONG_PROMPT} / {SHORT_PROMPT}", long, short, "ms", "<= 1.1"),
        ratio(
            "KV bytes, 75 % removed / generate's cache",
            quarter["kv_bytes_peak"],
            quarter["kv_bytes_unshared"],
            "MB",
            "<= 0.27",
        ),
        ratio(
            "KV bytes, 75 % removed / dense, one sequence",
            alone["kv_bytes_peak"],
            alone["kv_bytes_dense"],
            "MB",
            f"<= 0.27 + {layer:.2f}",
        ),
    ]


def memory(workload: Workload, measure: Measure) -> list[Row]:
    ours = measure("rollout_memory")
    long = measure("rollout_memory", prompts=1, prompt_length=LONG_PROMPT, group_size=4)
    few = {"completion_length": 16}  # generate copies its cache at every token
    short, theirs = measure("rollout_memory", **few), measure("generate_memory", **few)

    def against_formula(what: str, got: Figures, aim: str = "") -> Row:
        weights = got["weights_bytes"]
        return ratio(
            f"rollout of {what}, peak / weights + KV formula",
            weights + got["peak_bytes"],
            weights + got["kv_bytes_peak"],
            "MB",
            aim,
        )

    return [
        against_formula("the workload", ours, "<= 1.05"),
        against_formula(f"one prompt of {LONG_PROMPT}", long),
        ratio(
            "rollout of 16 tokens above weights, ours / generate",
            short["peak_bytes"],
            theirs["peak_bytes"],
            "MB",
        ),
        ratio(
            "KV bytes by formula, ours / dense in the same layout",
            ours["kv_bytes_peak"],
            ours["kv_bytes_dense"],
            "MB",
        ),
    ]


def slicing(workload: Workload, measure: Measure) -> list[Row]:
    """What our eviction and replay cost beside gathering the kept keys into new tensors."""
    apart, ours, held = measure("slicing"), measure("learner"), measure("rollout_memory")
    dense = apart["cache_bytes"]

    def evicted(what: str, extra: float) -> Row:
        return ratio(f"{what}, peak of the cache / dense cache", dense + extra, dense, "MB")

    return [
        evicted("evict into a whole new cache", apart["evict_copy_peak_bytes"]),
        evicted("evict layer by layer", apart["evict_by_layer_peak_bytes"]),
        ratio("ours: rollout's KV at its peak / dense cache", held["kv_bytes_peak"], dense, "MB"),
        ratio(
            "learner above weights, by replay / by slicing",
            ours["both_tracks_peak_bytes"],
            apart["sliced_peak_bytes"],
            "MB",
        ),
        ratio("learner, by slicing / by replay", apart["sliced_seconds"], ours["both_tracks_seconds"]),
    ]


def scaling(workload: Workload, measure: Measure) -> list[Row]:
    """One process per point; the rows are generate / ours, unpacked / packed and ours / dense bytes."""
    rows: list[Row] = []
    for axis, values in SWEEPS.items():
        for value in values:
            change: dict[str, Any] = {axis: value}
            got, at = measure("scaling_point", **change), f"{axis}={value}"
            rho = f"rho {replace(workload, **change).rho:.2f}"
            bytes_of = got["kv_bytes_peak"], got["kv_bytes_unshared"]
            rows += [
                ratio(f"{at}: rollout, generate / ours", got["generate_seconds"], got["rollout_seconds"]),
                ratio(
                    f"{at}: learner, unpacked / packed",
                    got["unpacked_seconds"],
                    got["packed_seconds"],
                    aim=rho,
                ),
                ratio(f"{at}: KV bytes, ours / generate's", *bytes_of, "MB"),
            ]
    return rows


SUITES: dict[str, Callable[[Workload, Measure], list[Row]]] = {
    suite.__name__: suite for suite in (step, learner, rollout, memory, slicing, scaling)
}
