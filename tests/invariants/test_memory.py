"""The memory claim: slots are the budget, allocated once, and no full prompt outlives its layer."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import shadowmask.rollout
from shadowmask import RolloutBatch, RolloutEngine, get_evictor, shadow_logprobs
from shadowmask.attention import completions, kernel
from shadowmask.cache import OwnedSlotCache, SharedPromptCache, slot_bytes
from shadowmask.cache.slots import LayerSlots
from shadowmask.eviction import list_evictors
from shadowmask.sampler import Sampler
from tiny_models import BUDGET, MAX_NEW_TOKENS, make_evictor, make_learner, make_model, make_prompts, rollout
from tolerances import FLOAT64

PROMPT, LONG_BUDGET, NEW, EVERY = 4096, 512, 12, 4
LAYERS, KV_HEADS, HEAD_DIM = 2, 2, 16


class Watched(OwnedSlotCache):
    """A slot cache that remembers itself and the prompts that it was handed."""

    made: list[Watched]

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Watched.made.append(self)
        self.prompt_tensors: list[tuple[int, weakref.ref[torch.Tensor]]] = []
        self.alive_at_prefill: list[int] = []
        self.pointers: list[dict[int, tuple[int, int, int]]] = []

    def prefill(
        self, layer: int, place: int, prompt: Any, query: Any, key: Any, value: Any, *rest: Any
    ) -> None:
        self.alive_at_prefill.append(sum(ref() is not None for n, ref in self.prompt_tensors if n != layer))
        super().prefill(layer, place, prompt, query, key, value, *rest)
        self.prompt_tensors += [(layer, weakref.ref(x)) for x in (key, value)]

    def evict(self, rows: list[int]) -> None:
        self.note()
        super().evict(rows)
        self.note()

    def note(self) -> None:
        self.pointers.append(
            {
                n: (slots.keys.data_ptr(), slots.values.data_ptr(), slots.positions.data_ptr())
                for n, slots in self.layers.items()
            }
        )


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> type[Watched]:
    Watched.made = []
    monkeypatch.setattr(shadowmask.rollout, "OwnedSlotCache", Watched)
    return Watched


def long_rollout(evictor: str = "snapkv", evict_every: int | None = EVERY, group: int = 2) -> RolloutBatch:
    settings = {} if evictor == "recent" else {"num_sinks": 4}
    engine = RolloutEngine(
        make_model(dtype=torch.float32),
        None,
        get_evictor(evictor, budget=LONG_BUDGET, **settings),
        evict_every,
    )
    return engine.generate(
        make_prompts((PROMPT,)), group_size=group, max_new_tokens=NEW, stop_token_ids=[], seed=0
    )


def test_slots_are_the_budget_after_a_long_prompt(watched: type[Watched]) -> None:
    batch = long_rollout(evict_every=EVERY)
    (cache,) = watched.made
    expected = LONG_BUDGET + EVERY
    assert len(cache.layers) == LAYERS
    for slots in cache.layers.values():
        assert slots.keys.shape == slots.values.shape == (2, KV_HEADS, expected, HEAD_DIM)
    after_prefill = (batch.shadow[0].evicted_at[..., :PROMPT] > PROMPT).sum(-1)
    assert after_prefill.unique().tolist() == [LONG_BUDGET]
    one_layer = slot_bytes(1, KV_HEADS, HEAD_DIM, HEAD_DIM, itemsize=4)
    assert batch.kv_bytes_peak == one_layer * (LAYERS * 2 * expected + PROMPT)


def test_a_group_holds_its_prompt_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt-only eviction: budget slots per prompt, whatever the group; own slots per completion."""
    made: list[SharedPromptCache] = []

    class Kept(SharedPromptCache):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(shadowmask.rollout, "SharedPromptCache", Kept)
    batch = long_rollout(evict_every=None, group=5)
    (cache,) = made
    for slots in cache.layers.values():
        assert slots.prompt_keys.shape == slots.prompt_values.shape == (1, KV_HEADS, LONG_BUDGET, HEAD_DIM)
        assert slots.keys.shape == slots.values.shape == (5, KV_HEADS, NEW - 1, HEAD_DIM)
    one_layer = slot_bytes(1, KV_HEADS, HEAD_DIM, HEAD_DIM, itemsize=4)
    assert batch.kv_bytes_peak == one_layer * (LAYERS * (LONG_BUDGET + 5 * (NEW - 1)) + PROMPT)
    tensors = [x for s in cache.layers.values() for x in (s.prompt_keys, s.prompt_values, s.keys, s.values)]
    assert cache.nbytes == sum(x.untyped_storage().nbytes() for x in tensors)


