"""How fast importance ratios degenerate with length: ``python docs/figures/ratios.py``.

The bundled demo model continues ``examples/long_prompt.txt`` with half of the prompt evicted. For every
prefix of a completion, r is the probability of the prefix under the dense model over that under the model
that sampled it. Importance sampling corrects with r; its effective sample size, ``mean(r)**2 / mean(r**2)``,
is the share of completions that then count. Replay has r = 1. Seeded; a few minutes on one core. Writes
``ratios.json`` and ``ratios.png`` beside this file; ``--draw`` draws again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

import shadowmask as sm
from shadowmask.demo.model import load_demo_model
from shadowmask.report.plots import save

HERE = Path(__file__).parent
TEXT = HERE.parents[1] / "examples" / "long_prompt.txt"
EVICTORS = ("snapkv", "recent", "random")
GROUP, NEW_TOKENS, SEED = 128, 64, 0


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="draw from ratios.json, measure nothing")
    if not parser.parse_args().draw:
        (HERE / "ratios.json").write_text(json.dumps(measure(), indent=1) + "\n")
    draw(json.loads((HERE / "ratios.json").read_text()))


@torch.no_grad()
def measure() -> dict[str, Any]:
    """Variance of log r and effective sample size by length, for a dense and for a replaying learner."""
    model, tokenizer = load_demo_model()
    prompt = tokenizer(TEXT.read_text())["input_ids"]
    found: dict[str, Any] = {
        "prompt_tokens": len(prompt),
        "completions": GROUP,
        "removed": 0.5,
        "seed": SEED,
        "evictors": {},
    }
    for name in EVICTORS:
        engine = sm.RolloutEngine(model, None, sm.get_evictor(name, compression_ratio=0.5))
        batch = engine.generate([prompt], GROUP, NEW_TOKENS, seed=SEED, stop_token_ids=[])
        sampled = torch.stack([torch.as_tensor(row) for row in batch.sparse_logprobs])
        found["evictors"][name] = {
            learner: by_length(torch.stack(list(replayed)) - sampled)
            for learner, replayed in (
                ("dense", sm.dense_logprobs(model, batch)),
                ("shadow", sm.shadow_logprobs(model, batch)),
            )
        }
        print(name, {k: v["ess"][-1] for k, v in found["evictors"][name].items()}, flush=True)
    return found


def by_length(log_ratios: Float[Tensor, "completions tokens"]) -> dict[str, list[float]]:
    """Of the ratio of every prefix: the variance of its logarithm, and the effective sample size."""
    prefix = log_ratios.double().cumsum(1)
    ratio = (prefix - prefix.max(0).values).exp()  # the size drops out of the effective sample size
    ess = ratio.mean(0).square() / ratio.square().mean(0)
    return {"variance": prefix.var(0).tolist(), "ess": ess.tolist()}


def draw(found: dict[str, Any]) -> None:
    """Two panels over length: variance of the log-ratio, effective sample size."""
    figure = Figure(figsize=(9.5, 3.6), layout="constrained")
    variance, ess = figure.subplots(1, 2)
    for colour, (name, learners) in zip(
        ("#1b3a6b", "#e08214", "#35978f"), found["evictors"].items(), strict=True
    ):
        lengths = range(1, len(learners["dense"]["ess"]) + 1)
        variance.plot(lengths, learners["dense"]["variance"], color=colour, label=f"{name}, dense learner")
        ess.plot(lengths, learners["dense"]["ess"], color=colour, label=f"{name}, dense learner")
        replayed = None if name != EVICTORS[0] else "replaying learner, all three"
        ess.plot(lengths, learners["shadow"]["ess"], "--", color="black", linewidth=1, label=replayed)
    ess.set(yscale="log", xlabel="length of the prefix (tokens)", ylabel="effective share of completions")
    ess.axhline(1 / found["completions"], color="#999999", linewidth=0.8)
    ess.text(
        NEW_TOKENS,
        1.08 / found["completions"],
        "one completion",
        ha="right",
        fontsize="x-small",
        color="#666666",
    )
    variance.set(xlabel="length of the prefix (tokens)", ylabel="variance of log ratio (nats$^2$)")
    for axes in (variance, ess):
        axes.grid(alpha=0.3)
        axes.legend(fontsize="x-small")
    figure.suptitle(
        f"dense / sampled probability, half of {found['prompt_tokens']} prompt tokens evicted",
        fontsize="medium",
    )
    save(figure, HERE / "ratios.png")


if __name__ == "__main__":
    main()
