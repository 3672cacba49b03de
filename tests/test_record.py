"""ShadowMask: form, values, messages, container and storage. Its meaning is in invariants/test_oracle."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from shadowmask import NEVER, RecordError, ShadowMask
from shadowmask.record import token_hash


def make(
    lengths: tuple[tuple[int, int], ...] = ((3, 2), (1, 4)), layers: int = 2, heads: int = 3
) -> ShadowMask:
    """Entries of (prompt, completion) tokens; the first key of each is evicted at the prompt's end."""
    entries, prompts, completions = [], [], []
    for prompt, completion in lengths:
        entry = torch.full((layers, heads, prompt + completion), NEVER, dtype=torch.int32)
        entry[..., 0] = prompt
        entries.append(entry)
        prompts.append(list(range(prompt)))
        completions.append(list(range(completion)))
    return ShadowMask.from_entries(entries, prompts, completions)


def test_never_is_the_largest_int32() -> None:
    assert torch.iinfo(torch.int32).max == NEVER


def test_a_wrong_dtype_or_rank_names_what_was_given() -> None:
    """Past the annotations, which only the tests check: what a user would see."""
    wrong = {
        r"torch.int64 \(1, 1, 5\)": torch.full((1, 1, 5), NEVER),
        r"torch.int32 \(1, 5\)": torch.full((1, 5), NEVER, dtype=torch.int32),
    }
    for shown, tensor in wrong.items():
        record = make()
        object.__setattr__(record, "evicted_at", tensor)
        with pytest.raises(RecordError, match=rf"int32 \[layers, kv_heads, tokens\], got {shown}"):
            record.__post_init__()


def test_lengths_that_do_not_add_up_name_both_shapes() -> None:
    record = make()
    with pytest.raises(RecordError, match=r"\(2, 3, 10\) does not hold the 11 tokens of lengths \(5, 6\)"):
        dataclasses.replace(record, lengths=(5, 6))


def test_counts_that_differ_are_named() -> None:
    with pytest.raises(RecordError, match="2 lengths, 1 prompt lengths and 2 token hashes"):
        dataclasses.replace(make(), prompt_lengths=(3,))


@pytest.mark.parametrize("prompt", [0, 6])
def test_a_prompt_outside_its_sequence_is_refused(prompt: int) -> None:
    with pytest.raises(RecordError, match=rf"entry 0: prompt length {prompt} outside \[1, 5\]"):
        dataclasses.replace(make(), prompt_lengths=(prompt, 1))


@pytest.mark.parametrize(("column", "value"), [(0, 0), (4, 4), (4, 2), (5, 0), (9, 4), (2, -1)])
def test_a_query_that_does_not_see_itself_is_refused(column: int, value: int) -> None:
    evicted_at = make().evicted_at.clone()
    evicted_at[1, 2, column] = value
    token = column if column < 5 else column - 5
    with pytest.raises(RecordError, match=rf"evicted_at\[1, 2, {column}\] = {value} .*token {token} of its"):
        dataclasses.replace(make(), evicted_at=evicted_at)


def test_the_smallest_legal_value_is_one_more_than_the_key() -> None:
    evicted_at = torch.arange(1, 6, dtype=torch.int32).expand(1, 1, -1)
    record = ShadowMask(evicted_at, (5,), (3,), ("x",))
    assert torch.equal(record.visible()[0, 0], torch.eye(5, dtype=torch.bool))


def test_indexing() -> None:
    record = make()
    assert len(record) == 2 and record[0].lengths == (5,) and record[-1].prompt_lengths == (1,)
    assert record[1:].token_hashes == record.token_hashes[1:]
    assert record[[1, 0, 1]].lengths == (5, 5, 5)
    assert len(record[:0]) == 0 and len(record[[]]) == 0
    assert record[0].evicted_at.data_ptr() == record.evicted_at.data_ptr(), "an entry is a view"
    for index in (2, -3):
        with pytest.raises(IndexError, match=f"completion {index} of a record with 2 entries"):
            record[index]


