"""One measurement, alone in its process: ``python -m shadowmask.bench.cases NAME '{"workload": ...}'``.

Prints one line of JSON: seconds per stage, and the peak of resident memory above what was resident
before the measured part. Each case does its work once before the clock starts if it is short enough.
"""

from __future__ import annotations

import json
import logging
import mmap
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shadowmask.bench.workload import (
    Workload,
    make_model,
    make_prompts,
    make_tokenizer,
    prompt_texts,
    varied_reward,
)

Result = dict[str, float]


@contextmanager
def clock(result: Result, name: str) -> Iterator[None]:
    started = time.perf_counter()
    yield
    result[name] = time.perf_counter() - started


def resident() -> int:
    """Bytes of memory that are resident now (Linux)."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * resource.getpagesize()


MEASURED_STEPS = 2  # after one that warms up


class Peak:
    """Largest resident memory inside a ``with`` block above what was resident at its start."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's own high-water mark
        self.start = resident()
        return self

    def __exit__(self, *_: Any) -> None:
        status = Path("/proc/self/status").read_text()
        high = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        # the kernel counts pages: what fits memory that was free already is "less than one"
        self.bytes = max(int(high.split()[1]) * 1024 - self.start, mmap.PAGESIZE)


# -- training steps -----------------------------------------------------------------------------


def trl_step(workload: Workload) -> Result:
    """One optimizer step of stock TRL GRPO."""
    from trl import GRPOConfig, GRPOTrainer

    return _trainer_step(workload, GRPOTrainer, GRPOConfig, {})


def smd_step(workload: Workload) -> Result:
    """One optimizer step of SMDTrainer: evicted rollout, shadow and dense track, KL."""
    from shadowmask.trl import SMDConfig, SMDTrainer

    settings = {"compression_ratio": workload.compression_ratio}
    return _trainer_step(workload, SMDTrainer, SMDConfig, settings)


@contextmanager
def stages(trainer: Any, result: Result) -> Iterator[None]:
    """Time what a step of SMDTrainer consists of, summed over calls."""
    from shadowmask.sampler import Sampler

    def timed(owner: Any, name: str, stage: str) -> None:
        original = getattr(owner, name)

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                result[stage] = result.get(stage, 0.0) + time.perf_counter() - started

        setattr(owner, name, wrapper)

    kept = Sampler._prefill, Sampler._step
    timed(Sampler, "_prefill", "stage prefill")
    timed(Sampler, "_step", "stage decode")
    timed(trainer, "_compute_loss", "stage forward, both tracks and head")
    timed(trainer.accelerator, "backward", "stage backward")
    try:
        yield
    finally:
        Sampler._prefill, Sampler._step = kept  # type: ignore[method-assign]


def _trainer_step(
    workload: Workload, trainer_kind: Any, config_kind: Any, settings: dict[str, Any]
) -> Result:
    from datasets import Dataset
    from transformers import TrainerCallback

    step: Result = {}  # of the step at hand
    steps: list[Result] = []
    with tempfile.TemporaryDirectory() as folder:
        config = config_kind(
            output_dir=folder,
            per_device_train_batch_size=workload.group_size * workload.prompts,
            num_generations=workload.group_size,
            max_completion_length=workload.completion_length,
            max_steps=1 + MEASURED_STEPS,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            seed=workload.seed,
            **settings,
        )
        texts = prompt_texts(workload)
        trainer = trainer_kind(
            make_model(workload.shape),
            [varied_reward],
            config,
            Dataset.from_dict({"prompt": texts * 2}),
            processing_class=make_tokenizer(workload.shape),
        )
        peak = Peak()

        class Timer(TrainerCallback):
            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step.clear()
                peak.__enter__()
                self.started = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                step["seconds"] = time.perf_counter() - self.started
                peak.__exit__()
                steps.append(step | {"peak_bytes": peak.bytes})

        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            with clock(step, "rollout_seconds"):
                return generate(inputs)

        trainer._generate_and_score_completions = timed
        trainer.add_callback(Timer())
        with stages(trainer, step) if settings else nullcontext():
            trainer.train()
    # gradients and optimizer state exist from the second step on; the fastest was disturbed the least
    result = min(steps[1:], key=lambda step: step["seconds"])
    result["peak_bytes"] = max(step["peak_bytes"] for step in steps[1:])
    if settings:
        known = sum(seconds for name, seconds in result.items() if name.startswith("stage "))
        result["stage rewards, optimizer, rest"] = result["seconds"] - known
    result["learner_seconds"] = result["seconds"] - result["rollout_seconds"]
    return result


