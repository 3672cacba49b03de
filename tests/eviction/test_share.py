"""``share="heads"``: one set of positions for all KV heads of a layer."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from shadowmask import get_evictor, list_evictors, shadow_logprobs
from shadowmask.eviction import EVICTORS
from shadowmask.eviction.base import mean_over_heads
from tiny_models import make_evictor, rollout, shared_model
from tolerances import FLOAT64

EVICTING = [name for name in list_evictors() if name != "dense"]
SHARING = [name for name in EVICTING if "heads" in EVICTORS[name].shares]


def heads_agree(evicted_at: Tensor) -> bool:
    return bool((evicted_at == evicted_at[:, :1]).all())


def test_the_mean_follows_positions_by_hand() -> None:
    # both heads hold 3, 5 and 8, in other slots
    positions = torch.tensor([[[8, -1, 3, 5], [3, 5, 8, -1]]])
    scores = torch.tensor([[[1.0, torch.nan, 2.0, 3.0], [4.0, 7.0, 9.0, torch.inf]]])
    expected = torch.tensor([[[5.0, 0.0, 3.0, 5.0], [3.0, 5.0, 5.0, 0.0]]])
    assert torch.equal(mean_over_heads(scores, positions), expected)


def test_one_head_shares_with_itself() -> None:
    scores, positions = torch.rand(2, 1, 5, dtype=torch.float64), torch.arange(5).expand(2, 1, -1)
    assert torch.equal(mean_over_heads(scores, positions), scores)


@pytest.mark.parametrize("evict_every", [None, 5])
@pytest.mark.parametrize("evictor", SHARING)
def test_shared_heads_keep_the_same_keys(evictor: str, evict_every: int | None) -> None:
    """The record of a whole rollout, with slots overwritten several times."""
    batch = rollout(shared_model(), make_evictor(evictor, share="heads"), evict_every)
    assert batch.shadow.retained_fraction() < 1
    assert all(heads_agree(entry.evicted_at) for entry in batch.shadow)
    gap = torch.cat(shadow_logprobs(shared_model(), batch)) - torch.cat(batch.sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT64


def test_unshared_heads_differ() -> None:
    batch = rollout(shared_model(), make_evictor("snapkv", share="none"), 5)
    assert not all(heads_agree(entry.evicted_at) for entry in batch.shadow)


def test_the_choice_is_by_the_mean() -> None:
    """Position 1 is best for one head, 2 for the other, 0 for both together."""
    evictor = get_evictor(
        "snapkv", budget=2, num_sinks=0, recent_window=1, observation_window=1, share="heads"
    )
    scores = torch.tensor([[[5.0, 6.0, 0.0, 0.0], [5.0, 0.0, 6.0, 0.0]]])
    positions = torch.arange(4).expand(1, 2, -1)
    keep = evictor.select(scores, positions, torch.tensor([3]), torch.tensor([2]), torch.tensor([1]))
    assert keep.tolist() == [[[True, False, False, True]] * 2]
    unshared = get_evictor("snapkv", budget=2, num_sinks=0, recent_window=1, observation_window=1)
    keep = unshared.select(scores, positions, torch.tensor([3]), torch.tensor([2]), torch.tensor([1]))
    assert keep.tolist() == [[[False, True, False, True], [False, False, True, True]]]


def test_sharing_leaves_equal_scores_alone() -> None:
    plain, shared = (rollout(shared_model(), make_evictor("recent", share=s), 5) for s in ("none", "heads"))
    assert torch.equal(plain.shadow.evicted_at, shared.shadow.evicted_at)
    gap = torch.cat(plain.sparse_logprobs) - torch.cat(shared.sparse_logprobs)
    assert float(gap.abs().max()) <= FLOAT64


@pytest.mark.parametrize("evictor", EVICTING)
def test_an_unknown_kind_of_sharing_is_refused(evictor: str) -> None:
    with pytest.raises(ValueError, match=f"{evictor!r}: share='rows' is none of none"):
        get_evictor(evictor, budget=64, share="rows")