def test_cat_broadcasts_shared_axes_and_refuses_the_rest() -> None:
    dense = ShadowMask.dense([[1, 2]], [[3]])
    joined = ShadowMask.cat([make(), dense])
    assert joined.evicted_at.shape == (2, 3, 13) and joined[2].retained_fraction() == 1
    with pytest.raises(RecordError, match=r"\(2, 2\) and \(2, 3\)"):
        ShadowMask.cat([make(), make(heads=2)])
    assert len(ShadowMask.cat([])) == 0


def test_visible_is_defined_for_one_completion() -> None:
    with pytest.raises(RecordError, match="this record has 2"):
        make().visible()


def test_visible_by_hand() -> None:
    # 2 prompt tokens, 2 completion tokens; key 0 goes after query 1, key 1 after query 2
    evicted_at = torch.tensor([[[2, 3, NEVER, NEVER]]], dtype=torch.int32)
    expected = [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 1, 1, 0],
        [0, 0, 1, 1],
    ]
    record = ShadowMask(evicted_at, (4,), (2,), ("x",))
    assert record.visible()[0, 0].int().tolist() == expected
    # completion query 2 sees 2 of 3 keys; query 3 predicts nothing
    assert record.retained_fraction() == pytest.approx(2 / 3)


def test_check_model_names_both_shapes() -> None:
    make().check_model(2, 3)
    ShadowMask.dense([[1]], [[2]]).check_model(30, 3)
    for layers, heads in ((3, 3), (2, 4), (1, 3)):
        message = rf"\(2, 3\), the model has \({layers}, {heads}\): it was made by another model"
        with pytest.raises(RecordError, match=message):
            make().check_model(layers, heads)


def test_check_tokens_notices_every_change() -> None:
    record = ShadowMask.dense([[1, 2, 3], [1]], [[4, 5], [6]])
    record.check_tokens([[1, 2, 3], [1]], [[4, 5], [6]])
    wrong = [
        ([[1, 2, 9], [1]], [[4, 5], [6]]),  # another prompt token
        ([[1, 2, 3], [1]], [[4, 9], [6]]),  # another completion token
        ([[1, 2], [1]], [[3, 4, 5], [6]]),  # the same tokens, divided elsewhere
        ([[0, 1, 2, 3], [1]], [[4, 5], [6]]),  # padded
        ([[1], [1, 2, 3]], [[6], [4, 5]]),  # rows exchanged
    ]
    for prompts, completions in wrong:
        with pytest.raises(RecordError, match="was made for other tokens"):
            record.check_tokens(prompts, completions)
    with pytest.raises(RecordError, match="2 entries, but 1 prompts and 1 completions"):
        record.check_tokens([[1, 2, 3]], [[4, 5]])


def test_token_hash_separates_prompt_and_completion() -> None:
    assert token_hash([1, 2], [3]) != token_hash([1], [2, 3])
    assert token_hash([1, 2], [3]) == token_hash((1, 2), (3,))


def test_save_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "record.safetensors"
    make().save(path)
    before = path.read_bytes()

    def failing(*_: object, **__: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr("safetensors.torch.save_file", failing)
    with pytest.raises(OSError, match="disk full"):
        make(((4, 4),)).save(path)
    assert path.read_bytes() == before


def test_load_refuses_what_is_no_record(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    other = tmp_path / "weights.safetensors"
    save_file({"evicted_at": torch.zeros(1)}, other)
    with pytest.raises(RecordError, match="is not a shadow mask"):
        ShadowMask.load(other)
    junk = tmp_path / "junk"
    junk.write_bytes(b"not safetensors")
    for path in (junk, tmp_path / "absent"):
        with pytest.raises(RecordError, match="cannot be read"):
            ShadowMask.load(path)


def test_load_refuses_a_record_that_was_tampered_with(tmp_path: Path) -> None:
    from safetensors.torch import save_file

    meta = {
        "format": "shadowmask.record.v1",
        "lengths": json.dumps([3]),
        "prompt_lengths": json.dumps([1]),
        "token_hashes": json.dumps(["x"]),
    }
    path = tmp_path / "record.safetensors"
    save_file({"evicted_at": torch.zeros(1, 1, 3, dtype=torch.int32)}, path, metadata=meta)
    with pytest.raises(RecordError, match="a query always sees itself"):
        ShadowMask.load(path)


def test_storage_is_four_bytes_per_key_head_and_layer() -> None:
    assert make().nbytes == 2 * 3 * 10 * 4
