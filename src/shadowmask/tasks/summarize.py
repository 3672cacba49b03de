"""What summarisation tasks share: a document that may lose its end, a reference, ROUGE-L."""

from dataclasses import dataclass
from typing import Any, ClassVar

from shadowmask.extras import check
from shadowmask.rewards.guard import score_each
from shadowmask.rewards.summary import rouge_l
from shadowmask.rewards.text import after_thinking
from shadowmask.tasks.base import Completion, Prompt, Row, as_prompt, completion_text
from shadowmask.tasks.cutting import cut_end
from shadowmask.tasks.data import DataTask


@dataclass(frozen=True)
class SummaryTask(DataTask):
    """Summarise a document; the reward is ROUGE-L F1 against the reference."""

    metric: ClassVar[str] = "rouge_l"
    instruction: ClassVar[str]
    cue: ClassVar[str]

    document_column: str | None = None
    """The column with the document, if the data set calls it something else."""
    summary_column: str | None = None
    """The column with the reference."""

    def __post_init__(self) -> None:
        check("rouge_score")

    def fields(self) -> dict[str, tuple[str, ...]]:
        document, summary = self.columns["document"], self.columns["summary"]
        return {
            "document": (self.document_column,) if self.document_column else document,
            "summary": (self.summary_column,) if self.summary_column else summary,
        }

    def row(self, record: dict[str, Any]) -> Row:
        document = self.clean(record["document"])
        return {
            "prompt": self._prompt(document),
            "answer": record["summary"].strip(),
            "_document": document,
        }

    def clean(self, document: str) -> str:
        """Take off what belongs to the data set's own prompt."""
        return document.strip()

    def reward(self, completions: list[Completion], answer: list[str], **kwargs) -> list[float]:
        """ROUGE-L F1 of what was written after the thinking, if any."""
        return score_each(_score, completions, answer)

    def shorten(self, row: Row, surplus: int, tokenizer: Any) -> Row | None:
        document = cut_end(row["_document"], surplus, tokenizer)
        return row | {"prompt": self._prompt(document), "_document": document} if document else None

    def _prompt(self, document: str) -> Prompt:
        return as_prompt(f"{self.instruction}\n\n{document}\n\n{self.cue}", self.chat)


def _score(completion: Completion, reference: str) -> float:
    return rouge_l(after_thinking(completion_text(completion)), reference)
