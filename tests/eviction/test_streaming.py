"""StreamingLLM: sinks and one recent window."""

from __future__ import annotations

import pytest
import torch

from shadowmask import get_evictor
from shadowmask.eviction import EVICTORS
from tiny_models import BUDGET, make_evictor, make_prompts, rollout, shared_model


def test_the_window_is_what_sinks_leave_of_the_budget() -> None:
    assert get_evictor("streaming", budget=512).recent_window_for(512) == 508
    assert get_evictor("streaming", budget=5).recent_window_for(5) == 1
    by_ratio = get_evictor("streaming", compression_ratio=0.5)
    assert by_ratio.budget_for(20) == 10 and by_ratio.budget_for(4) == 5


def test_recent_does_not_go_below_its_window_and_streaming_does() -> None:
    assert get_evictor("recent", compression_ratio=0.5).budget_for(20) == 36
    with pytest.raises(ValueError, match="raise the budget to at least 36"):
        get_evictor("recent", budget=5)
    with pytest.raises(ValueError, match="raise the budget to at least 5"):
        get_evictor("streaming", budget=4)


@pytest.mark.parametrize("recent_window", [None, 1, 4])
@pytest.mark.parametrize("evict_every", [None, 3])
def test_the_same_keys_stay_as_under_recent(evict_every: int | None, recent_window: int | None) -> None:
    streaming = EVICTORS["streaming"](budget=BUDGET, num_sinks=2, recent_window=recent_window)
    batch = rollout(shared_model(), streaming, evict_every)
    other = rollout(shared_model(), make_evictor("recent"), evict_every)
    assert batch.shadow.retained_fraction() < 1
    assert torch.equal(batch.shadow.evicted_at, other.shadow.evicted_at)


def test_by_hand() -> None:
    """Of 12 prompt tokens under a budget of 5 stay one sink and the last four."""
    evictor = get_evictor("streaming", budget=5, num_sinks=1)
    batch = rollout(shared_model(), evictor, None, make_prompts((12,)), group_size=1)
    alive = (batch.shadow[0].evicted_at[..., :12] > 12).nonzero()[:, 2].unique().tolist()
    assert alive == [0, 8, 9, 10, 11]
