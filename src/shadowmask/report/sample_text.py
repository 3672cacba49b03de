"""A sample in 80 columns: what the cache held, which answers it changed, which losses changed them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from shadowmask.report.sample import Sample

WIDTH = 80
MARKS = " ▁▂▃▄▅▆▇█"  # share of layers and heads that hold a token: none ... all
WORST = 5
CULPRITS = 3
TEXT_LINES = 16  # of the prompt's end; --text shows the essence, the page shows all


def sample_lines(sample: Sample, answer: int | None = None) -> list[str]:
    """The sample as plain lines of at most 80 columns, for a terminal or a pipe.

    Args:
        answer: completion token (from 0) at which the cache is shown; by default the one that eviction
            changed most.
    """
    answers = len(sample.completion_ids)
    worst = sample.kl.argsort(descending=True).tolist()
    if answer is None:
        answer = worst[0] if worst else 0
    held = sample.held(answer)[: sample.prompt_length + answer]
    layers, heads, _ = sample.evicted_at.shape
    reward = "" if sample.reward is None else f", reward {sample.reward:.4g}"
    lines = [
        *_cut(f"{sample.title}{reward}"),
        *(line for name, value in sample.facts.items() for line in _cut(f"{name}: {value}")),
        f"{sample.prompt_length} prompt + {answers} answer tokens, {layers} layers x {heads} heads",
        "",
        f"held when answer token {answer + 1} of {answers} was sampled, text from first to last token:",
        "".join(MARKS[_level(share)] for share in _strip(held)),
        f"{float(held.mean()):.0%} of all tokens, layers and heads; "
        f"{int((held == 0).sum())} of {len(held)} tokens in no head",
        "",
        *_layers(sample, answer),
        "",
        *_answers(sample, worst),
        *_culprits(sample, answer),
        "",
        *_text(sample, held),
    ]
    return [line.rstrip() for line in lines]


def _strip(held: Float[Tensor, " tokens"]) -> list[float]:
    """Mean share in each of 80 equal stretches of the text."""
    edges = torch.linspace(0, len(held), min(WIDTH, len(held)) + 1).round().long().tolist()
    return [float(held[a:b].mean()) for a, b in itertools.pairwise(edges)]


def _level(share: float) -> int:
    """0 only for none, 8 only for all."""
    if share in (0.0, 1.0):
        return int(8 * share)
    return min(max(round(8 * share), 1), 7)


def _layers(sample: Sample, answer: int) -> list[str]:
    query = sample.prompt_length - 1 + answer
    shares = (sample.evicted_at[..., : query + 1] > query).float().mean(dim=(1, 2)).tolist()
    marks = "".join(MARKS[_level(share)] for share in shares)
    low, high = min(shares), max(shares)
    return [f"by layer {marks[:60]}", f"from {low:.0%} (layer {shares.index(low)}) to {high:.0%}"]


def _answers(sample: Sample, worst: list[int]) -> list[str]:
    lines = ["answer tokens that eviction changed most (nats):"]
    lines.append(f"{'#':>5}  {'token':24} {'sparse':>9} {'shadow':>9} {'dense':>9} {'KL':>9}")
    for c in sorted(worst[:WORST]):
        values = (sample.sparse_logprobs, sample.shadow_logprobs, sample.dense_logprobs, sample.kl)
        numbers = " ".join(f"{float(column[c]):9.2f}" for column in values)
        lines.append(f"{c + 1:5}  {_pad(_quote(sample.pieces[sample.prompt_length + c]), 24)} {numbers}")
    return lines


def _culprits(sample: Sample, answer: int) -> list[str]:
    if sample.restored is None or not len(sample.kl):
        return []
    removed = sample.restored.kl_removed[:, answer]
    lines = [
        "",
        f"giving back would take from answer token {answer + 1}'s KL of {float(sample.kl[answer]):.2f}:",
    ]
    for s in removed.argsort(descending=True).tolist()[:CULPRITS]:
        start, end = sample.restored.spans[s]
        lines += _cut(f"{float(removed[s]):9.2f}  {_quote(''.join(sample.pieces[start:end]).strip())}")
    return lines


def _text(sample: Sample, held: Float[Tensor, " tokens"]) -> list[str]:
    """The text with the share of each token under it; a long one from its end."""
    pairs = list(_wrapped(sample, held))
    lines = ["the text, and under each token who holds it (blank = no head, █ = all):"]
    if len(pairs) > TEXT_LINES:
        lines.append(f"({len(pairs) - TEXT_LINES} lines before these are left out)")
    for words, marks in pairs[-TEXT_LINES:]:
        lines += [words, marks]
    return lines


def _wrapped(sample: Sample, held: Float[Tensor, " tokens"]) -> Iterator[tuple[str, str]]:
    words = marks = ""
    for piece, share in zip(sample.pieces, held.tolist(), strict=False):
        for character in piece:
            width = _width(character)
            if character == "\n" or _width(words) + width > WIDTH:
                yield words, marks
                words = marks = ""
            if character != "\n":
                words += character if character.isprintable() else "·"
                marks += MARKS[_level(share)] * width
    yield words, marks


def _width(text: str) -> int:
    from rich.cells import cell_len

    return sum(cell_len(character if character.isprintable() else "·") for character in text)


def _pad(text: str, width: int) -> str:
    while _width(text) > width:
        text = text[:-2] + "…"
    return text + " " * (width - _width(text))


def _cut(text: str) -> list[str]:
    return [_pad(text, WIDTH)]


def _quote(piece: str) -> str:
    return "".join(c if c.isprintable() else "⏎" if c == "\n" else "·" for c in piece)
