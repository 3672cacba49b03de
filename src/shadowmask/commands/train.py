"""``shadowmask train``: prompts -> evicted rollouts -> rewards -> replay and distillation -> a run folder.

Without arguments it trains the bundled real model on long-prompt recall with half of its KV cache
evicted (``configs/demo.yaml``): supervised warm-up (cached), held-out accuracy dense and under the
training cache, RL, held-out accuracy again.
"""

from __future__ import annotations

import dataclasses
import importlib.resources
import inspect
import json
import os
import shlex
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from rich.console import Console
from transformers import PreTrainedModel, PrinterCallback

from shadowmask.commands.callbacks import Recorder, StopOnInterrupt
from shadowmask.commands.common import COMMON, DEMO_MODEL, load_model, parse, split_equals
from shadowmask.commands.data import load_data
from shadowmask.commands.errors import Interrupted, UserError
from shadowmask.corrections import get_method
from shadowmask.demo.evaluate import Accuracy, greedy_accuracy
from shadowmask.demo.model import load_saved
from shadowmask.demo.pocket import POCKET_MODEL, pocket_model_path
from shadowmask.demo.warmup import WarmupRecipe, warm_model_path
from shadowmask.eviction import Evictor, evictor_from_settings, get_evictor
from shadowmask.eviction.dense import DenseEvictor
from shadowmask.models import base_model
from shadowmask.report.plots import plot_run
from shadowmask.report.progress import ProgressDisplay
from shadowmask.report.run_folder import MutedRunFolder, RunFolder, last_checkpoint
from shadowmask.tasks import RecallTask, list_tasks
from shadowmask.trl import SMDConfig, SMDTrainer
from shadowmask.trl.guards import DenseGuard
from trl import ModelConfig, get_peft_config

ABOUT = """Train a model by RL with evicted rollouts that the learner replays. Without --config and
--model_name_or_path it runs the CPU demo on the bundled model. Every setting of TRL's GRPOConfig works."""


@dataclass
class ReplayableModelConfig(ModelConfig):
    """TRL's, with LoRA's dropout off: what is dropped in the learner was not dropped in the sampler."""

    lora_dropout: float = field(default=0.0, metadata={"help": "LoRA dropout; replay needs 0."})


@dataclass
class TrainArguments:
    """What to train on. Settings of the method are in ``SMDConfig``."""

    task: str | None = field(
        default=None,
        metadata={"help": f"A built-in task: {', '.join(list_tasks())}, or reasoning-gym:<data set>."},
    )
    task_kwargs: dict[str, Any] | str | None = field(
        default=None, metadata={"help": "Settings of the task as JSON, e.g. '{\"num_facts\": 8}'."}
    )
    dataset: str | None = field(
        default=None,
        metadata={
            "help": "A hub name, or a .jsonl, .json or .parquet file or folder: data of the task's schema, "
            "or without a task, of your own with a prompt column."
        },
    )
    dataset_config: str | None = field(
        default=None, metadata={"help": "Configuration of the data set, where it has several."}
    )
    dataset_split: str = field(default="train", metadata={"help": "Split of the data set."})
    reward: str | None = field(
        default=None, metadata={"help": "Reward as module:function or path.py:function, in TRL's signature."}
    )
    max_prompt_tokens: int | None = field(
        default=None, metadata={"help": "Cut longer prompts and say so. Default: the task's limit, or none."}
    )
    train_size: int = field(
        default=1024, metadata={"help": "Prompts of a task to train on; all it has, if fewer."}
    )
    eval_size: int = field(
        default=0,
        metadata={"help": "Held-out prompts, answered greedily before and after the run. 0: none."},
    )
    eval_before: bool = field(
        default=True, metadata={"help": "Answer the held-out prompts before the run too, not only after it."}
    )
    eval_caches: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "More caches to answer the held-out prompts under after the run, as JSON, e.g. "
            '\'{"r70": {"evictor": "random", "compression_ratio": 0.7}}\'.'
        },
    )
    dense_guard_every: int = field(
        default=0,
        metadata={"help": "Measure held-out dense accuracy every so many steps, warn if it falls. 0: no."},
    )
    dense_guard_drop: float = field(
        default=0.05, metadata={"help": "Fall of dense accuracy below its start that the guard acts on."}
    )
    dense_guard_stop: bool = field(
        default=False, metadata={"help": "Stop the run when the guard warns; it ends as if it were complete."}
    )
    warmup_sft_steps: int = field(
        default=0,
        metadata={"help": "Supervised steps of the bundled model on its task before RL (cached)."},
    )
    saved_samples: int = field(
        default=4,
        metadata={
            "help": "Steps, spread evenly over the run, of which a prompt's best and worst completion are "
            "saved with their records for `shadowmask inspect`. 0: none."
        },
    )
    plot: bool = field(default=True, metadata={"help": "Draw run.png at the end."})
    threads: int | None = field(default=None, metadata={"help": "CPU threads. Default: torch's choice."})
    resume: bool = field(default=False, metadata={"help": "Go on with the run in --output_dir."})


