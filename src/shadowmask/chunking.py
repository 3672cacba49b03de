"""Long prompts go through the MLPs in pieces.

A prompt's attention needs all of its tokens at once, one layer at a time; an MLP does not, and its
intermediate activations are the widest tensors of a prefill. So while a prompt is read each MLP takes
``chunk`` tokens at a time. Results are the same up to the rounding of a matrix product's shape.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

NAMES = ("mlp", "feed_forward", "block_sparse_moe", "ffn")  # what model families call it


def find_mlps(decoder: nn.Module) -> list[nn.Module]:
    """The token-wise part of every layer, where a family names it in one of the usual ways."""
    layers = next((m for m in decoder.children() if isinstance(m, nn.ModuleList)), nn.ModuleList())
    return [child for layer in layers for name, child in layer.named_children() if name in NAMES]


@contextmanager
def chunked_mlps(decoder: nn.Module, chunk: int) -> Iterator[None]:
    """Within the block each MLP of the decoder processes at most ``chunk`` tokens at a time."""
    mlps = find_mlps(decoder)
    own = [module.__dict__.get("forward") for module in mlps]  # wrappers may have put one there
    for module in mlps:
        module.forward = _in_pieces(module.forward, chunk)
    try:
        yield
    finally:
        for module, forward in zip(mlps, own, strict=True):
            del module.forward
            if forward is not None:
                module.forward = forward


def _in_pieces(forward: Callable[..., Any], chunk: int) -> Callable[..., Any]:
    def pieces(*args: Any, **kwargs: Any) -> Any:
        tokens = args[0] if len(args) == 1 and not kwargs else None
        if not isinstance(tokens, Tensor) or tokens.dim() != 3 or tokens.shape[1] <= chunk:
            return forward(*args, **kwargs)
        out = None
        for start in range(0, tokens.shape[1], chunk):
            piece = forward(tokens[:, start : start + chunk])
            if not isinstance(piece, Tensor) or piece.shape[:2] != tokens[:, start : start + chunk].shape[:2]:
                return forward(tokens)  # it returns more than the tokens' new values: as one piece
            if out is None:
                out = torch.empty(*tokens.shape[:2], piece.shape[-1], dtype=piece.dtype, device=piece.device)
            out[:, start : start + chunk] = piece
        return out

    return pieces
