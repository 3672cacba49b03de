"""The shadow mask: which keys every query of a rollout could see.

Eviction is monotone (an evicted key never comes back), so one integer per key holds the whole
query x key mask without loss:

    visible(i, k)  <=>  k <= i < evicted_at[k]

Symbols: ``i`` is a query, ``k`` a key, both counted from 0 in the *unpadded* ``prompt + completion``
of one sequence; query ``i`` predicts token ``i + 1``. ``evicted_at[k]`` is the first query that no
longer sees key ``k``; ``NEVER`` if none. Evicting after query ``i`` was computed writes ``i + 1``.

Traps this representation avoids: a mask without time hides evicted prompt keys from the prompt's own
queries (which changes the keys of deeper layers) and from the first completion token (which was
sampled from the full prompt). Storage in padded indices would shift when a trainer pads again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Bool, Int, Int32
from torch import Tensor

NEVER = 2**31 - 1
_FORMAT = "shadowmask.record.v1"


class RecordError(ValueError):
    """A shadow mask is missing, malformed, or belongs to other tokens or another model."""


def token_hash(prompt_ids: Sequence[int], completion_ids: Sequence[int]) -> str:
    """Fingerprint one rollout's tokens, so that a record is never replayed against other ones."""
    tokens = torch.tensor([len(prompt_ids), *prompt_ids, *completion_ids], dtype=torch.int64)
    return hashlib.sha256(tokens.numpy().tobytes()).hexdigest()[:32]


