"""Counts compilations of the decode step: ``python tests/compile_probe.py``, one JSON line.

A process of its own, because the import hook that checks shapes in the tests cannot be compiled.
"""

from __future__ import annotations

import json

import torch
from torch._dynamo.testing import CompileCounter

from shadowmask import RolloutBatch, RolloutEngine
from shadowmask.sampler import Sampler
from tiny_models import MAX_NEW_TOKENS, STOPS, make_evictor, make_model, make_prompts

SIZES = [4, 1, 3, 5]
CASES = [("llama-gqa", "snapkv"), ("gemma2", "snapkv"), ("llama-gqa", "pyramidkv"), ("gemma2", "adakv")]


def sample(
    family: str, evictor: str, evict_every: int | None, counter: CompileCounter | None
) -> RolloutBatch:
    """Ragged prompts, evictions, rows that stop and are taken by others: half of the sequences wait."""
    together = _generate(family, evictor, evict_every, None, None)
    return _generate(family, evictor, evict_every, together.kv_bytes_peak // 2, counter)


def _generate(
    family: str, evictor: str, evict_every: int | None, limit: int | None, counter: CompileCounter | None
) -> RolloutBatch:
    engine = RolloutEngine(
        make_model(family), None, make_evictor(evictor), evict_every, limit, compile=counter is not None
    )
    if counter is not None:
        engine.compile_backend = counter
    return engine.generate(make_prompts(), SIZES, MAX_NEW_TOKENS, seed=3, stop_token_ids=list(STOPS))


def probe(family: str, evictor: str, evict_every: int | None) -> dict[str, object]:
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled, eager = (sample(family, evictor, evict_every, with_count) for with_count in (counter, None))
    pairs = zip(compiled.sparse_logprobs, eager.sparse_logprobs, strict=True)
    return {
        "compilations": counter.frame_count,
        "operations": counter.op_count,
        "waited": compiled.rows < sum(SIZES),
        "same_tokens": compiled.completion_ids == eager.completion_ids,
        "same_record": torch.equal(compiled.shadow.evicted_at, eager.shadow.evicted_at),
        "gap": max(float((a - b).abs().max()) for a, b in pairs),
    }


def main() -> None:
    found = {
        f"{family} {evictor} {evict_every}": probe(family, evictor, evict_every)
        for family, evictor in CASES
        for evict_every in (None, 5)
    }
    # the control: a step that reads as many slots as it needs looks different every few tokens
    Sampler._width = lambda self: min(max(self.fed.values()) // 4 * 4 + 4, self.cache.plan.new_tokens)
    found["control"] = probe("llama-gqa", "snapkv", None)
    print(json.dumps(found))


if __name__ == "__main__":
    main()
