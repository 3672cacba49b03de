"""Lay out rollouts for the learner: ``[prompt | c1 | ... | cG]``, the prompt's tokens once.

Causal attention makes the prompt rows of all completions of a prompt the same numbers, so one flat
row of tokens serves the group: ``P + sum(C - 1)`` tokens instead of ``G (P + C)``. The last token of
a completion predicts nothing and nobody attends to it, so it is left out. Positions stay what they
were in the rollout; who attends to whom is the replay session's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class PackedGroup:
    """Where one prompt and its completions lie in the flat row."""

    members: tuple[int, ...]  # indices of the completions in the batch
    prompt_start: int
    prompt_length: int
    completion_starts: tuple[int, ...]
    completion_lengths: tuple[int, ...]  # tokens in the pack: one less than sampled

    def stack_completions(
        self, flat: Float[Tensor, "heads tokens dim"], skipped: int = 0
    ) -> Float[Tensor, "heads group longest dim"]:
        """Lay the rows of the group's completions side by side, shorter ones padded with zeros.

        Views and copies of slices only: indexing would add up its gradients in an order that changes
        from run to run.

        Args:
            skipped: rows that ``flat`` lacks in front of this group's completions.
        """
        start = self.completion_starts[0] - skipped
        span = flat[:, start : start + sum(self.completion_lengths)]
        longest = max(self.completion_lengths)
        if min(self.completion_lengths) == longest:
            return span.unflatten(1, (len(self.members), longest))
        pieces = span.split(list(self.completion_lengths), dim=1)
        return torch.stack([F.pad(piece, (0, 0, 0, longest - piece.shape[1])) for piece in pieces], dim=1)


@dataclass(frozen=True)
class PackedBatch:
    """Groups one after another in one flat row, and where each completion token is predicted.

    ``target_rows[n]`` is the flat row whose hidden state predicts ``targets[n]``. Tokens are ordered
    by completion (batch order) and then by position; ``completion_lengths`` splits them again.
    """

    input_ids: Int[Tensor, "1 tokens"]
    position_ids: Int[Tensor, "1 tokens"]
    groups: tuple[PackedGroup, ...]
    target_rows: Int[Tensor, " targets"]
    targets: Int[Tensor, " targets"]
    completion_lengths: tuple[int, ...]

    @property
    def num_tokens(self) -> int:
        return self.input_ids.shape[1]

    def completion_token_rows(self) -> Int[Tensor, " completion_tokens"]:
        """Flat rows that belong to completions, in flat order."""
        return torch.cat(
            [
                torch.arange(start, start + length)
                for group in self.groups
                for start, length in zip(group.completion_starts, group.completion_lengths, strict=True)
            ]
            or [torch.empty(0, dtype=torch.int64)]
        ).to(self.input_ids.device)


def pack(
    prompt_ids: Sequence[Sequence[int]],
    completion_ids: Sequence[Sequence[int]],
    device: torch.device | str = "cpu",
) -> PackedBatch:
    """Pack completions so that each distinct prompt appears once.

    Args:
        prompt_ids: the prompt of every completion (equal prompts are found and shared).
        completion_ids: at least one token each; an empty completion has nothing to score.
    """
    members: dict[tuple[int, ...], list[int]] = {}
    for n, prompt in enumerate(prompt_ids):
        if not prompt:
            raise ValueError(f"prompt {n} is empty: at least one token is needed")
        members.setdefault(tuple(prompt), []).append(n)

    tokens: list[int] = []
    positions: list[int] = []
    groups = []
    first_rows: dict[int, tuple[int, int]] = {}  # completion -> (last prompt row, completion start)
    for prompt, indices in members.items():
        prompt_start = len(tokens)
        tokens += prompt
        positions += range(len(prompt))
        starts, lengths = [], []
        for n in indices:
            fed = list(completion_ids[n])[:-1]
            starts.append(len(tokens))
            lengths.append(len(fed))
            first_rows[n] = (prompt_start + len(prompt) - 1, len(tokens))
            tokens += fed
            positions += range(len(prompt), len(prompt) + len(fed))
        groups.append(PackedGroup(tuple(indices), prompt_start, len(prompt), tuple(starts), tuple(lengths)))

    rows: list[int] = []
    targets: list[int] = []
    for n, completion in enumerate(completion_ids):
        if completion:
            last_prompt_row, start = first_rows[n]
            rows += [last_prompt_row, *range(start, start + len(completion) - 1)]
            targets += completion
    return PackedBatch(
        input_ids=torch.tensor([tokens], device=device),
        position_ids=torch.tensor([positions], device=device),
        groups=tuple(groups),
        target_rows=torch.tensor(rows, dtype=torch.int64, device=device),
        targets=torch.tensor(targets, dtype=torch.int64, device=device),
        completion_lengths=tuple(len(c) for c in completion_ids),
    )
