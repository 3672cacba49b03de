"""``shadowmask inspect``: one page that shows a rollout token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from shadowmask.commands.common import DEMO_MODEL, load_model, parse, split_positional
from shadowmask.commands.errors import UserError
from shadowmask.commands.rollout import read_prompt, samples_of
from shadowmask.evaluation import encode_prompt
from shadowmask.eviction import Evictor, evictor_from_settings, list_evictors
from shadowmask.models import prepare_model
from shadowmask.report.page import MOST_SAMPLES, inspect_page
from shadowmask.report.run_folder import write_atomically
from shadowmask.report.sample import SUFFIX, Sample, load_samples
from shadowmask.report.sample_text import sample_lines
from shadowmask.report.sampling import rescore, restore
from shadowmask.rollout import RolloutEngine

ABOUT = """shadowmask inspect RUN [RUN]     a run folder, or what `shadowmask rollout --save` wrote
shadowmask inspect --prompt "..." --evictor snapkv recent --budget 64

Write one HTML page that shows a rollout token by token: which layers and heads held each token at any
moment, the sampler's, learner's and dense log-probabilities of the answer, and which lost part of the
prompt made which answer token worse. Two samples, runs or evictors stand side by side."""


@dataclass
class InspectArguments:
    """Settings of ``shadowmask inspect``."""

    step: int | None = field(
        default=None, metadata={"help": "Step of a run folder. Default: the last one that was saved."}
    )
    sample: list[int] | None = field(
        default=None,
        metadata={"help": "One or two samples, counted from 1. Default: the first two."},
    )
    prompt: str | None = field(default=None, metadata={"help": "Sample for this prompt instead."})
    prompt_file: str | None = field(default=None, metadata={"help": "The same from a file; - is stdin."})
    chat: bool = field(default=False, metadata={"help": "Send the prompt as a user message of a chat."})
    model: str | None = field(
        default=None,
        metadata={
            "help": "A folder, a hub name, or demo (the default for a prompt). With a saved rollout: the "
            "model that sampled it, to find out which lost tokens mattered."
        },
    )
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, ..."})
    evictor: list[str] = field(
        default_factory=lambda: ["snapkv"],
        metadata={"help": f"One or two of: {', '.join(list_evictors())}."},
    )
    budget: int | None = field(default=None, metadata={"help": "Keys that stay per layer and KV head."})
    compression_ratio: float | None = field(
        default=None, metadata={"help": "Fraction of the prompt's keys that is removed. Default 0.5."}
    )
    evict_every: int | None = field(
        default=None, metadata={"help": "Also evict every so many decoded tokens."}
    )
    evictor_kwargs: str | None = field(default=None, metadata={"help": "More evictor settings, as JSON."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest completion."})
    temperature: float = field(default=1.0, metadata={"help": "0 is greedy."})
    seed: int = field(default=0, metadata={"help": "Same seed, same completions."})
    spans: int = field(
        default=32,
        metadata={
            "help": "Parts of the prompt that are given back one at a time to see which mattered. 0: none."
        },
    )
    output: str = field(default="inspect.html", metadata={"help": "The page to write."})
    text: bool = field(default=False, metadata={"help": "Print the essence in 80 columns and write no page."})


def main(argv: Sequence[str]) -> None:
    sources, rest = split_positional(argv)
    (args,) = parse([InspectArguments], rest, "inspect", ABOUT)
    asked = args.prompt is not None or args.prompt_file is not None
    if bool(sources) == asked:
        raise UserError("name a run folder or a saved rollout, or give --prompt or --prompt_file")
    if args.spans < 0:
        raise UserError(f"spans={args.spans} must be at least 0")
    samples = _fresh(args) if asked else _saved(args, sources)
    if args.text:
        print("\n\n".join("\n".join(sample_lines(sample)) for sample in samples))
        return
    title = sources[0] if sources else "prompt"
    write_atomically(Path(args.output), inspect_page(samples, f"shadowmask inspect: {title}"))
    print(f"wrote {args.output}: open it in a browser")


def _fresh(args: Any) -> list[Sample]:
    """Sample for a prompt, once per evictor."""
    if len(args.evictor) > MOST_SAMPLES:
        raise UserError(f"--evictor names {len(args.evictor)} evictors: at most two stand side by side")
    prompt = read_prompt(args)
    evictors = {name: _evictor(args, name) for name in args.evictor}
    name = args.model or DEMO_MODEL
    model, tokenizer = load_model(name, args.dtype)
    if args.chat and tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template: leave out --chat")
    ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}] if args.chat else prompt)
    samples = []
    for title, evictor in evictors.items():
        every = None if title == "dense" else args.evict_every
        batch = RolloutEngine(model, tokenizer, evictor, every).generate(
            [ids], 1, args.max_new_tokens, temperature=args.temperature, seed=args.seed
        )
        about = SimpleNamespace(model=name, evict_every=every)
        (sample,) = samples_of(about, batch, model, tokenizer, evictor, [title])
        samples.append(restore(model, sample, args.spans) if args.spans else sample)
    return samples


def _evictor(args: Any, name: str) -> Evictor:
    if name == "dense":  # beside another evictor, whose settings it does not take
        return evictor_from_settings(name, None, None, None)
    return evictor_from_settings(name, args.budget, args.compression_ratio, args.evictor_kwargs)


def _saved(args: Any, sources: Sequence[str]) -> list[Sample]:
    """Samples from disk: two of one source, or one each of two."""
    if len(sources) > MOST_SAMPLES:
        raise UserError(f"{len(sources)} sources: at most two stand side by side")
    wanted = args.sample or [1, 2][: MOST_SAMPLES // len(sources)]
    if args.sample and len(sources) * len(wanted) > MOST_SAMPLES:
        raise UserError(
            f"--sample {wanted} of {len(sources)} sources: at most two samples stand side by side"
        )
    chosen = []
    for source in sources:
        path = find_samples(Path(source), args.step)
        found = load_samples(path)
        numbers = wanted if args.sample else wanted[: len(found)]
        for number in numbers:
            if not 1 <= number <= len(found):
                raise UserError(f"--sample {number}: {path} holds samples 1 to {len(found)}")
            chosen.append(found[number - 1])
    if args.model is None or not args.spans:
        return chosen
    model = prepare_model(load_model(args.model, args.dtype)[0])
    return [restore(model, rescore(model, sample), args.spans) for sample in chosen]


def find_samples(source: Path, step: int | None) -> Path:
    """The file of samples that a source means.

    Raises:
        UserError: no such folder, nothing saved in it, or not that step.
    """
    if not source.exists():
        raise UserError(f"{str(source)!r} does not exist: name a run folder or a saved rollout")
    if source.is_file():
        return source
    rollout = source / f"rollout{SUFFIX}"
    if rollout.is_file():
        return rollout
    saved = {int(p.name[5:].split(".")[0]): p for p in sorted((source / "samples").glob(f"step-*{SUFFIX}"))}
    if not saved:
        raise UserError(
            f"{source} has no saved rollouts: train with --saved_samples 4, or use shadowmask rollout --save"
        )
    if step is None:
        return saved[max(saved)]
    if step not in saved:
        raise UserError(f"--step {step} of {source} was not saved; saved steps: {', '.join(map(str, saved))}")
    return saved[step]