# -- learner ------------------------------------------------------------------------------------


def learner(workload: Workload) -> Result:
    """Forward and backward over one rollout: packed, unpacked, and packed with both tracks."""
    from shadowmask import RolloutEngine, get_evictor

    model = make_model(workload.shape)
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    engine = RolloutEngine(model, None, evictor)
    result: Result = {}
    engine.generate(make_prompts(workload), 1, 2, stop_token_ids=[])
    with clock(result, "rollout_seconds"):
        batch = engine.generate(
            make_prompts(workload), workload.group_size, workload.completion_length, stop_token_ids=[]
        )
    model.train()
    _learn(model, batch, True, True)  # the first pass pays for allocations and kernels
    passes = [("packed", True, False), ("both_tracks", True, True)] * 2 + [("unpacked", False, False)]
    for name, packed, teacher in passes:
        model.zero_grad()
        timing: Result = {}
        with Peak() as peak, clock(timing, "seconds"):
            _learn(model, batch, packed, teacher)
        # the same work twice: the faster pass is the one that was disturbed less
        result[f"{name}_seconds"] = min(timing["seconds"], result.get(f"{name}_seconds", timing["seconds"]))
        result[f"{name}_peak_bytes"] = peak.bytes
    return result


def _learn(model: nn.Module, batch: Any, packed: bool, teacher: bool) -> None:
    from shadowmask.packing import pack
    from shadowmask.scoring import score_packed

    prompts, completions = batch.prompts_per_completion, batch.completion_ids
    everything = list(range(len(completions)))
    for rows in [everything] if packed else [[n] for n in everything]:
        layout = pack([prompts[n] for n in rows], [completions[n] for n in rows])
        stats = score_packed(model, layout, batch.shadow[rows], batch.temperature, teacher)
        loss = -stats.logprobs.mean() + (0.1 * stats.kl.mean() if stats.kl is not None else 0.0)
        loss.backward()


# -- rollout ------------------------------------------------------------------------------------


def generate_dense(workload: Workload) -> Result:
    """``model.generate`` of transformers on the same prompts, repeated for the group."""
    model = make_model(workload.shape).eval()
    result: Result = {}
    with Peak() as peak, clock(result, "seconds"):
        _generate(model, workload)
    result["peak_bytes"] = peak.bytes
    return result


def generate_memory(workload: Workload) -> Result:
    """The same, for its memory alone."""
    return generate_dense(workload)


@torch.no_grad()
def _generate(model: Any, workload: Workload) -> None:
    ids = torch.tensor([p for p in make_prompts(workload) for _ in range(workload.group_size)])
    attention = model.config._attn_implementation
    model.set_attn_implementation("sdpa")  # its own, also if ours was installed before
    model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        do_sample=True,
        top_k=0,
        max_new_tokens=workload.completion_length,
        min_new_tokens=workload.completion_length,
    )
    model.set_attn_implementation(attention)


def rollout(workload: Workload) -> Result:
    """Our engine, prompt-only eviction."""
    from shadowmask import RolloutEngine, get_evictor

    model = make_model(workload.shape).eval()
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    engine = RolloutEngine(model, None, evictor)
    result: Result = {}
    with Peak() as peak, clock(result, "seconds"):
        batch = engine.generate(
            make_prompts(workload), workload.group_size, workload.completion_length, stop_token_ids=[]
        )
    result["peak_bytes"] = peak.bytes
    result["kv_bytes_peak"] = batch.kv_bytes_peak
    result["kv_bytes_dense"] = batch.kv_bytes_dense
    result["kv_bytes_unshared"] = batch.kv_bytes_unshared
    return result


def rollout_memory(workload: Workload) -> Result:
    """Resident memory of a rollout at its highest, beside what the formula says."""
    from shadowmask import RolloutEngine, get_evictor

    model = make_model(workload.shape).eval()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    engine = RolloutEngine(model, None, evictor)
    # a short one first: libraries allocate their work space once
    engine.generate(make_prompts(replace(workload, prompt_length=64)), 1, 2, stop_token_ids=[])
    with Peak() as peak:
        batch = engine.generate(
            make_prompts(workload), workload.group_size, workload.completion_length, stop_token_ids=[]
        )
    return {
        "weights_bytes": weights,
        "peak_bytes": peak.bytes,
        "kv_bytes_peak": batch.kv_bytes_peak,
        "kv_bytes_dense": batch.kv_bytes_dense,
        "kv_bytes_unshared": batch.kv_bytes_unshared,
    }


