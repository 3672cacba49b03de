"""A sampled completion with its record and what each view says of its tokens; kept in one small file.

Eviction happens at few moments, so the record is stored as an index into the list of those moments, in
as few bits as the list needs: an 8k prompt in 36 layers x 8 heads takes 0.3 MB. The file is gzipped
JSON, and the page of ``shadowmask inspect`` carries the very same bytes.
"""

from __future__ import annotations

import base64
import gzip
import json
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int32
from torch import Tensor

from shadowmask.record import NEVER, RecordError, ShadowMask, token_hash
from shadowmask.report.run_folder import write_atomically

FORMAT = "shadowmask.samples.v1"
SUFFIX = ".samples.json.gz"
_WIDTHS = (1, 2, 4, 8, 16)


class SampleError(ValueError):
    """A file of samples cannot be used; the message says what to do."""


@dataclass(frozen=True)
class Restored:
    """What giving evicted prompt tokens back would change, one span of the prompt at a time.

    ``kl_removed[s, c]`` is how much smaller KL(dense || shadow) of completion token ``c`` gets, in nats,
    when the tokens ``spans[s]`` (start, end) are never evicted in any layer and head. Positive: their
    absence made that token worse.
    """

    spans: list[tuple[int, int]]
    kl_removed: Float[Tensor, "spans completion"]


@dataclass(frozen=True)
class Sample:
    """One completion. Log-probabilities and KL are per completion token, in nats."""

    title: str
    token_ids: list[int]  # prompt + completion
    pieces: list[str]  # text of every token; "" where a character only ends in a later token
    prompt_length: int
    evicted_at: Int32[Tensor, "layers kv_heads tokens"]
    sparse_logprobs: Float[Tensor, " completion"]
    shadow_logprobs: Float[Tensor, " completion"]
    dense_logprobs: Float[Tensor, " completion"]
    kl: Float[Tensor, " completion"]  # KL(dense || shadow) over the vocabulary
    temperature: float = 1.0
    reward: float | None = None
    facts: dict[str, str] = field(default_factory=dict)  # model, evictor, ...: shown as they are
    restored: Restored | None = None

    def __post_init__(self) -> None:
        tokens = len(self.token_ids)
        if len(self.pieces) != tokens or self.evicted_at.shape[-1] != tokens:
            raise SampleError(
                f"sample {self.title!r}: {tokens} tokens, but {len(self.pieces)} pieces of text and a record "
                f"of {self.evicted_at.shape[-1]}"
            )
        if len(self.kl) != tokens - self.prompt_length:
            raise SampleError(
                f"sample {self.title!r}: {tokens - self.prompt_length} completion tokens, {len(self.kl)} KLs"
            )

    @property
    def prompt_ids(self) -> list[int]:
        return self.token_ids[: self.prompt_length]

    @property
    def completion_ids(self) -> list[int]:
        return self.token_ids[self.prompt_length :]

    @property
    def shadow(self) -> ShadowMask:
        """The record, checked."""
        return ShadowMask.from_entries([self.evicted_at], [self.prompt_ids], [self.completion_ids])

    def held(self, answer: int) -> Float[Tensor, " tokens"]:
        """Share of layers and heads whose cache held each token when completion token ``answer`` was sampled.

        In [0, 1]; 0 also for tokens that did not exist yet.
        """
        query = self.prompt_length - 1 + answer
        share = (self.evicted_at > query).float().mean(dim=(0, 1))
        share[query + 1 :] = 0
        return share


# -- file ---------------------------------------------------------------------------------------------


def save_samples(samples: Sequence[Sample], path: Path) -> None:
    """Write a file of samples (under a temporary name, then renamed)."""
    write_atomically(path, pack_samples(samples))


def load_samples(path: Path) -> list[Sample]:
    """Read what ``save_samples`` wrote.

    Raises:
        SampleError: no such file, of another version, damaged, or a record of other tokens.
    """
    try:
        document = json.loads(gzip.decompress(path.read_bytes()))
    except (gzip.BadGzipFile, zlib.error, EOFError, ValueError) as error:
        raise SampleError(f"{path} is damaged or no file of samples: {error}") from error
    except OSError as error:
        raise SampleError(f"{path} cannot be read: {error}") from error
    found = document.get("format") if isinstance(document, dict) else None
    if found != FORMAT:
        raise SampleError(f"{path} has format {found!r}, this version reads {FORMAT!r}")
    try:
        return [_from_json(entry) for entry in document["samples"]]
    except (KeyError, TypeError, ValueError, RuntimeError) as error:
        raise SampleError(f"{path} is damaged: {error}") from error


