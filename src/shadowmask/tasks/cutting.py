"""Prompts no longer than a number of tokens, and a report of what that took away."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

ATTEMPTS = 8  # a cut text may have a few tokens more or fewer than counted
MARK = " ... "

Shorten = Callable[[dict[str, Any], int, Any], dict[str, Any] | None]


@dataclass(frozen=True)
class CutReport:
    """What ``fit_rows`` did, in tokens of whole prompts."""

    limit: int | None
    rows: int
    cut: int
    left_out: int
    tokens_min: int
    tokens_max: int
    tokens_removed: int
    removed_share: float
    removed_median: float
    removed_max: int

    def __str__(self) -> str:
        lengths = f"{self.rows} prompts of {self.tokens_min} to {self.tokens_max} tokens"
        if self.limit is None:
            return f"{lengths}, no limit"
        if not self.cut and not self.left_out:
            return f"{lengths}, none longer than max_prompt_tokens={self.limit}"
        parts = []
        if self.cut:
            parts.append(
                f"{self.cut} cut to max_prompt_tokens={self.limit} (median {self.removed_median:g}, at most "
                f"{self.removed_max} tokens removed; {self.removed_share:.1%} of all prompt tokens)"
            )
        if self.left_out:
            parts.append(f"{self.left_out} left out: longer than {self.limit} and nothing that may be cut")
        return f"{lengths}: {'; '.join(parts)}"

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, for a run folder."""
        return asdict(self)


def fit_rows(
    rows: Sequence[dict[str, Any]], shorten: Shorten, tokenizer: Any, limit: int | None
) -> tuple[list[dict[str, Any]], CutReport]:
    """Shorten every prompt to at most ``limit`` tokens; leave out those that ``shorten`` gives up on.

    Columns whose name starts with an underscore, which serve ``shorten``, are dropped.

    Raises:
        ValueError: no prompt is left, or chat messages meet a tokenizer without a chat template.
    """
    fitted: list[dict[str, Any]] = []
    lengths: list[int] = []
    removed: list[int] = []
    for row in rows:
        before = count_tokens(row["prompt"], tokenizer)
        lengths.append(before)
        short = row if limit is None else _fit(row, before, shorten, tokenizer, limit)
        if short is None:
            continue
        if short is not row:
            removed.append(before - count_tokens(short["prompt"], tokenizer))
        fitted.append({name: value for name, value in short.items() if not name.startswith("_")})
    if rows and not fitted:
        raise ValueError(
            f"max_prompt_tokens={limit} leaves no prompt: the shortest has {min(lengths)} tokens, too few of "
            "which may be cut off"
        )
    return fitted, CutReport(
        limit=limit,
        rows=len(rows),
        cut=len(removed),
        left_out=len(rows) - len(fitted),
        tokens_min=min(lengths, default=0),
        tokens_max=max(lengths, default=0),
        tokens_removed=sum(removed),
        removed_share=sum(removed) / max(sum(lengths), 1),
        removed_median=float(median(removed or [0])),
        removed_max=max(removed, default=0),
    )


def _fit(
    row: dict[str, Any], tokens: int, shorten: Shorten, tokenizer: Any, limit: int
) -> dict[str, Any] | None:
    current: dict[str, Any] | None = row
    for attempt in range(ATTEMPTS):
        if tokens <= limit:
            return current
        assert current is not None
        current = shorten(current, tokens - limit + attempt, tokenizer)
        if current is None:
            return None
        tokens = count_tokens(current["prompt"], tokenizer)
    return current if tokens <= limit else None


def count_tokens(prompt: str | list[dict[str, Any]], tokenizer: Any) -> int:
    """Tokens of a prompt as the sampler sees it: text as it is, messages through the chat template."""
    if isinstance(prompt, str):
        return len(tokenizer(prompt)["input_ids"])
    if not getattr(tokenizer, "chat_template", None):
        raise ValueError(
            "the prompts are chat messages, but this tokenizer has no chat template; for plain text, "
            "built-in tasks take --task_kwargs '{\"chat\": false}'"
        )
    text = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
    return len(tokenizer(text, add_special_tokens=False)["input_ids"])


def cut_end(text: str, surplus: int, tokenizer: Any) -> str:
    """Take about ``surplus`` tokens off the end of a text; what stays is a part of it, letter by letter."""
    ends = _ends(text, tokenizer)
    keep = _whole(ends, len(ends) - surplus)
    return text[: ends[keep - 1]].rstrip() if keep > 0 else ""


def cut_middle(text: str, surplus: int, tokenizer: Any) -> str:
    """Take about ``surplus`` tokens out of the middle of a text, where ``MARK`` stands instead."""
    ends = _ends(text, tokenizer)
    keep = len(ends) - surplus - len(_ends(MARK, tokenizer))
    first = _whole(ends, (keep + 1) // 2)
    if keep < 2 or first < 1:
        return ""
    head = text[: ends[first - 1]]
    tail = text[ends[len(ends) - keep // 2 - 1] :]
    return f"{head.rstrip()}{MARK}{tail.lstrip()}"


def shorten_prompt(row: dict[str, Any], surplus: int, tokenizer: Any) -> dict[str, Any] | None:
    """Cut the middle of a prompt whose parts are unknown; of a chat, of its longest message of text."""
    prompt = row["prompt"]
    if isinstance(prompt, str):
        text = cut_middle(prompt, surplus, tokenizer)
        return row | {"prompt": text} if text else None
    contents = [message["content"] if isinstance(message["content"], str) else "" for message in prompt]
    longest = max(range(len(prompt)), key=lambda n: len(contents[n]))
    text = cut_middle(contents[longest], surplus, tokenizer)
    if not text:
        return None
    messages = [message | {"content": text} if n == longest else message for n, message in enumerate(prompt)]
    return row | {"prompt": messages}


def _whole(ends: list[int], keep: int) -> int:
    """Keep fewer tokens rather than a part of a character that is spread over several."""
    while 0 < keep < len(ends) and ends[keep - 1] == ends[keep]:
        keep -= 1
    return keep


def _ends(text: str, tokenizer: Any) -> list[int]:
    """Where every token of a text ends, in characters."""
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
        return [end for _, end in encoded["offset_mapping"]]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]  # no offsets: share the length out evenly
    return [round(len(text) * (n + 1) / len(ids)) for n in range(len(ids))]
