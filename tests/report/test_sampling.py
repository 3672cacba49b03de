"""Samples are scored as the learner scores, and restoring lost tokens is measured, not guessed."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from shadowmask.metrics import ParityError
from shadowmask.record import NEVER, RecordError
from shadowmask.report.sampling import make_samples, rescore, restore, score, split_spans, token_pieces
from shadowmask.scoring import dense_logprobs, shadow_logprobs
from tiny_models import make_learner, shared_model, shared_rollout
from tiny_trl import make_tokenizer
from tolerances import FLOAT32


def samples_of(evict_every=None, rows=(1, 4)):
    model = shared_model(dtype=torch.float32)
    batch = shared_rollout(dtype=torch.float32, evict_every=evict_every)
    return (
        model,
        batch,
        make_samples(model, make_tokenizer(), batch, rows, ["a", "b"], {"model": "tiny"}, [1.0, 0.0]),
    )


def test_samples_hold_both_tracks_of_their_rows():
    model, batch, samples = samples_of(evict_every=4)
    shadow, dense = shadow_logprobs(model, batch), dense_logprobs(model, batch)
    for sample, row in zip(samples, (1, 4), strict=True):
        assert sample.completion_ids == batch.completion_ids[row]
        assert (sample.sparse_logprobs - sample.shadow_logprobs).abs().max() <= FLOAT32
        assert (sample.shadow_logprobs - shadow[row]).abs().max() <= FLOAT32
        assert (sample.dense_logprobs - dense[row]).abs().max() <= FLOAT32
        assert (sample.dense_logprobs - shadow[row]).abs().max() > 100 * FLOAT32  # eviction did bite
        assert torch.equal(sample.evicted_at, batch.shadow[row].evicted_at)
    assert [sample.reward for sample in samples] == [1.0, 0.0]


def test_giving_everything_back_removes_all_of_the_kl():
    model, _, (sample, _) = samples_of()
    assert sample.kl.max() > 1000 * FLOAT32
    whole = restore(model, sample, 1).restored
    assert whole.spans == [(0, sample.prompt_length)]
    assert (whole.kl_removed[0] - sample.kl).abs().max() <= FLOAT32


def test_giving_back_a_part_is_the_same_as_never_evicting_it():
    model, _batch, (sample, _) = samples_of(evict_every=4)
    restored = restore(model, sample, 4).restored
    assert len(restored.spans) > 1
    start, end = restored.spans[1]
    record = sample.evicted_at.clone()
    record[..., start:end] = NEVER
    alone = dataclasses.replace(sample, evicted_at=record)
    kl = rescore(model, dataclasses.replace(alone, sparse_logprobs=scored(model, alone))).kl
    assert (restored.kl_removed[1] - (sample.kl - kl)).abs().max() <= FLOAT32
    assert (restored.kl_removed[0] - (sample.kl - kl)).abs().max() > 100 * FLOAT32  # another span differs


def scored(model, sample):
    with torch.no_grad():
        return score(model, [sample.prompt_ids], [sample.completion_ids], sample.shadow, sample.temperature)[
            0
        ]


def test_what_was_never_lost_is_not_given_back():
    model = shared_model(dtype=torch.float32)
    batch = shared_rollout(dtype=torch.float32, evictor="dense")
    (sample,) = make_samples(model, make_tokenizer(), batch, [0], ["dense"], {})
    assert restore(model, sample, 8).restored is None
    assert sample.kl.abs().max() <= FLOAT32


def test_another_model_is_refused():
    _, _, (sample, _) = samples_of()
    with pytest.raises(ParityError, match="sampling_gap/max"):
        rescore(make_learner("llama-gqa", torch.float32).apply(shake), sample)
    with pytest.raises(RecordError, match="made by another model"):
        rescore(make_learner("llama-mha", torch.float32), sample)


def shake(module):
    for parameter in module.parameters(recurse=False):
        parameter.data *= 1.1


def test_spans_end_with_sentences_and_cover_the_text():
    pieces = ["One", " two", ".", " Three", " four", " five", ".", "\n", "Six"]
    assert split_spans(pieces, 9) == [(0, 3), (3, 7), (7, 9)]
    assert split_spans(pieces, 1) == [(0, 9)]
    long = split_spans(["word"] * 500, 10)  # no sentence ever ends
    assert [a for a, _ in long[1:]] == [b for _, b in long[:-1]]
    assert long[-1][1] == 500
    assert 1 < len(long) <= 10


class Bytes:
    """A tokenizer whose tokens are bytes, and which drops a leading space as some do."""

    def decode(self, ids, clean_up_tokenization_spaces):
        return bytes(ids).decode("utf-8", errors="replace").removeprefix(" ")


@pytest.mark.parametrize("text", ["plain words", "a 🙂 b", "日本", "x  y"])
def test_pieces_make_up_the_text(text):
    pieces = token_pieces(Bytes(), list(text.encode()))
    assert "".join(pieces) == text
    assert len(pieces) == len(text.encode())
    assert token_pieces(Bytes(), list("🙂".encode())) == ["", "", "", "🙂"]


def test_a_text_cut_inside_a_character_still_has_its_pieces():
    assert token_pieces(Bytes(), list("a🙂".encode())[:-1]) == ["a", "", "", "\ufffd"]
