"""Tasks with data of their own: schema, splits, prompts and rewards on small made-up files."""

import json
import sys

import datasets
import pytest

from shadowmask.tasks import get_task
from shadowmask.tasks.gsm8k import worked

NAMES = ["gsm8k", "hotpotqa", "tldr", "govreport"]


@pytest.fixture
def make(fixtures):
    def make(name, **settings):
        return get_task(name, **{"source": str(fixtures / f"{name}.jsonl"), **settings})

    return make


def rows_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.mark.parametrize("name", NAMES)
def test_rows_are_seeded_and_a_single_file_is_divided_by_content(make, name):
    task = make(name)
    train, held_out = task.dataset("train", 100, 0), task.dataset("eval", 100, 0)
    assert len(train) + len(held_out) == (10 if name == "gsm8k" else 5)
    assert len(held_out) == len(train) // 4
    for seed in (1, 2):  # other seeds, other order, the same division
        assert sorted(map(str, task.dataset("train", 100, seed))) == sorted(map(str, train))
    assert any(task.dataset("train", 100, seed) != train for seed in range(1, 5))
    assert make(name).dataset("train", 100, 0) == train
    assert task.dataset("train", 2, 0) == train[:2]
    assert not {str(row["prompt"]) for row in train} & {str(row["prompt"]) for row in held_out}


def test_equal_rows_are_held_out_together(make, fixtures, tmp_path):
    rows = rows_of(fixtures / "tldr.jsonl")
    task = make("tldr", source=write(tmp_path / "twice.jsonl", rows * 2))
    held_out = task.dataset("eval", 100, 0)
    assert len(held_out) == 2 and held_out[0] == held_out[1]


@pytest.mark.parametrize("form", ["jsonl", "json", "parquet", "folder", "saved", "saved splits"])
def test_all_forms_of_local_data_are_read(make, fixtures, tmp_path, form):
    rows = rows_of(fixtures / "hotpotqa.jsonl")
    table = datasets.Dataset.from_list(rows)
    where = tmp_path / {"jsonl": "d.jsonl", "json": "d.json", "parquet": "d.parquet"}.get(form, "d")
    if form == "jsonl":
        write(where, rows)
    elif form == "json":
        where.write_text(json.dumps(rows))
    elif form == "parquet":
        table.to_parquet(str(where))
    elif form == "saved":
        table.save_to_disk(str(where))
    elif form == "saved splits":
        datasets.DatasetDict(
            {"train": table.select(range(3)), "validation": table.select([3, 4])}
        ).save_to_disk(str(where))
    else:
        where.mkdir()
        write(where / "train.jsonl", rows[:3])
        write(where / "validation.jsonl", rows[3:])
    task = make("hotpotqa", source=str(where))
    answers = sorted(r["answer"] for split in ("train", "eval") for r in task.dataset(split, 9, 0))
    assert answers == sorted(row["answer"] for row in rows)
    if form in ("folder", "saved splits"):
        assert sorted(r["answer"] for r in task.dataset("eval", 9, 0)) == sorted(
            r["answer"] for r in rows[3:]
        )


def test_a_split_to_evaluate_on_may_be_chosen(make, fixtures, tmp_path):
    for name, part in (("train", slice(0, 3)), ("test", slice(3, 4)), ("validation", slice(4, 5))):
        write(tmp_path / f"{name}.jsonl", rows_of(fixtures / "tldr.jsonl")[part])
    last = rows_of(fixtures / "tldr.jsonl")[4]["label"]
    task = make("tldr", source=str(tmp_path), eval_split="validation")
    assert [row["answer"] for row in task.dataset("eval", 9, 0)] == [last]
    with pytest.raises(ValueError, match=r"eval_split='dev'.*has the splits train, validation, test"):
        make("tldr", source=str(tmp_path), eval_split="dev").dataset("eval", 1, 0)


