"""The terminal view keeps to 80 columns, in any script, and its marks are the shares."""

from __future__ import annotations

import torch
from rich.cells import cell_len

from shadowmask.report.sample_text import MARKS, sample_lines
from tiny_samples import make_sample


def test_no_line_is_wider_than_a_terminal():
    for sample in (make_sample(400, 30), make_sample(3, 1, every=None, restored=None, reward=None)):
        for line in sample_lines(sample):
            assert cell_len(line) <= 80
            assert all(character.isprintable() for character in line)


def test_it_shows_the_cache_at_the_answer_that_eviction_changed_most():
    sample = make_sample(20, 6)
    worst = int(sample.kl.argmax())
    lines = sample_lines(sample)
    assert f"held when answer token {worst + 1} of 6 was sampled, text from first to last token:" in lines
    strip = lines[
        lines.index("held when answer token 2 of 6 was sampled, text from first to last token:") + 1
    ]
    held = sample.held(worst)[: 20 + worst]
    assert len(strip) == len(held)
    assert strip[2] == " "  # the token that no head keeps
    assert strip[0] == "█"
    order = held.argsort().tolist()
    marks = [MARKS.index(strip[k]) for k in order]
    assert marks == sorted(marks)


def test_the_numbers_are_those_of_the_sample():
    sample = make_sample(20, 6)
    text = "\n".join(sample_lines(sample))
    worst = int(sample.kl.argmax())
    row = next(line for line in text.splitlines() if line.startswith(f"{worst + 1:5}  "))
    assert row.split()[-1] == f"{float(sample.kl[worst]):.2f}"
    assert f"KL of {float(sample.kl[worst]):.2f}" in text
    assert f"{float(sample.kl[worst]) / 2:9.2f}  " in text
    assert "reward 0.5" in text


def test_marks_stand_under_their_tokens():
    pieces = ["日本", "ab", "\n", "cd"]
    record = torch.tensor([[[5, 5, 5, 5]]], dtype=torch.int32)
    record[..., 0] = 3
    sample = make_sample(
        3, 1, token_ids=[1, 2, 3, 4], pieces=pieces, evicted_at=record, restored=None, every=None
    )
    lines = sample_lines(sample, answer=0)
    assert lines[lines.index("日本ab") + 1] == "██████"  # wide characters take two columns
