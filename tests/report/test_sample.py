"""Samples come back from their file as they were, and what is no such file is one clear error."""

from __future__ import annotations

import dataclasses
import gzip
import json

import pytest
import torch

from shadowmask.record import NEVER
from shadowmask.report.sample import (
    FORMAT,
    SampleError,
    load_samples,
    pack_record,
    pack_samples,
    save_samples,
    unpack_record,
)
from tiny_samples import make_record, make_sample


@pytest.mark.parametrize(
    ("moments", "bits"), [(0, 1), (1, 1), (3, 2), (15, 4), (255, 8), (256, 16), (300, 16)]
)
def test_a_record_survives_in_as_few_bits_as_it_needs(moments, bits):
    record = torch.full((2, 3, 701), NEVER, dtype=torch.int32)  # a length that fills no byte
    record[1, 2, :moments] = torch.arange(moments, dtype=torch.int32) + 400
    packed = pack_record(record)
    assert packed["bits"] == bits
    assert torch.equal(unpack_record(packed), record)


def test_an_8k_prompt_takes_a_bit_per_key(tmp_path):
    record = make_record(36, 8, 8192, 4)
    sample = make_sample(8192, 4, restored=None, evicted_at=record, pieces=[" word"] * 8196)
    save_samples([sample], tmp_path / "a.samples.json.gz")
    assert (tmp_path / "a.samples.json.gz").stat().st_size < 1.3 * record.numel() / 8


def test_samples_survive_their_file(tmp_path):
    before = [make_sample(), make_sample(restored=None, reward=None, every=None)]
    save_samples(before, tmp_path / "a.samples.json.gz")
    assert [path.name for path in tmp_path.iterdir()] == ["a.samples.json.gz"]
    for old, new in zip(before, load_samples(tmp_path / "a.samples.json.gz"), strict=True):
        for field in dataclasses.fields(old):
            a, b = getattr(old, field.name), getattr(new, field.name)
            if field.name == "restored" and a is not None:
                assert a.spans == b.spans
                a, b = a.kl_removed, b.kl_removed
            assert torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b
    assert pack_samples(before) == pack_samples(load_samples(tmp_path / "a.samples.json.gz"))


def test_what_was_held_is_what_the_queries_saw():
    sample = make_sample()
    for answer in range(6):
        query = torch.tensor([sample.prompt_length - 1 + answer])
        seen = sample.shadow.visible(query)[:, :, 0].float().mean(dim=(0, 1))
        assert torch.equal(sample.held(answer), seen)
    assert sample.held(0)[:20].eq(1).all()  # the first answer token is sampled from the full prompt
    assert sample.held(1)[2] == 0


def rewritten(change):
    document = json.loads(gzip.decompress(pack_samples([make_sample()])))
    change(document)
    return gzip.compress(json.dumps(document).encode())


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"not gzip", "damaged"),
        (pack_samples([make_sample()])[:-50], "damaged"),
        (gzip.compress(b"[1]"), "has format None"),
        (rewritten(lambda d: d.update(format="shadowmask.samples.v9")), f"this version reads '{FORMAT}'"),
        (rewritten(lambda d: d["samples"][0].pop("kl")), "damaged: 'kl'"),
        (rewritten(lambda d: d["samples"][0]["token_ids"].reverse()), "made for other tokens"),
        (rewritten(lambda d: d["samples"][0]["record"].update(shape=[3, 3, 26])), "entries, its shape"),
        (
            rewritten(lambda d: d["samples"][0]["record"].update(moments=[1] * 3)),
            "a query always sees itself",
        ),
        (rewritten(lambda d: d["samples"][0]["pieces"].pop()), "25 pieces of text"),
    ],
    # of the message: the bytes hold a time, and processes that share the work must see the same names
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_damaged_file_is_one_clear_error(tmp_path, content, said):
    path = tmp_path / "a.samples.json.gz"
    path.write_bytes(content)
    with pytest.raises(SampleError) as error:
        load_samples(path)
    assert said in str(error.value)
    assert "\n" not in str(error.value)
