"""Guard rails: who teaches, how strongly, under what budget, and when to stop."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from shadowmask.trl import SMDTrainer
from shadowmask.trl.budget import GROWTH, MARGIN, SHRINKAGE, BudgetController
from shadowmask.trl.gradients import GradientSpread, spread_metrics
from shadowmask.trl.guards import METRIC, DenseGuard
from shadowmask.trl.teachers import Teacher
from tiny_models import make_model
from tiny_trl import history, make_config, make_trainer
from tolerances import (
    EXACT,
    FLOAT32,
    GRADIENT_DIFFERS,
    GRADIENT_FLOAT32,
    HAND_COMPUTED,
    RESUMED_LOSS,
    relative_gap,
)


def batch_of(trainer: SMDTrainer) -> dict[str, Any]:
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[n // 4] for n in range(8)])


def gradient_of(trainer: SMDTrainer, batch: dict[str, Any]) -> torch.Tensor:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = 1
    trainer._compute_loss(trainer.model, batch).backward()
    return torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


# -- teacher ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("teacher", ["ema", "initial"])
def test_before_the_first_update_every_teacher_is_the_paper_s(teacher: str, tmp_path: Path) -> None:
    own = make_trainer(tmp_path, distill_coef=1.0)
    other = make_trainer(tmp_path, distill_coef=1.0, teacher=teacher)
    expected, actual = gradient_of(own, batch_of(own)), gradient_of(other, batch_of(other))
    assert relative_gap(actual, expected) <= GRADIENT_FLOAT32
    # control: a teacher of other weights teaches something else
    with torch.no_grad():
        for parameter in other.teacher.model.parameters():
            parameter.mul_(1.1)
    assert relative_gap(gradient_of(other, batch_of(other)), expected) > GRADIENT_DIFFERS


@pytest.mark.parametrize(("teacher", "moves"), [("ema", True), ("initial", False)])
def test_teachers_move_as_their_names_say(teacher: str, moves: bool, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, teacher=teacher, teacher_decay=0.75, max_steps=1)
    start = [p.detach().clone() for p in trainer.model.parameters()]
    trainer.train()
    end = [p.detach() for p in trainer.model.parameters()]
    for before, after, held in zip(start, end, trainer.teacher.model.parameters(), strict=True):
        expected = 0.75 * before + 0.25 * after if moves else before
        assert torch.allclose(held, expected, rtol=0, atol=FLOAT32)
        assert not held.requires_grad
    assert any(not torch.equal(a, b) for a, b in zip(start, end, strict=True))
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32


def test_an_ema_teacher_survives_a_checkpoint(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"teacher": "ema", "teacher_decay": 0.5, "agreement_floor": 0.99}
    settings |= {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    whole = make_trainer(tmp_path / "whole", **settings)
    whole.train()
    resumed = make_trainer(tmp_path / "again", **settings)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-2"))
    for a, b in zip(whole.teacher.model.parameters(), resumed.teacher.model.parameters(), strict=True):
        assert relative_gap(b, a) <= RESUMED_LOSS
    assert resumed.budget.scale == whole.budget.scale > 1
    assert history(resumed, "loss") == pytest.approx(history(whole, "loss"), abs=RESUMED_LOSS)
    plain = make_trainer(tmp_path / "plain", save_strategy="steps", save_steps=2, max_steps=2)
    plain.train()
    with pytest.raises(ValueError, match="that run's teacher was 'self'"):
        make_trainer(tmp_path / "more", **settings).train(
            resume_from_checkpoint=str(tmp_path / "plain" / "checkpoint-2")
        )


def test_a_sharded_model_is_refused() -> None:
    model = make_model(dtype=torch.float32)
    assert isinstance(Teacher(model, 0.5), Teacher)
    next(model.parameters()).ds_id = 0
    from shadowmask.trl.teachers import make_teacher

    with pytest.raises(ValueError, match="ZeRO-3 shards"):
        make_teacher(model, "ema", 0.5)
    assert make_teacher(model, "self", 0.5) is None


# -- strength ---------------------------------------------------------------------------------------


def test_a_low_cap_silences_distillation_and_a_high_one_changes_nothing(tmp_path: Path) -> None:
    gradients = {}
    for cap in (None, 1e9, 1e-9):
        trainer = make_trainer(tmp_path, distill_coef=1.0, kl_cap=cap)
        gradients[cap] = gradient_of(trainer, batch_of(trainer))
    shadow = make_trainer(tmp_path, method="shadow")
    alone = gradient_of(shadow, batch_of(shadow))
    assert torch.equal(gradients[None], gradients[1e9])
    assert relative_gap(gradients[1e-9], alone) <= GRADIENT_FLOAT32
    assert relative_gap(gradients[None], alone) > GRADIENT_DIFFERS


def test_lambda_follows_the_gap_by_hand(tmp_path: Path) -> None:
    config = make_config(tmp_path, distill_coef=0.2, distill_schedule="gap", distill_gap=0.1)
    assert config.distill_weight(0.05) == config.distill_weight(0.1) == 0.2
    assert config.distill_weight(0.4) == pytest.approx(0.05, abs=HAND_COMPUTED)
    assert make_config(tmp_path, distill_coef=0.2).distill_weight(5.0) == 0.2
    assert make_config(tmp_path, distill_coef=0.2, method="shadow").distill_weight(0.0) == EXACT


def test_lambda_is_logged(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, distill_schedule="gap", distill_gap=1e-3)
    trainer.train()
    gap = history(trainer, "information_gap/kl")
    expected = [0.1 * 1e-3 / kl for kl in gap]
    assert history(trainer, "smd/lambda") == pytest.approx(expected, rel=FLOAT32 * 10)


# -- budget -----------------------------------------------------------------------------------------


def test_the_budget_follows_agreement_by_hand() -> None:
    budget = BudgetController(0.8)
    assert budget.update(0.5) == GROWTH and budget.update(0.79) == GROWTH**2
    assert budget.update(0.8 + MARGIN / 2) == GROWTH**2, "inside the margin nothing moves"
    assert budget.update(0.99) == GROWTH**2 * SHRINKAGE
    for _ in range(100):
        budget.update(1.0)
    assert budget.scale == 1.0, "never below what was configured"


def test_the_budget_grows_in_training_until_agreement_is_high(tmp_path: Path) -> None:
    settings = {"evictor": "random", "max_steps": 6, "learning_rate": 0.0}
    fixed = make_trainer(tmp_path, **settings)
    fixed.train()
    trainer = make_trainer(tmp_path, agreement_floor=0.95, **settings)
    trainer.train()
    retained = history(trainer, "kv/retained_fraction")
    assert retained[0] == history(fixed, "kv/retained_fraction")[0] < retained[-1]
    assert (
        history(trainer, "information_gap/agreement_p5")[-1]
        > history(fixed, "information_gap/agreement_p5")[-1]
    )
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32, "the record follows the budget"
    assert not history(fixed, "kv/budget_scale")


@pytest.mark.parametrize(
    ("settings", "scale", "budget"),
    [
        ({"compression_ratio": 0.5, "budget": None}, 1.0, 50),
        ({"compression_ratio": 0.5, "budget": None}, 1.5, 75),
        ({"compression_ratio": 0.5, "budget": None}, 9.0, None),
        ({"budget": 10}, 1.5, 15),
        ({"method": "dense"}, 1.5, None),
    ],
)
def test_a_scaled_evictor_keeps_more(
    settings: dict[str, Any], scale: float, budget: int | None, tmp_path: Path
) -> None:
    assert make_config(tmp_path, **settings).rollout_evictor(scale).budget_for(100) == budget


# -- dense accuracy ---------------------------------------------------------------------------------


def run_guard(accuracies: list[float], stop: bool) -> tuple[DenseGuard, list[str], list[float], Any]:
    said: list[str] = []
    logged: list[float] = []
    values = iter(accuracies)
    guard = DenseGuard(
        lambda: next(values), 2, 0.1, stop, lambda name, value: logged.append(value), said.append
    )
    control = SimpleNamespace(should_save=False, should_training_stop=False)
    state = SimpleNamespace(global_step=0, log_history=[])
    guard.on_train_begin(None, state, control)
    for step in range(1, 2 * len(accuracies) - 1):
        state.global_step = step
        guard.on_step_end(None, state, control)
    return guard, said, logged, control


def test_a_fall_of_dense_accuracy_is_told() -> None:
    guard, said, logged, control = run_guard([0.9, 0.85, 0.7], stop=False)
    assert logged == [0.9, 0.85, 0.7]
    assert len(said) == 1 and "fell from 0.900 to 0.700 by step 4" in said[0]
    assert not guard.stopped and not control.should_training_stop


def test_a_fall_of_dense_accuracy_can_stop_the_run() -> None:
    guard, said, _, control = run_guard([0.9, 0.7, 0.9], stop=True)
    assert guard.stopped and control.should_training_stop and control.should_save and said
    assert not run_guard([0.9, 0.85, 0.95], stop=True)[0].stopped


def test_a_resumed_guard_remembers_the_start() -> None:
    guard = DenseGuard(lambda: 0.1, 1, 0.1, False, lambda *_: None, lambda _: None)
    guard.on_train_begin(None, SimpleNamespace(log_history=[{METRIC: 0.9}, {METRIC: 0.5}]), None)
    assert guard.start == 0.9


# -- gradient spread --------------------------------------------------------------------------------


def test_spread_by_hand() -> None:
    # two groups: estimates 2 G_g = (2, 0) and (0, 4), their sum (1, 2); distances^2 5 and 5
    found = spread_metrics(torch.tensor([[1.0, 0.0], [0.0, 2.0]]))
    assert found["gradient/group_variance"] == pytest.approx(10.0, abs=HAND_COMPUTED)
    assert found["gradient/group_noise"] == pytest.approx(2.0, abs=HAND_COMPUTED)
    assert spread_metrics(torch.ones(3, 2))["gradient/group_variance"] == EXACT
    assert "gradient/group_noise" not in spread_metrics(torch.zeros(2, 2))


def test_the_probe_is_the_gradient_of_a_gain_on_the_decoder_s_output(tmp_path: Path) -> None:
    """Against autograd: multiply the final norm's weight by a vector of ones that wants a gradient."""
    trainer = make_trainer(tmp_path, distill_coef=0.5)
    batch = batch_of(trainer)
    gradient_of(trainer, batch)
    groups = torch.stack(list(trainer.spread._groups.values()))
    assert len(groups) == 2
    norm = trainer.model.model.norm
    expected = norm.weight.grad * norm.weight.detach()
    assert relative_gap(groups.sum(0), expected) <= GRADIENT_FLOAT32
    assert relative_gap(groups[0], expected) > GRADIENT_DIFFERS, "one group alone is not the whole"
    assert trainer.spread.take()["gradient/group_variance"] > 0
    assert trainer.spread.take() == {}, "the next step starts from nothing"


def test_a_group_over_two_micro_batches_is_one_group() -> None:
    spread = GradientSpread()
    hidden, gradient = torch.ones(3, 2), torch.tensor([[1.0, 0.0], [0.0, 1.0], [2.0, 2.0]])
    spread.probe(["a", "b"], [1, 2])(hidden, gradient)
    spread.probe(["b"], [3])(hidden, gradient)
    assert spread._groups["a"].tolist() == [1.0, 0.0]
    assert spread._groups["b"].tolist() == [5.0, 6.0]
    assert math.isfinite(spread.take()["gradient/group_noise"])
