"""What a completion says, whatever form the trainer hands it over in."""

from __future__ import annotations

from typing import Any

Completion = str | list[dict[str, Any]]


def completion_text(completion: Completion) -> str:
    """Return what was written, from plain text or from a list of chat messages.

    A message's content may be text, a list of parts (their texts count), or missing.
    """
    if isinstance(completion, str):
        return completion
    return "".join(_content(message.get("content")) for message in completion)


def _content(content: Any) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    return "".join(str(part.get("text") or "") for part in content if isinstance(part, dict))


def after_thinking(text: str) -> str:
    """Return what follows the chain of thought; nothing if ``<think>`` was never closed."""
    if "</think>" in text:
        return text.rpartition("</think>")[2]
    return text.partition("<think>")[0]
