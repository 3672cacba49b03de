"""MLPs in pieces compute what they compute in one, and are left as they were."""

from __future__ import annotations

import pytest
import torch

from shadowmask import sampler
from shadowmask.chunking import chunked_mlps, find_mlps
from tiny_models import FAMILIES, make_model, rollout, shared_rollout
from tolerances import FLOAT64


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_has_mlps_that_can_be_found(family: str) -> None:
    model = make_model(family)
    assert len(find_mlps(model.base_model)) == model.config.num_hidden_layers


@pytest.mark.parametrize("family", ["llama-gqa", "gemma2", "qwen3-moe"])
def test_a_prefill_in_pieces_is_the_prefill(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = shared_rollout(family)
    seen: list[int] = []
    model = make_model(family)
    for mlp in find_mlps(model.base_model):
        mlp.register_forward_hook(lambda _, args, out: seen.append(args[0].shape[1]))
        inner = next(m for m in mlp.modules() if isinstance(m, torch.nn.Linear) or not list(m.children()))
        inner.register_forward_hook(lambda _, args, out: seen.append(-args[0].numel() // args[0].shape[-1]))
    monkeypatch.setattr(sampler, "PREFILL_CHUNK", 7)
    pieces = rollout(model, "snapkv")
    assert min(seen) >= -12  # the largest batch of a decode step; a prompt of 30 in one piece would show
    assert pieces.completion_ids == whole.completion_ids
    for a, b in zip(pieces.sparse_logprobs, whole.sparse_logprobs, strict=True):
        assert float((a - b).abs().max()) <= FLOAT64


@torch.no_grad()
def test_modules_are_restored_and_wrappers_survive() -> None:
    model = make_model()
    first, second = find_mlps(model.base_model)
    plain = first.forward
    first.forward = lambda x: 2 * plain(x)  # as a wrapper of somebody else does
    wrapped = first.forward
    x = torch.randn(1, 9, 64, dtype=torch.float64)
    expected = first(x), second(x)
    with pytest.raises(RuntimeError, match="inside"), chunked_mlps(model.base_model, 4):
        for mlp, out in zip((first, second), expected, strict=True):
            assert float((mlp(x) - out).abs().max()) <= FLOAT64
        raise RuntimeError("inside")
    assert first.forward is wrapped and "forward" not in second.__dict__


def test_what_returns_more_than_tokens_stays_in_one_piece() -> None:
    class Routed(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, int]:
            return x, x.shape[1]

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = Routed()

    decoder = torch.nn.Module()
    decoder.layers = torch.nn.ModuleList([Layer()])
    with chunked_mlps(decoder, 4):
        assert decoder.layers[0].mlp(torch.zeros(1, 9, 2))[1] == 9