@dataclass(frozen=True)
class ShadowMask:
    """Eviction record of a batch of rollouts, ragged, one entry per completion.

    ``evicted_at`` holds the entries one after another along the last axis; entry ``n`` has
    ``lengths[n]`` tokens (prompt + completion), the first ``prompt_lengths[n]`` of them prompt.
    A ``layers`` or ``kv_heads`` axis of size 1 means that the record is shared and broadcasts.
    """

    evicted_at: Int32[Tensor, "layers kv_heads tokens"]
    lengths: tuple[int, ...]
    prompt_lengths: tuple[int, ...]
    token_hashes: tuple[str, ...]

    def __post_init__(self) -> None:
        self._check_form()
        self._check_values()

    # -- construction ---------------------------------------------------------------------------

    @classmethod
    def from_entries(
        cls,
        entries: Sequence[Int32[Tensor, "layers kv_heads _"]],
        prompt_ids: Sequence[Sequence[int]],
        completion_ids: Sequence[Sequence[int]],
    ) -> ShadowMask:
        """Build a record from one ``evicted_at`` tensor per completion and that completion's tokens."""
        if not entries:
            return cls(torch.empty(1, 1, 0, dtype=torch.int32), (), (), ())
        return cls(
            torch.cat(list(entries), dim=-1),
            tuple(entry.shape[-1] for entry in entries),
            tuple(len(ids) for ids in prompt_ids),
            tuple(token_hash(p, c) for p, c in zip(prompt_ids, completion_ids, strict=True)),
        )

    @classmethod
    def dense(
        cls, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> ShadowMask:
        """The record of a rollout without any eviction: every query sees all keys before it."""
        entries = [
            torch.full((1, 1, len(p) + len(c)), NEVER, dtype=torch.int32)
            for p, c in zip(prompt_ids, completion_ids, strict=True)
        ]
        return cls.from_entries(entries, prompt_ids, completion_ids)

    @classmethod
    def cat(cls, records: Sequence[ShadowMask]) -> ShadowMask:
        """Put the entries of several records one after another.

        Raises:
            RecordError: the records differ in layers or KV heads and neither broadcasts.
        """
        records = [record for record in records if len(record)]
        if not records:
            return cls.from_entries([], [], [])
        layers = max(record.num_layers for record in records)
        kv_heads = max(record.num_kv_heads for record in records)
        parts = []
        for record in records:
            shape = tuple(record.evicted_at.shape[:2])
            if shape[0] not in (1, layers) or shape[1] not in (1, kv_heads):
                raise RecordError(
                    f"cannot concatenate records of (layers, kv_heads) {shape} and {(layers, kv_heads)}"
                )
            parts.append(record.evicted_at.expand(layers, kv_heads, -1))
        return cls(
            torch.cat(parts, dim=-1),
            sum((record.lengths for record in records), ()),
            sum((record.prompt_lengths for record in records), ()),
            sum((record.token_hashes for record in records), ()),
        )

    # -- container ------------------------------------------------------------------------------

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[ShadowMask]:
        return (self[n] for n in range(len(self)))

    def __getitem__(self, index: int | slice | Sequence[int]) -> ShadowMask:
        """Select completions. An int or a slice of step 1 is a view, a list copies."""
        if isinstance(index, int):
            if not -len(self) <= index < len(self):
                raise IndexError(f"completion {index} of a record with {len(self)} entries")
            index = slice(index % len(self), index % len(self) + 1)
        rows = range(len(self))[index] if isinstance(index, slice) else list(index)
        starts = [sum(self.lengths[:n]) for n in rows]
        pieces = [
            self.evicted_at[..., start : start + self.lengths[n]]
            for n, start in zip(rows, starts, strict=True)
        ]
        if len(pieces) == 1:
            evicted_at = pieces[0]
        else:
            evicted_at = torch.cat(pieces, dim=-1) if pieces else self.evicted_at[..., :0]
        return ShadowMask(
            evicted_at,
            tuple(self.lengths[n] for n in rows),
            tuple(self.prompt_lengths[n] for n in rows),
            tuple(self.token_hashes[n] for n in rows),
        )

    @property
    def num_layers(self) -> int:
        return self.evicted_at.shape[0]

    @property
    def num_kv_heads(self) -> int:
        return self.evicted_at.shape[1]

    @property
    def nbytes(self) -> int:
        return self.evicted_at.numel() * self.evicted_at.element_size()

    # -- meaning --------------------------------------------------------------------------------

    def visible(
        self, queries: Int[Tensor, " query"] | None = None
    ) -> Bool[Tensor, "layers kv_heads query key"]:
        """Expand one entry to the mask that its queries attended with (True = attended).

        For reading, plotting and testing: it is query x key in size, and the learner never calls it.
        """
        if len(self) != 1:
            raise RecordError(f"visible() is defined for one completion, this record has {len(self)}")
        keys = torch.arange(self.lengths[0], device=self.evicted_at.device)
        queries = keys if queries is None else queries.to(keys.device)
        causal = keys <= queries[:, None]
        return causal & (queries[:, None] < self.evicted_at[:, :, None, :])

    def retained_fraction(self) -> float:
        """Mean share of the causally available keys that completion queries could still see.

        Over all layers, heads and those queries that predict a completion token after the first (the
        first is sampled from the full prompt by construction), pooled: a long completion counts more
        than a short one. 1.0 = dense.
        """
        seen = available = 0.0
        for record, prompt in zip(self, self.prompt_lengths, strict=True):
            last = record.lengths[0] - 2  # the last token predicts nothing
            first = torch.arange(record.lengths[0]).clamp(min=prompt)
            causal = (last + 1 - first).clamp(min=0)
            until = record.evicted_at.cpu().long().clamp(max=last + 1)
            seen += float((until - first).clamp(min=0).sum()) / (self.num_layers * self.num_kv_heads)
            available += float(causal.sum())
        return seen / available if available else 1.0

    def starts_after_prefill(self) -> bool:
        """True if every prompt query saw the whole prompt before it, as in prompt or decode eviction."""
        return all(
            bool((record.evicted_at[..., :prompt] >= prompt).all())
            for record, prompt in zip(self, self.prompt_lengths, strict=True)
        )

    # -- guards ---------------------------------------------------------------------------------

    def check_tokens(
        self, prompt_ids: Sequence[Sequence[int]], completion_ids: Sequence[Sequence[int]]
    ) -> None:
        """Raise unless entry ``n`` was recorded for exactly these prompt and completion tokens."""
        if not len(self) == len(prompt_ids) == len(completion_ids):
            raise RecordError(
                f"the record has {len(self)} entries, but {len(prompt_ids)} prompts and "
                f"{len(completion_ids)} completions are to be scored"
            )
        for n, (prompt, completion) in enumerate(zip(prompt_ids, completion_ids, strict=True)):
            if self.token_hashes[n] != token_hash(prompt, completion):
                raise RecordError(
                    f"record entry {n} ({self.prompt_lengths[n]} prompt + "
                    f"{self.lengths[n] - self.prompt_lengths[n]} completion tokens) was made for other "
                    f"tokens than the {len(prompt)} + {len(completion)} that are to be scored"
                )

    def check_model(self, num_layers: int, num_kv_heads: int) -> None:
        """Raise unless the record broadcasts to this many layers and KV heads.

        Only the shape of a model can be told from a record; other weights of the same shape show in
        the sampling gap.
        """
        mine = (self.num_layers, self.num_kv_heads)
        if mine[0] not in (1, num_layers) or mine[1] not in (1, num_kv_heads):
            raise RecordError(
                f"the record has (layers, kv_heads) = {mine}, the model has "
                f"{(num_layers, num_kv_heads)}: it was made by another model"
            )

    def _check_form(self) -> None:
        if self.evicted_at.dtype != torch.int32 or self.evicted_at.ndim != 3:
            raise RecordError(
                "evicted_at must be int32 [layers, kv_heads, tokens], got "
                f"{self.evicted_at.dtype} {tuple(self.evicted_at.shape)}"
            )
        if not len(self.lengths) == len(self.prompt_lengths) == len(self.token_hashes):
            raise RecordError(
                f"{len(self.lengths)} lengths, {len(self.prompt_lengths)} prompt lengths and "
                f"{len(self.token_hashes)} token hashes: one of each per completion is needed"
            )
        if self.evicted_at.shape[-1] != sum(self.lengths):
            raise RecordError(
                f"evicted_at {tuple(self.evicted_at.shape)} does not hold the "
                f"{sum(self.lengths)} tokens of lengths {self.lengths}"
            )
        for n, (length, prompt) in enumerate(zip(self.lengths, self.prompt_lengths, strict=True)):
            if not 1 <= prompt <= length:
                raise RecordError(f"entry {n}: prompt length {prompt} outside [1, {length}]")

    def _check_values(self) -> None:
        if not self.lengths:
            return
        keys = torch.cat([torch.arange(length) for length in self.lengths])
        wrong = self.evicted_at <= keys.to(self.evicted_at.device)
        if bool(wrong.any()):
            layer, head, column = (int(axis[0]) for axis in wrong.nonzero(as_tuple=True))
            raise RecordError(
                f"evicted_at[{layer}, {head}, {column}] = {int(self.evicted_at[layer, head, column])} "
                f"but that key is token {int(keys[column])} of its sequence: a query always sees itself, "
                "so evicted_at[k] > k"
            )

    # -- storage --------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write to one safetensors file (to a temporary name first, then renamed)."""
        from safetensors.torch import save_file

        path = Path(path)
        meta = {
            "format": _FORMAT,
            "lengths": json.dumps(self.lengths),
            "prompt_lengths": json.dumps(self.prompt_lengths),
            "token_hashes": json.dumps(self.token_hashes),
        }
        partial = path.with_name(path.name + ".partial")
        try:
            save_file({"evicted_at": self.evicted_at.cpu().contiguous()}, partial, metadata=meta)
            partial.replace(path)
        finally:
            partial.unlink(missing_ok=True)

    @classmethod
    def load(cls, path: str | Path) -> ShadowMask:
        """Read what ``save`` wrote.

        Raises:
            RecordError: the file is not such a record.
        """
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(str(path), framework="pt") as file:
                meta = file.metadata() or {}
                if meta.get("format") != _FORMAT:
                    raise RecordError(f"{path} is not a shadow mask: format {meta.get('format')!r}")
                evicted_at = file.get_tensor("evicted_at")
                columns = [
                    tuple(json.loads(meta[name])) for name in ("lengths", "prompt_lengths", "token_hashes")
                ]
        except (SafetensorError, OSError, KeyError, json.JSONDecodeError) as error:
            raise RecordError(f"{path} cannot be read as a shadow mask: {error}") from error
        return cls(evicted_at, *columns)
