"""Products from the weight's side are the linear layer's, and the layers are left as they were."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shadowmask import few_rows
from shadowmask.few_rows import from_weight_side, linear_from_weight
from shadowmask.sampler import Sampler
from tiny_models import make_model, make_prompts, rollout
from tolerances import FLOAT32


@torch.no_grad()
@pytest.mark.parametrize("shape", [(9, 8), (12, 1, 8), (3, 4, 8)])
@pytest.mark.parametrize("bias", [True, False])
def test_it_is_the_linear_layer(shape: tuple[int, ...], bias: bool) -> None:
    layer = nn.Linear(8, 5, bias=bias)
    x = torch.randn(shape)
    ours = linear_from_weight(x, layer.weight, layer.bias)
    assert ours.shape == layer(x).shape
    assert float((ours - layer(x)).abs().max()) <= FLOAT32


def test_only_few_rows_go_that_way_and_only_inside(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = few_rows.linear_from_weight

    def counting(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        seen.append(x.shape[0])
        return plain(x, *rest)

    monkeypatch.setattr(few_rows, "linear_from_weight", counting)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double())
    with from_weight_side(model):
        for rows in (1, 7, 8, 48, 49):
            model[0](torch.randn(rows, 8))
        model[1](torch.randn(12, 8).double())
        with torch.autocast("cpu", torch.bfloat16):
            model[0](torch.randn(12, 8))
    model[0](torch.randn(12, 8))
    assert seen == [8, 48]
    assert all("forward" not in layer.__dict__ for layer in model)


def test_layers_are_restored_when_a_rollout_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(dtype=torch.float32)
    rollout(model, "snapkv", prompts=make_prompts((20,)), group_size=12)  # decodes 12 rows

    def failing(self: Sampler) -> None:
        raise RuntimeError("in mid-rollout")

    monkeypatch.setattr(Sampler, "_step", failing)
    with pytest.raises(RuntimeError, match="in mid-rollout"):
        rollout(model, "snapkv")
    assert not [name for name, module in model.named_modules() if "forward" in module.__dict__]
