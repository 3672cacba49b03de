"""TL;DR: one or two sentences for a forum post. Völske et al. 2017; Stiennon et al. 2020, arXiv:2009.01325.

Any data set of short documents with summaries will do: name its columns with `document_column` and
`summary_column`.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.tasks.source import Hub
from shadowmask.tasks.summarize import SummaryTask


@final
@dataclass(frozen=True)
class TldrTask(SummaryTask):
    """Summarise a post in a sentence or two."""

    name: ClassVar[str] = "tldr"
    max_prompt_tokens: ClassVar[int | None] = 2048
    hub: ClassVar[Hub] = Hub("CarperAI/openai_summarize_tldr", None, "test")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "document": ("prompt", "document"),
        "summary": ("label", "completion", "summary"),
    }
    instruction: ClassVar[str] = "Summarize the post in one or two sentences."
    cue: ClassVar[str] = "TL;DR:"

    def clean(self, document: str) -> str:
        return document.strip().removesuffix(self.cue).rstrip()