def main(argv: Sequence[str]) -> None:
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    # TRL 1.16 uses old names of transformers 5.24; nothing that the reader of a run could change
    warnings.filterwarnings("ignore", category=FutureWarning)
    args, config, model_config = parse_settings(_with_defaults(split_equals(argv)))
    config.disable_tqdm = True  # our own display shows the progress
    config.dataloader_pin_memory = torch.cuda.is_available()
    Run(args, config, model_config).run()


def parse_settings(argv: Sequence[str]) -> tuple[TrainArguments, SMDConfig, ModelConfig]:
    """The settings that flags describe.

    Raises:
        UserError: an unknown flag. ValueError: a value that cannot be.
    """
    kinds = [TrainArguments, SMDConfig, ReplayableModelConfig]
    args, config, model_config = parse(kinds, list(argv), "train", ABOUT)
    extra_caches(args.eval_caches)
    return args, config, model_config


def extra_caches(given: dict[str, Any] | str | None) -> dict[str, tuple[Evictor, int | None]]:
    """Evictor and ``evict_every`` of every cache in ``eval_caches``.

    Raises:
        UserError: names the cache.
    """
    try:
        caches = json.loads(given) if isinstance(given, str) else given or {}
        if not isinstance(caches, dict):
            raise ValueError("it must map names to caches")
        return {name: _cache(**settings) for name, settings in caches.items()}
    except (ValueError, TypeError) as error:
        raise UserError(f"eval_caches={given!r}: {error}") from error


def _cache(
    evictor: str = "snapkv",
    budget: int | None = None,
    compression_ratio: float | None = None,
    evict_every: int | None = None,
    evictor_kwargs: dict[str, Any] | str | None = None,
) -> tuple[Evictor, int | None]:
    return evictor_from_settings(evictor, budget, compression_ratio, evictor_kwargs), evict_every


def _with_defaults(argv: list[str]) -> list[str]:
    """A resumed run takes its own settings; a run without model or config takes the demo's."""
    if {"--config", "--help", "-h"} & set(argv):
        return argv
    if "--resume" in argv:
        if "--output_dir" not in argv[:-1]:
            raise UserError("--resume needs the run's folder: --output_dir runs/...")
        own = Path(argv[argv.index("--output_dir") + 1]) / "config.yaml"
        if not own.is_file():
            raise UserError(f"--resume: {own.parent} is not a run folder (it has no config.yaml)")
        return ["--config", str(own), *argv]
    if "--model_name_or_path" in argv or ("--dataset" in argv and "--task" not in argv):
        return argv
    demo = importlib.resources.files("shadowmask") / "configs" / "demo.yaml"
    defaults = ["--config", str(demo)]
    if "--output_dir" not in argv:
        defaults += ["--output_dir", str(_free_folder(Path("runs/demo")))]
    if "--task" in argv[:-1] and argv[argv.index("--task") + 1] != RecallTask.name:
        defaults += ["--task_kwargs", "{}", "--warmup_sft_steps", "0"]  # the demo's are for its own task
    return [*defaults, *argv]


def _free_folder(wanted: Path) -> Path:
    """``runs/demo``, or the first of ``runs/demo-2``, ``runs/demo-3``, ... that does not exist."""
    folder, number = wanted, 1
    while folder.exists():
        number += 1
        folder = wanted.with_name(f"{wanted.name}-{number}")
    return folder