def pack_samples(samples: Sequence[Sample]) -> bytes:
    """The bytes of the file, the same for the same samples."""
    document = {"format": FORMAT, "samples": [_to_json(sample) for sample in samples]}
    return gzip.compress(json.dumps(document, ensure_ascii=False, allow_nan=False).encode(), mtime=0)


def _to_json(sample: Sample) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "title": sample.title,
        "token_ids": sample.token_ids,
        "token_hash": token_hash(sample.prompt_ids, sample.completion_ids),
        "pieces": sample.pieces,
        "prompt_length": sample.prompt_length,
        "record": pack_record(sample.evicted_at),
        "temperature": sample.temperature,
        "reward": sample.reward,
        "facts": sample.facts,
    }
    for name in ("sparse_logprobs", "shadow_logprobs", "dense_logprobs", "kl"):
        entry[name] = _floats_to_text(getattr(sample, name))
    if sample.restored is not None:
        spans = [list(span) for span in sample.restored.spans]
        entry["restored"] = {"spans": spans, "kl_removed": _floats_to_text(sample.restored.kl_removed)}
    return entry


def _from_json(entry: Mapping[str, Any]) -> Sample:
    columns = {
        name: _floats_from_text(entry[name])
        for name in ("sparse_logprobs", "shadow_logprobs", "dense_logprobs", "kl")
    }
    restored = None
    if entry.get("restored"):
        spans = [(int(start), int(end)) for start, end in entry["restored"]["spans"]]
        removed = _floats_from_text(entry["restored"]["kl_removed"]).reshape(len(spans), len(columns["kl"]))
        restored = Restored(spans, removed)
    sample = Sample(
        title=entry["title"],
        token_ids=list(entry["token_ids"]),
        pieces=list(entry["pieces"]),
        prompt_length=entry["prompt_length"],
        evicted_at=unpack_record(entry["record"]),
        temperature=entry["temperature"],
        reward=entry["reward"],
        facts=dict(entry["facts"]),
        restored=restored,
        **columns,
    )
    if sample.shadow.token_hashes[0] != entry["token_hash"]:
        raise RecordError("the record was made for other tokens than those stored with it")
    return sample


# -- codec --------------------------------------------------------------------------------------------


def pack_record(evicted_at: Int32[Tensor, "layers kv_heads tokens"]) -> dict[str, Any]:
    """``evicted_at`` as the list of its moments and, per key, an index into it. Lossless."""
    moments = evicted_at[evicted_at != NEVER].unique()  # sorted
    codes = torch.searchsorted(moments, evicted_at.contiguous()).flatten()  # never: one past the last
    bits = next(width for width in _WIDTHS if len(moments) < 2**width)
    return {
        "shape": list(evicted_at.shape),
        "moments": moments.tolist(),
        "bits": bits,
        "codes": base64.b64encode(_pack_bits(codes, bits)).decode(),
    }


def unpack_record(packed: Mapping[str, Any]) -> Int32[Tensor, "layers kv_heads tokens"]:
    """What ``pack_record`` was given."""
    shape, bits = packed["shape"], packed["bits"]
    codes = _unpack_bits(base64.b64decode(packed["codes"]), bits)
    count = shape[0] * shape[1] * shape[2]
    if len(codes) < count:
        raise SampleError(f"the record has {len(codes)} entries, its shape {shape} needs {count}")
    moments = torch.tensor([*packed["moments"], NEVER], dtype=torch.int32)
    return moments[codes[:count]].reshape(shape)


def _pack_bits(codes: Tensor, bits: int) -> bytes:
    """Lowest bits first; 16-bit codes are little-endian."""
    if bits == 16:
        return torch.stack([codes & 255, codes >> 8], dim=-1).to(torch.uint8).numpy().tobytes()
    per_byte = 8 // bits
    padded = torch.nn.functional.pad(codes, (0, -len(codes) % per_byte)).reshape(-1, per_byte)
    return (padded << torch.arange(per_byte) * bits).sum(dim=-1).to(torch.uint8).numpy().tobytes()


def _unpack_bits(packed: bytes, bits: int) -> Tensor:
    values = torch.frombuffer(bytearray(packed), dtype=torch.uint8).long()
    if bits == 16:
        return values[::2] + (values[1::2] << 8)
    shifts = torch.arange(8 // bits) * bits
    return ((values[:, None] >> shifts) & (2**bits - 1)).flatten()


def _floats_to_text(values: Tensor) -> str:
    return base64.b64encode(values.detach().cpu().float().contiguous().numpy().tobytes()).decode()


def _floats_from_text(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.float32)