def test_one_row_cannot_be_held_out(make, fixtures, tmp_path):
    task = make("tldr", source=write(tmp_path / "one.jsonl", rows_of(fixtures / "tldr.jsonl")[:1]))
    assert len(task.dataset("train", 5, 0)) == 1
    assert task.dataset("eval", 0, 0) == []
    with pytest.raises(ValueError, match="no rows for the split 'eval'"):
        task.dataset("eval", 1, 0)


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("gsm8k", "question", "no column 'question'; its columns are answer"),
        ("hotpotqa", "context", "no column 'context'; its columns are id, question, answer"),
        ("tldr", "label", r"no column 'label' \(or completion, summary\); its columns are prompt"),
        ("govreport", "report", r"no column 'report' \(or document\); its columns are summary"),
    ],
)
def test_a_missing_column_is_named_with_those_there_are(make, fixtures, tmp_path, name, missing, said):
    rows = rows_of(fixtures / f"{name}.jsonl")
    for row in rows:
        del row[missing]
    with pytest.raises(ValueError, match=said):
        make(name, source=write(tmp_path / "d.jsonl", rows)).dataset("train", 1, 0)


def test_an_empty_field_names_row_and_column(make, fixtures, tmp_path):
    rows = rows_of(fixtures / "tldr.jsonl")
    rows[2]["label"] = None
    task = make("tldr", source=write(tmp_path / "d.jsonl", rows))
    with pytest.raises(ValueError, match="row 2: column 'label' is None"):
        _ = [task.dataset(split, 9, 0) for split in ("train", "eval")]


def test_passages_of_another_form_are_an_error(make, fixtures, tmp_path):
    rows = rows_of(fixtures / "hotpotqa.jsonl")
    for row in rows:
        row["context"] = "all in one text"
    with pytest.raises(ValueError, match="columns 'context'"):
        make("hotpotqa", source=write(tmp_path / "d.jsonl", rows)).dataset("train", 1, 0)


def test_the_original_layout_of_hotpotqa_is_read_too(make, fixtures, tmp_path):
    rows = rows_of(fixtures / "hotpotqa.jsonl")
    published = make("hotpotqa").dataset("train", 9, 0)
    for row in rows:
        context, facts = row["context"], row["supporting_facts"]
        row["context"] = [[t, s] for t, s in zip(context["title"], context["sentences"], strict=True)]
        row["supporting_facts"] = [[title, "0"] for title in facts["title"]]
    write(tmp_path / "d.json", rows)
    original = make("hotpotqa", source=str(tmp_path / "d.json"))
    prompts = [str(r["prompt"]) for split in ("train", "eval") for r in original.dataset(split, 9, 0)]
    assert {str(row["prompt"]) for row in published} <= set(prompts)


def test_columns_may_have_other_names(make, fixtures, tmp_path):
    rows = [{"text": r["prompt"], "gist": r["label"]} for r in rows_of(fixtures / "tldr.jsonl")]
    task = make(
        "tldr", source=write(tmp_path / "d.jsonl", rows), document_column="text", summary_column="gist"
    )
    assert len(task.dataset("train", 9, 0)) == 4


def test_the_hub_is_out_of_reach_in_one_line():
    with pytest.raises(ValueError, match=r"data set 'openai/gsm8k' cannot be loaded: .*takes a local file"):
        get_task("gsm8k").dataset("train", 1, 0)


# gsm8k


def test_gsm8k_asks_and_reads_the_number(make, fixtures):
    assert worked("2+2=<<2+2=4>>4 pears.\n#### 1,004") == ("2+2=4 pears.", "1004")
    for row in make("gsm8k").dataset("train", 9, 0):
        (message,) = row["prompt"]
        assert message["role"] == "user" and "\\boxed{}" in message["content"]
    golds = {worked(row["answer"])[1] for row in rows_of(fixtures / "gsm8k.jsonl")}
    assert {"-7", "1500"} <= golds


