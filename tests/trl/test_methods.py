"""``method``: the same without eviction, different with it, and logged alike."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from shadowmask.corrections import METHODS
from shadowmask.metrics import PARITY_LIMITS
from shadowmask.trl import SMDTrainer
from tiny_trl import history, make_config, make_trainer
from tolerances import FLOAT32, GRADIENT_DIFFERS, SAME_METHOD, TRL_GRADIENT, relative_gap

LOGGED = [
    "off_policy/log_ratio_min",
    "off_policy/log_ratio_p1",
    "off_policy/log_ratio_p5",
    "off_policy/log_ratio_max",
    "off_policy/ess",
    "correction/rejected_fraction",
    "correction/ess",
    "information_gap/agreement_p5",
    "sampling_gap/max",
    "grad_norm",
    "gradient/group_variance",
    "gradient/group_noise",
]
DENSE_LEARNERS = [name for name, method in METHODS.items() if not method.replays]


def batch_of(trainer: SMDTrainer) -> dict[str, Any]:
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[n // 4] for n in range(8)])


def loss_and_gradient(trainer: SMDTrainer, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("loss_type", ["dapo", "grpo", "cispo"])
def test_without_eviction_all_methods_are_the_same(loss_type: str, tmp_path: Path) -> None:
    found = {}
    for method in METHODS:
        trainer = make_trainer(tmp_path, method=method, evictor="dense", loss_type=loss_type)
        batch = batch_of(trainer)
        assert float(batch["advantages"].abs().max()) > 0
        found[method] = loss_and_gradient(trainer, batch)
    for method, (loss, gradient) in found.items():
        assert loss == pytest.approx(found["dense"][0], abs=SAME_METHOD), method
        assert relative_gap(gradient, found["dense"][1]) <= TRL_GRADIENT, method


def test_with_eviction_no_two_methods_are_the_same(tmp_path: Path) -> None:
    gradients = {}
    for method in METHODS:
        trainer = make_trainer(tmp_path, method=method, evictor="random")
        gradients[method] = loss_and_gradient(trainer, batch_of(trainer))[1]
    for a in METHODS:
        for b in METHODS:
            if a < b:
                assert relative_gap(gradients[a], gradients[b]) > GRADIENT_DIFFERS, (a, b)


def test_methods_share_their_rollouts(tmp_path: Path) -> None:
    """Same weights, same seed: only the learner differs. Dense sees everything, so it samples others."""
    tokens = {
        method: batch_of(make_trainer(tmp_path, method=method, evictor="random"))["completion_ids"]
        for method in METHODS
    }
    for method in METHODS:
        assert torch.equal(tokens[method], tokens["smd"]) == (method != "dense"), method


@pytest.mark.parametrize("method", METHODS)
def test_every_method_logs_the_same(method: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, method=method, evictor="random")
    trainer.train()
    assert trainer.state.global_step == 3
    for key in LOGGED:
        values = history(trainer, key)
        assert values and all(map(math.isfinite, values)), key
    replays = METHODS[method].replays
    assert (max(history(trainer, "sampling_gap/max")) <= FLOAT32) == replays
    assert (min(history(trainer, "off_policy/ess")) > 1 - FLOAT32) == replays
    assert bool(history(trainer, "smd/distill_kl")) == (method in ("smd", "shadow"))
    rejects = method in ("mis", "icepop", "sparse-rl")
    assert rejects or max(history(trainer, "correction/rejected_fraction")) == 0
    assert not rejects or max(history(trainer, "correction/rejected_fraction")) > 0
    retained = min(history(trainer, "kv/retained_fraction"))
    assert (retained == 1) == (method == "dense")
    agreement = min(history(trainer, "information_gap/agreement_p5"))
    assert (agreement > 1 - FLOAT32) == (method == "dense")


def test_the_parity_guard_is_on_exactly_where_the_learner_replays(tmp_path: Path) -> None:
    """The guard must fire for a learner that should replay and does not, not for one that never claims to."""
    limit = PARITY_LIMITS[torch.float32][1]
    for method in ("naive", "sparse-rl"):
        trainer = make_trainer(tmp_path, method=method, evictor="random", parity_action="raise")
        trainer.train()
        assert max(history(trainer, "sampling_gap/max")) > 100 * limit


@pytest.mark.parametrize("method", ["naive", "tis", "shadow"])
def test_a_second_iteration_is_stale_not_off_policy(method: str, tmp_path: Path) -> None:
    """Staleness compares new and old weights of the learner; the mismatch with the sampler does not."""
    trainer = make_trainer(tmp_path, method=method, evictor="random", num_iterations=2, max_steps=4)
    trainer.train()
    staleness = history(trainer, "staleness/kl")
    assert staleness[0] <= FLOAT32 < staleness[1]
    first, second = history(trainer, "off_policy/log_ratio_max")[:2]
    assert second == pytest.approx(first, abs=FLOAT32), "both iterations compare the weights of the rollout"


def test_corrections_are_not_applied_twice_to_a_reused_batch(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, method="tis", evictor="random")
    batch = batch_of(trainer)
    once, again = loss_and_gradient(trainer, batch), loss_and_gradient(trainer, batch)
    assert once[0] == again[0] and torch.equal(once[1], again[1])
    assert batch["advantages"].dim() == 1


def test_accumulation_does_not_change_a_token_level_method(tmp_path: Path) -> None:
    losses = []
    for size, steps in ((8, 1), (4, 2)):
        trainer = make_trainer(
            tmp_path,
            method="tis",
            evictor="random",
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            learning_rate=0.0,
            max_steps=1,
        )
        trainer.train()
        losses.append(history(trainer, "grad_norm")[0])
    assert losses[0] == pytest.approx(losses[1], rel=TRL_GRADIENT)


def test_method_kwargs_change_the_correction(tmp_path: Path) -> None:
    found = [
        loss_and_gradient(trainer, batch_of(trainer))[1]
        for trainer in (
            make_trainer(tmp_path, method="tis", evictor="random", method_kwargs=kwargs)
            for kwargs in (None, '{"cap": 2.0}', {"cap": 1.01})
        )
    ]
    assert torch.equal(found[0], found[1])
    assert relative_gap(found[2], found[0]) > GRADIENT_DIFFERS


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"method": "nave"}, "method='nave' must be one of"),
        ({"method": "tis", "method_kwargs": "[1]"}, "must be a mapping"),
        ({"method": "tis", "method_kwargs": "{"}, "is not JSON"),
        ({"method": "naive", "teacher": "ema"}, "teacher='ema': method 'naive' does not distil"),
        ({"method": "shadow", "kl_cap": 1.0}, "kl_cap=1.0: method 'shadow' does not distil"),
        ({"method": "tis", "loss_type": "vespo"}, "loss_type='vespo' weighs sequences itself"),
        ({"method": "dense", "agreement_floor": 0.8}, "nothing is evicted"),
        ({"agreement_floor": 1.5}, "agreement_floor=1.5 must be in"),
        ({"teacher": "other"}, "teacher='other' must be one of self, ema, initial"),
        ({"teacher_decay": 1.0}, "teacher_decay=1.0 must be in"),
        ({"kl_cap": 0.0}, "kl_cap=0.0 must be positive"),
        ({"distill_schedule": "cosine"}, "distill_schedule='cosine' must be one of constant, gap"),
    ],
)
def test_bad_settings_are_one_clear_line(settings: dict[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=said):
        make_config(tmp_path, **settings)
