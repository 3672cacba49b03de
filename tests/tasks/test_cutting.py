"""Prompts are cut to exactly the allowed length, at the right place, and the report counts it."""

import pytest
from transformers import PreTrainedTokenizerFast

from shadowmask.tasks import get_task
from shadowmask.tasks.cutting import MARK, count_tokens, cut_end, cut_middle, fit_rows, shorten_prompt

TEXT = "one two three four five six seven eight nine ten"  # 48 characters, each a token here


def test_the_end_or_the_middle_is_taken_off_letter_by_letter(tokenizer):
    assert cut_end(TEXT, 4, tokenizer) == "one two three four five six seven eight nine"
    assert cut_end(TEXT, 48, tokenizer) == ""
    short = cut_middle(TEXT, 20, tokenizer)
    head, tail = short.split(MARK)
    assert TEXT.startswith(head) and TEXT.endswith(tail)
    assert count_tokens(short, tokenizer) <= 28
    assert cut_middle(TEXT, 45, tokenizer) == ""


def test_a_tokenizer_without_offsets_will_do(tokenizer):
    class Slow:
        is_fast = False

        def __call__(self, text, **kwargs):
            return {"input_ids": tokenizer(text)["input_ids"]}

    assert cut_end(TEXT, 4, Slow()) == cut_end(TEXT, 4, tokenizer)


def test_characters_of_several_tokens_are_cut_whole():
    class Bytes:  # three tokens a character, as rare ones have
        is_fast = True

        def __call__(self, text, **kwargs):
            spans = [(n, n + 1) for n in range(len(text)) for _ in range(3)]
            return {"input_ids": [0] * len(spans), "offset_mapping": spans}

    assert cut_end("abcdef", 1, Bytes()) == "abcde"
    for limit in range(36, 90):
        (row,), _ = fit_rows([{"prompt": TEXT}], shorten_prompt, Bytes(), limit)
        assert limit - 12 < 3 * len(row["prompt"]) <= limit


def test_own_prompts_lose_their_middle_and_the_report_counts_it(tokenizer):
    rows = [{"prompt": TEXT, "n": 0}, {"prompt": "short", "n": 1}, {"prompt": TEXT * 2, "n": 2}]
    fitted, report = fit_rows(rows, shorten_prompt, tokenizer, 30)
    assert [row["n"] for row in fitted] == [0, 1, 2]
    assert fitted[1] == rows[1]
    assert all(25 <= count_tokens(fitted[n]["prompt"], tokenizer) <= 30 for n in (0, 2))
    removed = [count_tokens(rows[n]["prompt"], tokenizer) - len(fitted[n]["prompt"]) for n in (0, 2)]
    assert (report.rows, report.cut, report.left_out) == (3, 2, 0)
    assert (report.tokens_min, report.tokens_max) == (5, 96)
    assert report.tokens_removed == sum(removed)
    assert report.removed_max == max(removed)
    assert report.removed_share == pytest.approx(sum(removed) / (48 + 5 + 96))
    assert str(report).startswith("3 prompts of 5 to 96 tokens: 2 cut to max_prompt_tokens=30 (median")
    assert rows[0]["prompt"] == TEXT  # the rows that came in are as they were


def test_of_a_chat_the_longest_message_is_cut(tokenizer):
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}]
    whole = count_tokens(prompt, tokenizer)
    (row,), report = fit_rows([{"prompt": prompt}], shorten_prompt, tokenizer, whole - 10)
    assert row["prompt"][0] == prompt[0]
    assert MARK in row["prompt"][1]["content"]
    assert whole - 15 <= count_tokens(row["prompt"], tokenizer) <= whole - 10
    assert report.cut == 1


def test_nothing_is_cut_without_a_limit_or_below_it(tokenizer):
    rows = [{"prompt": TEXT}]
    assert str(fit_rows(rows, shorten_prompt, tokenizer, None)[1]) == "1 prompts of 48 to 48 tokens, no limit"
    fitted, report = fit_rows(rows, shorten_prompt, tokenizer, 48)
    assert fitted == rows
    assert str(report).endswith("none longer than max_prompt_tokens=48")


def test_what_cannot_be_cut_is_left_out_and_counted(tokenizer):
    rows = [{"prompt": TEXT}, {"prompt": "short"}]
    fitted, report = fit_rows(rows, lambda row, surplus, tokenizer: None, tokenizer, 10)
    assert fitted == [{"prompt": "short"}]
    assert (report.cut, report.left_out) == (0, 1)
    assert "1 left out: longer than 10 and nothing that may be cut" in str(report)
    with pytest.raises(ValueError, match="max_prompt_tokens=10 leaves no prompt: the shortest has 48 tokens"):
        fit_rows(rows[:1], lambda row, surplus, tokenizer: None, tokenizer, 10)


def test_chat_prompts_need_a_template(tokenizer):
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer, pad_token="<pad>")
    with pytest.raises(ValueError, match="no chat template"):
        count_tokens([{"role": "user", "content": "?"}], bare)


def fitted(task, tokenizer, limit):
    rows = task.dataset("train", 4, seed=0)
    return rows, *fit_rows(rows, task.shorten, tokenizer, limit)


def test_a_report_loses_its_end_not_its_instruction(tokenizer, fixtures):
    task = get_task("govreport", source=str(fixtures / "govreport.jsonl"), chat=False)
    rows, short, report = fitted(task, tokenizer, 400)
    assert report.cut == 4
    for before, after in zip(rows, short, strict=True):
        assert set(after) == {"prompt", "answer"}
        assert 390 <= len(after["prompt"]) <= 400
        assert after["prompt"].startswith(task.instruction)
        assert after["prompt"].endswith("\n\nSummary:")
        kept = after["prompt"].removesuffix("\n\nSummary:")
        assert before["prompt"].startswith(kept)


def test_a_question_loses_passages_that_do_not_matter(tokenizer, fixtures):
    task = get_task("hotpotqa", source=str(fixtures / "hotpotqa.jsonl"), chat=False)
    rows, short, report = fitted(task, tokenizer, 440)
    assert report.cut == 4 and report.left_out == 0
    for before, after in zip(rows, short, strict=True):
        assert len(after["prompt"]) <= 440
        assert f"Question: {before['_question']}" in after["prompt"]
        for passage in before["_passages"]:
            if passage["supports"]:
                assert passage["text"] in after["prompt"]


def test_a_problem_is_never_cut(tokenizer, fixtures):
    task = get_task("gsm8k", source=str(fixtures / "gsm8k.jsonl"), chat=False)
    rows, short, report = fitted(task, tokenizer, 180)
    assert 0 < report.left_out < 4
    assert all(row in rows for row in short)
