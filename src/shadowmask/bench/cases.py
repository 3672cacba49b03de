"""One measurement, alone in its process: ``python -m shadowmask.bench.cases NAME '{"workload": ...}'``.

Prints one line of JSON: seconds per stage, and the peak of resident memory above what was resident
before the measured part. Each case does its work once before the clock starts if it is short enough.
"""

from __future__ import annotations

import json
import logging
import resource
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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


class Peak:
    """Largest resident memory inside a ``with`` block above what was resident at its start."""

    def __enter__(self) -> Peak:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's own high-water mark
        self.start = resident()
        return self

    def __exit__(self, *_: Any) -> None:
        status = Path("/proc/self/status").read_text()
        high = next(line for line in status.splitlines() if line.startswith("VmHWM"))
        self.bytes = int(high.split()[1]) * 1024 - self.start


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


def _trainer_step(
    workload: Workload, trainer_kind: Any, config_kind: Any, settings: dict[str, Any]
) -> Result:
    from datasets import Dataset
    from transformers import TrainerCallback

    result: Result = {}
    with tempfile.TemporaryDirectory() as folder:
        config = config_kind(
            output_dir=folder,
            per_device_train_batch_size=workload.group_size * workload.prompts,
            num_generations=workload.group_size,
            max_completion_length=workload.completion_length,
            max_steps=2,
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
            """The second step counts: gradients and optimizer state exist then."""

            def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                peak.__enter__()
                self.started = time.perf_counter()

            def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
                result["seconds"] = time.perf_counter() - self.started
                peak.__exit__()
                result["peak_bytes"] = peak.bytes

        generate = trainer._generate_and_score_completions

        def timed(inputs: Any) -> Any:
            with clock(result, "rollout_seconds"):
                return generate(inputs)

        trainer._generate_and_score_completions = timed
        trainer.add_callback(Timer())
        trainer.train()
    result["learner_seconds"] = result["seconds"] - result["rollout_seconds"]
    return result


# -- learner ------------------------------------------------------------------------------------


def learner(workload: Workload) -> Result:
    """Forward and backward over one rollout: packed, unpacked, and packed with both tracks."""
    from shadowmask import RolloutEngine, get_evictor

    model = make_model(workload.shape)
    evictor = get_evictor("snapkv", compression_ratio=workload.compression_ratio)
    batch = RolloutEngine(model, None, evictor).generate(
        make_prompts(workload), workload.group_size, workload.completion_length, stop_token_ids=[]
    )
    model.train()
    result: Result = {}
    _learn(model, batch, True, False)  # the first pass pays for allocations and kernels
    for name, packed, teacher in (
        ("packed", True, False),
        ("both_tracks", True, True),
        ("unpacked", False, False),
    ):
        model.zero_grad()
        with Peak() as peak, clock(result, f"{name}_seconds"):
            _learn(model, batch, packed, teacher)
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
    prompts = [p for p in make_prompts(workload) for _ in range(workload.group_size)]
    ids = torch.tensor(prompts)
    settings = {"do_sample": True, "top_k": 0, "max_new_tokens": workload.completion_length}
    result: Result = {}
    with torch.no_grad(), Peak() as peak, clock(result, "seconds"):
        model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            min_new_tokens=workload.completion_length,
            **settings,
        )
    result["peak_bytes"] = peak.bytes
    return result


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
    case.__name__: case for case in (trl_step, smd_step, learner, generate_dense, rollout, decode)
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
