"""``shadowmask rollout``: completions for a prompt under any evictor and budget, and what was evicted."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.text import Text
from transformers import PreTrainedModel

from shadowmask.commands.common import DEMO_MODEL, load_model, parse
from shadowmask.commands.errors import UserError
from shadowmask.evaluation import encode_prompt
from shadowmask.eviction import Evictor, evictor_from_settings, list_evictors
from shadowmask.metrics import sampling_gap
from shadowmask.planning import parse_bytes
from shadowmask.record import ShadowMask
from shadowmask.report.sample import SUFFIX, Sample, save_samples
from shadowmask.report.sampling import make_samples
from shadowmask.rollout import RolloutBatch, RolloutEngine
from shadowmask.scoring import dense_logprobs, shadow_logprobs

ABOUT = """Sample completions with an evicted KV cache, print them and say what was evicted. The last
lines replay the record in the learner and compare log-probabilities."""


@dataclass
class RolloutArguments:
    """Settings of ``shadowmask rollout``."""

    prompt: str | None = field(default=None, metadata={"help": "The prompt's text."})
    prompt_file: str | None = field(
        default=None, metadata={"help": "Read the prompt from this file; - is stdin."}
    )
    chat: bool = field(default=False, metadata={"help": "Send the prompt as a user message of a chat."})
    model: str = field(default=DEMO_MODEL, metadata={"help": "A folder, a hub name, or demo (bundled)."})
    dtype: str = field(default="float32", metadata={"help": "float32, bfloat16, ..."})
    evictor: str = field(default="snapkv", metadata={"help": f"{', '.join(list_evictors())}."})
    budget: int | None = field(default=None, metadata={"help": "Keys that stay per layer and KV head."})
    compression_ratio: float | None = field(
        default=None, metadata={"help": "Fraction of the prompt's keys that is removed. Default 0.5."}
    )
    evict_every: int | None = field(
        default=None, metadata={"help": "Also evict every so many decoded tokens."}
    )
    kv_memory_limit: str | None = field(
        default=None,
        metadata={"help": "Bytes that keys and values may take, e.g. 500MB; samples that do not fit wait."},
    )
    evictor_kwargs: str | None = field(default=None, metadata={"help": "More evictor settings, as JSON."})
    group_size: int = field(default=1, metadata={"help": "Completions to sample."})
    max_new_tokens: int = field(default=64, metadata={"help": "Longest completion."})
    temperature: float = field(default=1.0, metadata={"help": "0 is greedy."})
    seed: int = field(default=0, metadata={"help": "Same seed, same completions."})
    save: str | None = field(
        default=None,
        metadata={"help": "Write tokens and shadow mask to this new folder, for `shadowmask inspect` too."},
    )


def main(argv: Sequence[str]) -> None:
    (args,) = parse([RolloutArguments], argv, "rollout", ABOUT)
    prompt = read_prompt(args)
    if args.save and Path(args.save).exists():
        raise UserError(f"--save {args.save} exists already: name a new folder")
    evictor = evictor_from_settings(args.evictor, args.budget, args.compression_ratio, args.evictor_kwargs)
    limit = _limit(args)
    console = Console(highlight=False)
    model, tokenizer = load_model(args.model, args.dtype)
    if args.chat and tokenizer.chat_template is None:
        raise UserError("this tokenizer has no chat template: leave out --chat")
    ids = encode_prompt(tokenizer, [{"role": "user", "content": prompt}] if args.chat else prompt)
    engine = RolloutEngine(model, tokenizer, evictor, args.evict_every, kv_memory_limit=limit)
    started = time.perf_counter()
    batch = engine.generate(
        [ids], args.group_size, args.max_new_tokens, temperature=args.temperature, seed=args.seed
    )
    seconds = time.perf_counter() - started
    for n, completion in enumerate(batch.completion_ids):
        console.rule(f"completion {n + 1} of {args.group_size}, {len(completion)} tokens", align="left")
        console.print(Text(tokenizer.decode(completion)))
    console.rule(f"what {args.evictor} kept of the prompt", align="left")
    console.print(kept_text(batch.shadow[0], ids, tokenizer))
    for line in summary(batch, model, seconds):
        console.print(line)
    if args.save:
        save_rollout(batch, samples_of(args, batch, model, tokenizer, evictor), Path(args.save))
        console.print(f"saved; look at it with: shadowmask inspect {shlex.quote(args.save)}")


def _limit(args: RolloutArguments) -> int | None:
    if args.kv_memory_limit is None:
        return None
    try:
        return parse_bytes(args.kv_memory_limit)
    except ValueError as error:
        raise UserError(f"--kv_memory_limit {error}") from error


def read_prompt(args: Any) -> str:
    """The text of ``--prompt`` or ``--prompt_file``.

    Raises:
        UserError: neither or both were given, no such file, or no text in it.
    """
    if (args.prompt is None) == (args.prompt_file is None):
        raise UserError("give the prompt with --prompt or --prompt_file")
    if args.prompt is not None:
        text = args.prompt
    elif args.prompt_file == "-":
        text = sys.stdin.read()
    else:
        path = Path(args.prompt_file)
        if not path.is_file():
            raise UserError(f"prompt file {args.prompt_file!r} does not exist")
        text = path.read_text()
    if not text.strip():
        raise UserError("the prompt is empty")
    return text


def kept_text(record: ShadowMask, prompt_ids: list[int], tokenizer: Any) -> Text:
    """The prompt with each token styled by the share of layers and heads that still hold it at the end."""
    held = (record.evicted_at[..., : len(prompt_ids)] >= record.lengths[0]).float().mean(dim=(0, 1))
    text = Text()
    for token, share in zip(prompt_ids, held.tolist(), strict=True):
        style = "bold" if share > 2 / 3 else ("" if share > 1 / 3 else "dim")
        text.append(tokenizer.decode([token]), style=style)
    text.append("\n\n")
    text.append("bold", style="bold")
    text.append(": held by more than 2/3 of layers and heads, ")
    text.append("dim", style="dim")
    text.append(": by less than 1/3")
    return text


def summary(batch: RolloutBatch, model: Any, seconds: float) -> list[str]:
    """Numbers a reader wants: sizes, bytes, and the proof that the record replays."""
    prompt = len(batch.prompt_ids[0])
    sampled = sum(map(len, batch.completion_ids))
    record = batch.shadow[0]
    gone = float((record.evicted_at[..., :prompt] < record.lengths[0]).float().mean())
    seen = batch.shadow.retained_fraction()
    sparse = torch.cat(batch.sparse_logprobs)
    with torch.no_grad():
        shadow = torch.cat(shadow_logprobs(model, batch)).cpu()
        dense = torch.cat(dense_logprobs(model, batch)).cpu()
    gap = sampling_gap(sparse, shadow.to(sparse))
    naive = sampling_gap(sparse, dense.to(sparse))
    held, would = batch.kv_bytes_peak, batch.kv_bytes_dense
    return [
        "",
        f"prompt        {prompt} tokens, {gone:.0%} of its keys evicted at the end",
        f"visible keys  {seen:.0%} of a dense cache's, mean of completion tokens",
        f"KV cache      {held / 2**20:.2f} MiB peak, dense {would / 2**20:.2f} MiB, {held / would:.2f}x",
        f"              unshared by the group {batch.kv_bytes_unshared / 2**20:.2f} MiB",
        f"sampled       {sampled} tokens in {seconds:.1f} s, {batch.rows} sequences at a time",
        f"sampling gap  max {gap['sampling_gap/max']:.1e}, p99 {gap['sampling_gap/p99']:.1e} nats (replayed)",
        f"dense learner max {naive['sampling_gap/max']:.1e}, mean {naive['sampling_gap/mean']:.1e} nats off",
    ]


def samples_of(
    args: Any,
    batch: RolloutBatch,
    model: PreTrainedModel,
    tokenizer: Any,
    evictor: Evictor,
    titles: Sequence[str] | None = None,
) -> list[Sample]:
    """Every completion of the rollout, scored, with its text and record."""
    facts = {
        "model": args.model,
        "evictor": repr(evictor),
        "evict_every": str(args.evict_every or "after the prompt only"),
    }
    rows = range(len(batch.completion_ids))
    titles = titles or [f"completion {n + 1}" for n in rows]
    return make_samples(model, tokenizer, batch, rows, titles, facts)


def save_rollout(batch: RolloutBatch, samples: Sequence[Sample], folder: Path) -> None:
    """Write ``shadow.safetensors``, ``rollout.json`` and what ``inspect`` reads; the folder appears only
    when complete."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        batch.shadow.save(partial / "shadow.safetensors")
        content = {
            "prompt_ids": batch.prompt_ids,
            "group_sizes": batch.group_sizes,
            "completion_ids": batch.completion_ids,
            "sparse_logprobs": [row.tolist() for row in batch.sparse_logprobs],
            "temperature": batch.temperature,
            "kv_bytes_peak": batch.kv_bytes_peak,
            "kv_bytes_dense": batch.kv_bytes_dense,
            "kv_bytes_unshared": batch.kv_bytes_unshared,
        }
        (partial / "rollout.json").write_text(json.dumps(content))
        save_samples(samples, partial / f"rollout{SUFFIX}")
        partial.chmod(0o755)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
