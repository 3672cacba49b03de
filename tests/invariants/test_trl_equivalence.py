"""With lambda = 0 and nothing evicted, SMDTrainer's loss and gradients are GRPOTrainer's own.

Both trainers hold the same weights and get the same batch, made by SMDTrainer's rollout. TRL computes
padded rows with its own attention; we compute packed ones.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from shadowmask.trl import SMDTrainer
from tiny_models import make_model
from tiny_trl import letters, make_config, make_dataset, make_tokenizer, make_trainer, saved_model
from tolerances import GRADIENT_DIFFERS, TRL_GRADIENT, TRL_LOSS, relative_gap
from trl import GRPOConfig, GRPOTrainer

LOSS_TYPES = ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"]


def make_pair(folder: Path, source: str | None = None, **settings: Any) -> tuple[SMDTrainer, GRPOTrainer]:
    """Ours and TRL's, from the same weights and settings."""
    ours_only = {"distill_coef": 0.0, "evictor": "dense"} | {
        key: settings.pop(key) for key in ("distill_coef", "evictor") if key in settings
    }
    mine = make_trainer(folder / "mine", source, **ours_only, **settings)
    config = make_config(folder / "theirs", **settings)
    names = {field.name for field in dataclasses.fields(GRPOConfig) if field.init}
    skipped = {"generation_batch_size"} if config.steps_per_generation else set()
    plain = GRPOConfig(**{n: getattr(config, n) for n in names - skipped if hasattr(config, n)})
    model = make_model(dtype=torch.float32) if source is None else source
    theirs = GRPOTrainer(
        model, letters, plain, train_dataset=make_dataset(), processing_class=make_tokenizer()
    )
    for a, b in zip(mine.model.parameters(), theirs.model.parameters(), strict=True):
        assert torch.equal(a, b)
    return mine, theirs


def make_batch(trainer: SMDTrainer) -> dict[str, Any]:
    trainer.model.train()
    return trainer._generate_and_score_completions([trainer.train_dataset[n // 4] for n in range(8)])


def loss_and_gradient(trainer: GRPOTrainer, batch: dict[str, Any]) -> tuple[float, torch.Tensor]:
    trainer.model.train()
    trainer.model.zero_grad()
    trainer.current_gradient_accumulation_steps = trainer.args.gradient_accumulation_steps
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    return float(loss.detach()), torch.cat([p.grad.flatten() for p in trainer.model.parameters()])


def assert_equal(mine: tuple[float, torch.Tensor], theirs: tuple[float, torch.Tensor]) -> None:
    assert mine[0] == pytest.approx(theirs[0], abs=TRL_LOSS, rel=TRL_LOSS)
    assert relative_gap(mine[1], theirs[1]) <= TRL_GRADIENT


@pytest.mark.parametrize("off_policy", [False, True])
@pytest.mark.parametrize("beta", [0.0, 0.05])
@pytest.mark.parametrize("loss_type", LOSS_TYPES)
def test_loss_and_gradients_are_those_of_trl(
    loss_type: str, beta: float, off_policy: bool, tmp_path: Path
) -> None:
    source = saved_model(tmp_path / "model") if beta else None
    level = "sequence" if loss_type == "luspo" else "token"
    mine, theirs = make_pair(
        tmp_path, source, loss_type=loss_type, beta=beta, importance_sampling_level=level
    )
    batch = make_batch(mine)
    if off_policy:  # ratios off 1, some of them beyond the clip
        noise = torch.randn(batch["completion_ids"].shape, generator=torch.Generator().manual_seed(1))
        with torch.no_grad():
            mine._records = batch["shadow"]
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], dim=1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], dim=1)
            width = batch["completion_ids"].shape[1]
            current = mine._get_per_token_logps_and_entropies(mine.model, ids, mask, width)[0]
        batch["old_per_token_logps"] = current + 0.2 * noise
        if beta:
            batch["ref_per_token_logps"] = current - 0.3 * noise
    assert float(batch["advantages"].abs().max()) > 0
    actual, expected = loss_and_gradient(mine, batch), loss_and_gradient(theirs, batch)
    assert_equal(actual, expected)

    # controls: lambda, or a cache that evicts, would be seen
    mine.args.distill_coef = 0.1
    assert actual[0] == pytest.approx(loss_and_gradient(mine, batch)[0], abs=TRL_LOSS)  # KL = 0 when dense


@pytest.mark.parametrize("scale_rewards", ["group", "batch", "none"])
def test_advantages_and_metrics_are_those_of_trl(scale_rewards: str, tmp_path: Path) -> None:
    mine, theirs = make_pair(tmp_path, scale_rewards=scale_rewards)
    batch = make_batch(mine)
    # TRL's own pipeline on the same completions
    completions = [
        row[: int(keep.sum())].tolist()
        for row, keep in zip(batch["completion_ids"], batch["completion_mask"], strict=True)
    ]
    theirs._generate_single_turn = lambda *_, **__: (completions, None)
    theirs.model.train()
    reference = theirs._generate_and_score_completions([theirs.train_dataset[n // 4] for n in range(8)])
    for key in ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch"):
        assert torch.equal(batch[key], reference[key]), key
    assert float((batch["advantages"] - reference["advantages"]).abs().max()) <= TRL_LOSS
    assert_equal(loss_and_gradient(mine, batch), loss_and_gradient(theirs, reference))
    assert mine._metrics["train"]["reward"] == theirs._metrics["train"]["reward"]


@pytest.mark.parametrize(
    "settings",
    [
        {"delta": 1.5},
        {"epsilon": 0.1, "epsilon_high": 0.3},
        {"top_entropy_quantile": 0.5},
        {"importance_sampling_level": "sequence"},
        {"temperature": 0.7},
        {"gradient_accumulation_steps": 2},
        {"entropy_coef": 0.01},
        {"mask_truncated_completions": True},
    ],
    ids=str,
)
def test_other_settings_keep_their_meaning(settings: dict[str, Any], tmp_path: Path) -> None:
    mine, theirs = make_pair(tmp_path, **settings)
    batch = make_batch(mine)
    assert_equal(loss_and_gradient(mine, batch), loss_and_gradient(theirs, batch))


def test_an_evicting_cache_is_not_trls_loss(tmp_path: Path) -> None:
    """The control: the same comparison fails as soon as something is evicted."""
    mine, theirs = make_pair(tmp_path, evictor="random")
    batch = make_batch(mine)
    assert min(entry.retained_fraction() for entry in batch["shadow"]) < 1
    actual, expected = loss_and_gradient(mine, batch), loss_and_gradient(theirs, batch)
    assert relative_gap(actual[1], expected[1]) > GRADIENT_DIFFERS
    mine.args.distill_coef = 0.1
    assert relative_gap(loss_and_gradient(mine, batch)[1], actual[1]) > GRADIENT_DIFFERS