def test_no_prompt_outlives_its_layer(watched: type[Watched], monkeypatch: pytest.MonkeyPatch) -> None:
    """When a layer is evicted no other layer's full keys exist, and when decoding starts none does."""
    survivors: list[tuple[int, ...]] = []
    original = Sampler._step

    def looking(self: Any, *args: Any) -> Any:
        if not survivors:
            gc.collect()
            shapes = [tuple(x.shape) for x in gc.get_objects() if type(x) is torch.Tensor]
            survivors.extend(s for s in shapes if len(s) >= 3 and PROMPT in s[-2:])
            survivors.append(())
        return original(self, *args)

    monkeypatch.setattr(Sampler, "_step", looking)
    long_rollout()
    (cache,) = watched.made
    assert cache.alive_at_prefill == [0] * LAYERS
    assert all(ref() is None for _, ref in cache.prompt_tensors)
    assert survivors == [()], "a tensor as long as the prompt survived the prefill"


def test_slots_never_move(watched: type[Watched]) -> None:
    rollout(make_model(), "snapkv", evict_every=3)
    (cache,) = watched.made
    assert len(cache.pointers) > 10
    assert all(pointers == cache.pointers[0] for pointers in cache.pointers)


def test_slots_hold_no_more_than_the_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[int]] = []
    original = OwnedSlotCache.evict

    def looking(self: OwnedSlotCache, rows: list[int]) -> None:
        original(self, rows)
        held.append((self.layers[0].positions >= 0).sum(-1).unique().tolist())

    monkeypatch.setattr(OwnedSlotCache, "evict", looking)
    long_rollout()
    assert held == [[LONG_BUDGET]] * ((NEW - 1) // EVERY)


def test_bytes_by_formula_are_the_bytes_of_the_slots(watched: type[Watched]) -> None:
    for family, heads in (("llama-mha", 4), ("llama-gqa", 2), ("llama-mqa", 1)):
        for dtype, itemsize in ((torch.float32, 4), (torch.bfloat16, 2)):
            batch = rollout(make_model(family, dtype), "recent", evict_every=5)
            cache = watched.made[-1]
            per_token = slot_bytes(LAYERS, heads, HEAD_DIM, HEAD_DIM, itemsize)
            rows, slots = 12, 12 + 5
            assert cache.nbytes == per_token * rows * slots
            assert cache.nbytes == sum(
                x.untyped_storage().nbytes() for s in cache.layers.values() for x in (s.keys, s.values)
            )
            longest_prompt = max(map(len, batch.prompt_ids))
            assert batch.kv_bytes_peak == cache.nbytes + per_token // LAYERS * longest_prompt
            pairs = list(zip(batch.prompts_per_completion, batch.completion_ids, strict=True))
            # a sequence leaves when its last token is sampled, so that many are in flight at each step
            dense = [
                sum(len(p) + fed for p, c in pairs if len(c) - 1 >= fed) for fed in range(MAX_NEW_TOKENS)
            ]
            assert (
                batch.kv_bytes_dense == per_token * max(dense) < per_token * sum(len(p + c) for p, c in pairs)
            )


class LargestTensor(TorchDispatchMode):
    """Notes the largest floating-point or boolean tensor that any operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0
        self.shape: tuple[int, ...] = ()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else [out]:
            if isinstance(x, torch.Tensor) and x.untyped_storage().nbytes() >= x.numel():
                held = min(x.numel(), x.untyped_storage().nbytes() // x.element_size())
                if held > self.elements:
                    self.elements, self.shape = held, tuple(x.shape)
        return out


@pytest.mark.parametrize("evictor", ["snapkv", "h2o"])
def test_no_tensor_is_tokens_by_tokens(evictor: str) -> None:
    """Neither sampler nor learner makes a T x T tensor, not even for one head."""
    batch = long_rollout(evictor, group=1)
    with LargestTensor() as sampler:
        long_rollout(evictor, group=1)
    model = make_learner(dtype=torch.float32)
    with torch.no_grad(), LargestTensor() as learner:
        shadow_logprobs(model, batch)
    for largest in (sampler, learner):
        assert 0 < largest.elements < PROMPT * PROMPT // 2, largest.shape
    # control: the plain dense forward does make one, and the watch sees it
    with torch.no_grad(), LargestTensor() as plain:
        model(torch.tensor(batch.prompt_ids))
    assert plain.elements >= PROMPT * PROMPT


@pytest.mark.parametrize("evictor", [name for name in list_evictors() if name != "dense"])
def test_no_evictor_compares_all_tokens_at_once(evictor: str) -> None:
    with LargestTensor() as sampler:
        long_rollout(evictor, group=1)
    assert 0 < sampler.elements < PROMPT * PROMPT // 2, sampler.shape


@pytest.mark.parametrize("kernel_at_hand", [True, False])
def test_the_learner_attends_to_what_was_kept_only(
    kernel_at_hand: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Completion rows gather the prompt keys that some member still sees: budget-sized, not prompt-sized."""
    batch = long_rollout("recent", evict_every=None, group=2)
    model = make_learner(dtype=torch.float32)
    seen: list[int] = []
    shared, copied = completions.group_attention, completions.chunked_attention

    def count_shared(own: Any, prompt: Any, *rest: Any) -> Any:
        seen.append(prompt[0].shape[1])
        return shared(own, prompt, *rest)

    def count_copied(query: Any, key: Any, *rest: Any) -> Any:
        seen.append(key.shape[2] - (NEW - 1))
        return copied(query, key, *rest)

    monkeypatch.setattr(completions, "group_attention", count_shared)
    monkeypatch.setattr(completions, "chunked_attention", count_copied)
    monkeypatch.setattr(completions, "can_share", lambda *_: kernel_at_hand)
    with torch.no_grad():
        shadow_logprobs(model, batch)
    assert seen == [LONG_BUDGET] * LAYERS


def test_keys_that_no_row_of_a_chunk_sees_are_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode-time eviction: attention follows the budget, however long prompt and completion are."""
    chunk = 8
    monkeypatch.setattr(kernel, "QUERY_CHUNK", chunk)
    engine = RolloutEngine(make_model(), None, make_evictor("h2o"), EVERY)
    batch = engine.generate(make_prompts((60,)), 2, 64, stop_token_ids=[])
    seen: list[int] = []
    attend = completions.masked_attention

    def counting(query: Any, key: Any, *rest: Any) -> Any:
        seen.append(key.shape[2])
        return attend(query, key, *rest)

    monkeypatch.setattr(completions, "masked_attention", counting)
    with torch.no_grad():
        replayed = shadow_logprobs(make_learner(), batch)
    assert len(seen) == LAYERS * 2 * 8  # members and chunks
    # what an eviction left, what came until the next one, and the chunk itself
    assert max(seen) <= BUDGET + EVERY + chunk
    gaps = [(a - b).abs().max() for a, b in zip(replayed, batch.sparse_logprobs, strict=True)]
    assert float(max(gaps)) <= FLOAT64


def test_layers_are_allocated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    original = LayerSlots.__init__

    def counting(self: Any, *args: Any) -> None:
        made.append(1)
        original(self, *args)

    monkeypatch.setattr(LayerSlots, "__init__", counting)
    rollout(make_model(), make_evictor("h2o"), evict_every=3)
    assert len(made) == LAYERS
