"""On a CPU, a decode step's matrix products from the weight's side.

With a handful of rows ``x @ W.T`` is bound by reading ``W``, and CPU libraries read it up to twice as fast
for ``W @ x.T`` as for the product that a linear layer asks for (measured for 8 to 48 rows in float32;
below and above there is nothing to gain). The result is the same up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float
from torch import Tensor, nn

FEW_ROWS = range(8, 49)


def pays(rows: int, weight: Tensor) -> bool:
    return rows in FEW_ROWS and weight.device.type == "cpu" and weight.dtype == torch.float32


def linear_from_weight(
    x: Float[Tensor, "*rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Tensor | None
) -> Float[Tensor, "*rows outputs"]:
    """``F.linear``, computed as the transpose of ``W @ x.T``."""
    out = (weight @ x.reshape(-1, x.shape[-1]).T).T.contiguous()
    return (out if bias is None else out + bias).unflatten(0, x.shape[:-1])


@contextmanager
def from_weight_side(decoder: nn.Module) -> Iterator[None]:
    """Within the block linear layers compute few rows that way, and many rows as before."""
    layers = [m for m in decoder.modules() if type(m) is nn.Linear and "forward" not in m.__dict__]
    layers = [m for m in layers if m.weight.device.type == "cpu"]
    for layer in layers:
        setattr(layer, "forward", _forward(layer))  # noqa: B010  (an attribute of this one layer)
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _forward(layer: nn.Linear) -> Callable[[Tensor], Tensor]:
    plain = layer.forward

    def forward(x: Tensor) -> Tensor:
        rows = x.numel() // x.shape[-1]
        # under autocast F.linear casts, a product of our own would too: leave that to it
        if torch.is_autocast_enabled("cpu") or not pays(rows, layer.weight):
            return plain(x)
        return linear_from_weight(x, layer.weight, layer.bias)

    return forward