class Run:
    """One training run; ``run`` lists its stages in order."""

    def __init__(self, args: TrainArguments, config: SMDConfig, model_config: ModelConfig) -> None:
        if not model_config.model_name_or_path:
            raise UserError("name a model: --model_name_or_path with a folder, a hub name, or demo")
        if args.threads:
            torch.set_num_threads(args.threads)
        if args.saved_samples < 0:
            raise UserError(f"saved_samples={args.saved_samples} must be at least 0")
        refused = ("load_in_4bit", "load_in_8bit", "attn_implementation")
        for name in refused:
            if getattr(model_config, name):
                raise UserError(
                    f"{name}={getattr(model_config, name)!r} is not supported by the command line"
                )
        self.args, self.config, self.model_config = args, config, model_config
        if args.dense_guard_every and not args.eval_size:
            raise UserError(f"dense_guard_every={args.dense_guard_every} needs held-out prompts: eval_size")
        self.guard: DenseGuard | None = None
        self.data = load_data(args, config.seed)
        # of several processes the first one writes and speaks; the others do the same work in silence
        if int(os.environ.get("RANK", "0")) == 0:
            self.folder = RunFolder(str(config.output_dir), resume=args.resume)
            self.display = ProgressDisplay()
        else:
            self.folder = MutedRunFolder(str(config.output_dir), resume=args.resume)
            self.display = ProgressDisplay(console=Console(quiet=True))

    def run(self) -> None:
        try:
            self._run()
        except BaseException:
            self.folder.discard()
            raise

    def _run(self) -> None:
        started = time.perf_counter()
        checkpoint = last_checkpoint(self.folder.path) if self.args.resume else None
        model, tokenizer = self._load()
        self._fit_prompts(tokenizer)
        trainer = self._make_trainer(model, tokenizer)
        self._write_settings()
        self._say_method()
        before = self._evaluate(trainer, "before") if self.args.eval_before else {}
        self._guard_dense(trainer)
        with self.display:
            trainer.train(resume_from_checkpoint=checkpoint)
        stopped = self.guard is not None and self.guard.stopped
        if trainer.state.global_step < trainer.state.max_steps and not stopped:
            raise Interrupted(
                f"stopped at step {trainer.state.global_step} of {trainer.state.max_steps}; go on with: "
                f"shadowmask train --resume --output_dir {shlex.quote(str(self.folder.path))}"
            )
        after = self._evaluate(trainer, "after")
        trainer.save_model(str(self.folder.path / "final"))
        self._report(before, after, time.perf_counter() - started)

    def _say_method(self) -> None:
        method = get_method(self.config.method)
        self.display.say(f"method {self.config.method}: {method.about}")
        if not method.replays:
            self.display.say(
                "the learner ignores the record, so there is no parity to guard: sampling_gap/* is how far "
                "off-policy this method is"
            )

    def _guard_dense(self, trainer: SMDTrainer) -> None:
        if not self.args.dense_guard_every:
            return
        self.guard = DenseGuard(
            measure=lambda: self._accuracy(trainer, get_evictor("dense"), None).mean,
            every=self.args.dense_guard_every,
            drop=self.args.dense_guard_drop,
            stop=self.args.dense_guard_stop,
            log=lambda name, value: trainer._log(name, value),
            say=self.display.say,
        )
        trainer.add_callback(self.guard)

    def _write_settings(self) -> None:
        groups = (self.args, self.config, self.model_config)
        self.folder.write_config(repeatable_settings(*groups))
        self.folder.write_json(
            "resolved.json", {**all_settings(*groups), "evictor": repr(self.config.make_evictor())}
        )
        self.folder.write_versions()

    def _load(self) -> tuple[PreTrainedModel, Any]:
        name = str(self.model_config.model_name_or_path)
        steps = self.args.warmup_sft_steps
        if name == POCKET_MODEL:
            if self.data.task is None:
                raise UserError("the pocket model is trained for one of the built-in tasks: give --task")
            return load_saved(pocket_model_path(self.data.task, progress=self._show_pocket), torch.float32)
        if not steps:
            return load_model(
                name,
                self.model_config.dtype,
                self.model_config.model_revision,
                self.config.trust_remote_code,
            )
        if name != DEMO_MODEL or not isinstance(self.data.task, RecallTask):
            raise UserError(
                "warmup_sft_steps is for the bundled model and its recall task: give "
                "--model_name_or_path demo --task recall, or leave it out"
            )
        recipe = WarmupRecipe(steps=steps, seed=self.config.seed)
        path = warm_model_path(self.data.task, recipe, self._show_warmup)
        return load_model(str(path), self.model_config.dtype)

    def _fit_prompts(self, tokenizer: Any) -> None:
        """Cut the prompts to the allowed length and report what that took away."""
        self.data, reports = self.data.fitted(tokenizer, self.args.max_prompt_tokens)
        for name, report in reports.items():
            self.display.say(f"{name.replace('_', '-')} data: {report}")
        self.folder.write_json("data.json", {name: report.as_dict() for name, report in reports.items()})

    def _show_warmup(self, step: int, steps: int, loss: float) -> None:
        self.display.say(f"supervised warm-up {step}/{steps}: loss {loss:.3f}")

    def _show_pocket(self, step: int, loss: float, accuracy: float) -> None:
        self.display.say(f"pocket model, step {step}: loss {loss:.3f}, accuracy {accuracy:.2f}")

    def _make_trainer(self, model: PreTrainedModel, tokenizer: Any) -> SMDTrainer:
        facts = {
            "model": str(self.model_config.model_name_or_path),
            "evictor": repr(self.config.make_evictor()),
            "evict_every": str(self.config.evict_every or "after the prompt only"),
        }
        recorder = Recorder(self.folder, self.display, self.args.saved_samples, facts)
        trainer = SMDTrainer(
            model,
            self.data.reward,
            self.config,
            Dataset.from_list(self.data.train),
            processing_class=tokenizer,
            peft_config=get_peft_config(self.model_config),
            callbacks=[recorder, StopOnInterrupt(self.display)],
        )
        trainer.remove_callback(PrinterCallback)
        recorder.watch(trainer)
        return trainer

    def _evaluate(self, trainer: SMDTrainer, moment: str) -> dict[str, Accuracy]:
        """Greedy completions of the held-out prompts, scored dense and under the training cache."""
        if not self.data.held_out:
            return {}
        path = self.folder.path / f"accuracy_{moment}.json"
        if path.is_file():  # a resumed run measured it already
            stored = json.loads(path.read_text())
            return {name: Accuracy(**values) for name, values in stored.items()}
        config = self.config
        caches: dict[str, tuple[Evictor, int | None]] = {
            "dense": (get_evictor("dense"), None),
            "evicted": (config.make_evictor(), config.evict_every),
        }
        if moment == "after":
            caches |= extra_caches(self.args.eval_caches)
        result: dict[str, Accuracy] = {}
        for name, (evictor, every) in caches.items():
            if name == "evicted" and evictor.name == DenseEvictor.name:
                result[name] = result["dense"]
                continue
            self.display.say(f"held-out {self.data.metric} {moment} training, {name} cache ...")
            result[name] = self._accuracy(trainer, evictor, every)
        self.folder.write_json(path.name, {name: dataclasses.asdict(a) for name, a in result.items()})
        for name, accuracy in result.items():
            self.display.say(f"held-out {self.data.metric} {moment} training, {name:7} cache: {accuracy}")
        return result

    def _accuracy(self, trainer: SMDTrainer, evictor: Evictor, every: int | None) -> Accuracy:
        return greedy_accuracy(
            base_model(trainer.model),
            trainer.processing_class,
            self.data.held_out,
            self.data.score,
            evictor,
            every,
            self.config.max_completion_length,
        )

    def _report(
        self,
        before: dict[str, Accuracy],
        after: dict[str, Accuracy],
        seconds: float,
    ) -> None:
        if isinstance(self.folder, MutedRunFolder):
            return
        metrics = self.folder.read_metrics()
        marks = {name: (before[name].mean, after[name].mean) for name in before if name in after}
        if self.args.plot:
            plot_run(metrics, self.folder.path / "run.png", accuracies=marks)
        replays = get_method(self.config.method).replays
        for line in summary_lines(metrics, before, after, seconds, replays):
            self.display.say(line)
        self.display.say(f"metrics, samples, plot (run.png) and model (final/) are in {self.folder.path}")


