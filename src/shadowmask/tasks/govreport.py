"""GovReport: long government reports with summaries of several paragraphs. Huang et al. 2021,
arXiv:2104.02112.

Reports have thousands of tokens; what does not fit `max_prompt_tokens` is cut off at the end.
"""

from dataclasses import dataclass
from typing import ClassVar, final

from shadowmask.tasks.source import Hub
from shadowmask.tasks.summarize import SummaryTask


@final
@dataclass(frozen=True)
class GovreportTask(SummaryTask):
    """Summarise a long report."""

    name: ClassVar[str] = "govreport"
    max_prompt_tokens: ClassVar[int | None] = 8192
    hub: ClassVar[Hub] = Hub("ccdv/govreport-summarization", None, "test")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "document": ("report", "document"),
        "summary": ("summary",),
    }
    instruction: ClassVar[str] = "Write a summary of the report below in a few paragraphs."
    cue: ClassVar[str] = "Summary:"