@pytest.mark.parametrize("chat", [True, False])
def test_gsm8k_shots_come_from_the_training_rows_and_are_not_trained_on(make, chat):
    rows = make("gsm8k", shots=6, chat=chat).dataset("train", 99, 0)
    assert len(rows) == 8 - 6
    examples = make("gsm8k", chat=chat).dataset("train", 99, 0)
    for row in rows:
        if chat:
            assert [m["role"] for m in row["prompt"]] == ["user", "assistant"] * 6 + ["user"]
            shown = " ".join(m["content"] for m in row["prompt"][:-1])
        else:
            assert row["prompt"].count("Problem:") == 7
            shown = row["prompt"].rpartition("Problem:")[0]
        assert "<<" not in shown
        assert shown.count("The answer is \\boxed{") == 6
        asked = str(row["prompt"][-1]) if chat else row["prompt"].rpartition("Problem:")[2]
        assert sum(other["answer"] == row["answer"] for other in examples) == 1
        assert asked not in shown


def test_gsm8k_needs_more_rows_than_shots(make):
    with pytest.raises(ValueError, match="shots=8 needs more than that many training rows"):
        make("gsm8k", shots=8).dataset("train", 1, 0)


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        (r"9 - 2 = 7, so \boxed{7}", 1.0),
        ("The answer is 7.", 0.9),
        (r"\boxed{8}", 0.1),
        (r"\boxed{7} or \boxed{8}", 0.1),
        ("8", 0.0),
        ("", 0.0),
        ("The answer is 7.\n\nProblem: What is 2 + 2?\nSolution: 4", 0.9),  # a base model goes on
    ],
)
def test_gsm8k_rewards_the_number_and_a_little_the_form(make, completion, reward):
    for form in (completion, [{"role": "assistant", "content": completion}]):
        assert make("gsm8k").reward([form], ["7"], prompts=["?"]) == [pytest.approx(reward)]
    assert make("gsm8k").metrics([completion], ["7"])["accuracy"] == [float(reward >= 0.9)]


def test_an_unreadable_reference_costs_its_own_sample_only(make):
    with pytest.warns(UserWarning, match="reference answer '' is no number or formula for sample 1"):
        assert make("gsm8k", format_weight=0.0).reward(["7", "7"], ["7", ""]) == [1.0, 0.0]


# hotpotqa, summaries


def test_hotpotqa_rewards_words_in_common(make):
    completions = ["Answer: the viola", "viola and violin", "", [{"role": "assistant", "content": "Viola."}]]
    golds = ["the viola"] * 4
    assert make("hotpotqa").reward(completions, golds) == [1.0, pytest.approx(0.5), 0.0, 1.0]
    assert make("hotpotqa", reward_by="exact_match").reward(completions, golds) == [1.0, 0.0, 0.0, 1.0]
    assert set(make("hotpotqa").metrics(completions, golds)) == {"f1", "exact_match"}
    with pytest.raises(ValueError, match="reward_by='em'"):
        make("hotpotqa", reward_by="em")


@pytest.mark.parametrize("name", ["tldr", "govreport"])
def test_summaries_are_scored_by_rouge_l(make, name):
    task = make(name)
    for row in task.dataset("train", 9, 0):
        half = row["answer"][: len(row["answer"]) // 2]
        whole, part, thought, nothing = task.reward(
            [row["answer"], half, f"<think>hm</think>{row['answer']}", ""], [row["answer"]] * 4
        )
        assert whole == thought == pytest.approx(1.0)
        assert 0 < part < 1
        assert nothing == 0.0
        assert row["answer"] not in str(row["prompt"])


def test_tldr_asks_once(make):
    for row in make("tldr", chat=False).dataset("train", 9, 0):
        assert row["prompt"].count("TL;DR:") == 1
        assert row["prompt"].endswith("\n\nTL;DR:")


@pytest.mark.parametrize(("name", "module"), [("gsm8k", "math_verify"), ("tldr", "rouge_score")])
def test_a_missing_library_is_said_before_anything_runs(make, monkeypatch, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=r"pip install 'shadowmask\[tasks\]'"):
        make(name)


def test_fixtures_say_whose_they_are(fixtures):
    assert "Licence" in (fixtures / "README.md").read_text()
    assert {path.stem for path in fixtures.glob("*.jsonl")} == set(NAMES)