def summary_lines(
    metrics: list[dict[str, Any]],
    before: dict[str, Accuracy],
    after: dict[str, Accuracy],
    seconds: float,
    replays: bool = True,
) -> list[str]:
    """What the run showed, in a few lines: reward, accuracy, the gaps, KV bytes, time."""
    lines = ["", f"trained {len(metrics)} logged steps in {seconds / 60:.1f} min, everything included"]
    rewards = [row["reward"] for row in metrics if row.get("reward") is not None]
    if rewards:
        third = max(len(rewards) // 3, 1)
        first, last = (sum(part) / third for part in (rewards[:third], rewards[-third:]))
        lines.append(
            f"sampled reward          {first:.3f} (first {third} steps) -> {last:.3f} (last {third})"
        )
    for name in after:
        start = f"{before[name]} -> " if name in before else ""
        lines.append(f"held-out, {name:7} cache {start}{after[name]}  (n = {after[name].prompts})")
    gaps = [row for row in metrics if row.get("sampling_gap/max") is not None]
    if gaps and not replays:
        worst = max(row["sampling_gap/max"] for row in gaps)
        ess = min(row["off_policy/ess"] for row in gaps)
        lines.append(
            f"off-policy              up to {worst:.1f} nats per token; effective sample size of the raw "
            f"ratios {ess:.3f} at its lowest: the learner is not the sampler"
        )
    elif gaps:
        worst = max(row["sampling_gap/max"] for row in gaps)
        p99 = sum(row["sampling_gap/p99"] for row in gaps) / len(gaps)
        lines.append(
            f"sampling gap            max {worst:.1e}, p99 {p99:.1e} (mean of steps) nats: learner = sampler"
        )
    naive = [row for row in metrics if row.get("information_gap/max") is not None]
    if naive and replays:
        off = max(row["information_gap/max"] for row in naive)
        tail = min(row["information_gap/agreement_p5"] for row in naive)
        lines.append(
            f"a dense learner         would have been off by up to {off:.1f} nats on the same tokens "
            f"(5th percentile of agreement {tail:.3f})"
        )
    if metrics and min(row["kv/retained_fraction"] for row in metrics) == 1.0:
        lines.append(
            "nothing was evicted        the prompts are no longer than budget, or sinks + recent window"
        )
    if metrics:
        row = max(metrics, key=lambda row: row["kv/bytes_peak"])
        held, dense, unshared = (row[f"kv/bytes_{name}"] for name in ("peak", "dense", "unshared"))
        lines.append(
            f"KV cache                {held / 2**20:.1f} MiB at its peak, {held / dense:.2f}x of dense, "
            f"{held / unshared:.2f}x of dense without sharing the prompt in a group"
        )
    return lines


def all_settings(*groups: Any) -> dict[str, Any]:
    """Every plain setting of the dataclasses, by name."""
    return {
        spec.name: getattr(value, "value", value)
        for group in groups
        for spec in dataclasses.fields(group)
        if spec.init
        and spec.name != "resume"
        and (
            isinstance(value := getattr(group, spec.name), str | int | float | bool | list | dict)
            or value is None
        )
    }


def repeatable_settings(*groups: Any) -> dict[str, Any]:
    """Settings that are ours, common, or not at their default: the result works as a ``--config`` file."""
    defaults = {spec.name: _default(spec) for group in groups for spec in dataclasses.fields(group)}
    ours = {name for group in groups for name in inspect.get_annotations(type(group))}
    settings = {
        name: value
        for name, value in all_settings(*groups).items()
        if value is not None and (name in ours or name in COMMON or value != defaults[name])
    }
    # derived from other settings; given together with those they contradict each other
    settings.pop("generation_batch_size", None)
    if settings.get("steps_per_generation") == settings.get("gradient_accumulation_steps", 1):
        settings.pop("steps_per_generation", None)
    return settings


def _default(spec: dataclasses.Field[Any]) -> Any:
    if spec.default_factory is not dataclasses.MISSING:
        return spec.default_factory()
    return spec.default
