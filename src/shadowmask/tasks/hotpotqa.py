"""HotpotQA, distractor setting: ten passages, two of which hold the answer together.

A prompt that is too long loses passages without a supporting fact, from the end.
Yang et al. 2018, arXiv:1809.09600.
"""

from dataclasses import dataclass
from typing import Any, ClassVar, final

from shadowmask.rewards.answers import final_text
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.qa import exact_match, token_f1
from shadowmask.tasks.base import Completion, Prompt, Row, as_prompt, completion_text
from shadowmask.tasks.data import DataTask
from shadowmask.tasks.source import Hub

INSTRUCTION = "Answer the question from the passages. Write the answer only, in as few words as it takes."
REWARDS = {"f1": token_f1, "exact_match": exact_match}


@final
@dataclass(frozen=True)
class HotpotqaTask(DataTask):
    """Questions that need two passages, rewarded by token F1 (or exact match)."""

    name: ClassVar[str] = "hotpotqa"
    metric: ClassVar[str] = "f1"
    max_prompt_tokens: ClassVar[int | None] = 8192
    hub: ClassVar[Hub] = Hub("hotpotqa/hotpot_qa", "distractor", "validation")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "question": ("question",),
        "answer": ("answer",),
        "context": ("context",),
        "supporting_facts": ("supporting_facts",),
    }

    reward_by: str = "f1"
    """`f1` gives part of the reward for part of the answer, `exact_match` is all or nothing."""

    def __post_init__(self) -> None:
        if self.reward_by not in REWARDS:
            raise ValueError(f"reward_by={self.reward_by!r} must be one of {', '.join(REWARDS)}")

    def row(self, record: dict[str, Any]) -> Row:
        passages = _passages(record, self.where)
        return {
            "prompt": self._prompt(passages, record["question"]),
            "answer": record["answer"],
            "_passages": passages,
            "_question": record["question"],
        }

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """Score the short answer against the reference by `reward_by`."""
        return score_each(_scorer(self.reward_by), completions, answer)

    def metrics(self, completions: list[Completion], answer: list[str], **kwargs) -> dict[str, list[float]]:
        return {name: score_each(_scorer(name), completions, answer) for name in REWARDS}

    def shorten(self, row: Row, surplus: int, tokenizer: Any) -> Row | None:
        passages = list(row["_passages"])
        spare = [n for n, passage in enumerate(passages) if not passage["supports"]]
        freed = 0
        while spare and freed < surplus:
            dropped = passages.pop(spare.pop())
            freed += len(tokenizer(_show(dropped), add_special_tokens=False)["input_ids"])
        if not freed:
            return None
        return row | {"prompt": self._prompt(passages, row["_question"]), "_passages": passages}

    def _prompt(self, passages: list[dict[str, Any]], question: str) -> Prompt:
        shown = "\n\n".join(map(_show, passages))
        return as_prompt(f"{INSTRUCTION}\n\n{shown}\n\nQuestion: {question}\nAnswer:", self.chat)


def _passages(record: dict[str, Any], where: str) -> list[dict[str, Any]]:
    """The passages of a record, from the hub's layout (columns) or the original one (pairs)."""
    context, facts = record["context"], record["supporting_facts"]
    try:
        if isinstance(context, dict):
            pairs = list(zip(context["title"], context["sentences"], strict=True))
            supporting = set(facts["title"])
        else:
            pairs = [(title, sentences) for title, sentences in context]
            supporting = {title for title, _ in facts}
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"data set {where!r}: the columns 'context' (title, sentences) or 'supporting_facts' (title, "
            f"sent_id) have another form in the row with the question {record['question']!r}: "
            f"{type(error).__name__}: {error}"
        ) from error
    return [
        {"title": title, "text": "".join(sentences).strip(), "supports": title in supporting}
        for title, sentences in pairs
    ]


def _show(passage: dict[str, Any]) -> str:
    return f"{passage['title']}\n{passage['text']}"


def _scorer(name: str) -> Any:
    score = REWARDS[name]
    return lambda completion, answer: score(final_text(completion_text(completion)), answer)