# -- eviction and learner by slicing tensors --------------------------------------------------------


def slicing(workload: Workload) -> Result:
    """Peaks of evicting a dense cache by gathering what stays, and of a learner that does the same."""
    from shadowmask import RolloutEngine, get_evictor
    from shadowmask.bench import slicing as by

    model = make_model(workload.shape)
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    engine = RolloutEngine(model, None, evictor)
    batch = engine.generate(
        make_prompts(workload), workload.group_size, workload.completion_length, stop_token_ids=[]
    )
    prompt = torch.tensor(batch.prompts_per_completion[0])
    keep = by.kept_keys(batch.shadow[0].evicted_at, len(prompt))
    result: Result = {}
    for name in ("evict_copy", "evict_by_layer"):
        cache = by.make_cache(model, len(prompt), workload.group_size)
        result["cache_bytes"] = float(sum(t.numel() * t.element_size() for layer in cache for t in layer))
        with Peak() as peak:
            cache = getattr(by, name)(cache, keep)
        result[f"{name}_peak_bytes"] = peak.bytes
        del cache

    def learn(number: int) -> None:
        completion = torch.tensor(batch.completion_ids[number])
        logprobs, student = by.sliced_logprobs(model, prompt, completion, keep)
        teacher = by.dense_distribution(model, prompt, completion)
        kl = (teacher.exp() * (teacher - student)).sum(-1)
        (-logprobs.mean() + 0.1 * kl.mean()).backward()

    model.train()
    learn(0)  # allocations and gradients
    with Peak() as peak, clock(result, "sliced_seconds"):
        for number in range(len(batch.completion_ids)):
            learn(number)
    result["sliced_peak_bytes"] = peak.bytes
    return result


def scaling_point(workload: Workload) -> Result:
    """Everything at one point of a sweep: generate, our rollout, the learner unpacked and packed, bytes."""
    from shadowmask import RolloutEngine, get_evictor

    model = make_model(workload.shape).eval()
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    engine = RolloutEngine(model, None, evictor)
    prompts = make_prompts(workload)
    engine.generate([prompts[0][:64]], 1, 2, stop_token_ids=[])
    result: Result = {}
    with clock(result, "rollout_seconds"):
        batch = engine.generate(prompts, workload.group_size, workload.completion_length, stop_token_ids=[])
    result |= {
        "kv_bytes_peak": batch.kv_bytes_peak,
        "kv_bytes_dense": batch.kv_bytes_dense,
        "kv_bytes_unshared": batch.kv_bytes_unshared,
    }
    with clock(result, "generate_seconds"):
        _generate(model, workload)
    model.train()
    _learn(model, batch, True, False)
    for name, packed in (("packed", True), ("unpacked", False)):
        model.zero_grad()
        with clock(result, f"{name}_seconds"):
            _learn(model, batch, packed, False)
    return result


def decode(workload: Workload) -> Result:
    """Seconds per decode step after the prefill, with a budget that does not depend on the prompt."""
    from shadowmask import RolloutEngine, get_evictor

    budget = 512
    engine = RolloutEngine(make_model(workload.shape).eval(), None, get_evictor("snapkv", budget=budget))
    totals = []
    for tokens in (1, workload.completion_length + 1):
        started = time.perf_counter()
        engine.generate(make_prompts(workload), workload.group_size, tokens, stop_token_ids=[])
        totals.append(time.perf_counter() - started)
    return {"seconds_per_step": (totals[1] - totals[0]) / workload.completion_length}


CASES: dict[str, Callable[[Workload], Result]] = {
    case.__name__: case
    for case in (
        trl_step,
        smd_step,
        learner,
        generate_dense,
        generate_memory,
        rollout,
        rollout_memory,
        slicing,
        scaling_point,
        decode,
    )
}


def main() -> None:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    name, settings = sys.argv[1], json.loads(sys.argv[2])
    threads = settings.pop("threads", None)
    if threads:
        torch.set_num_threads(threads)
    result = CASES[name](Workload(**settings))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
