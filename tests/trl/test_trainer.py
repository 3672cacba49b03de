"""SMDTrainer trains as GRPOTrainer does: schedules, checkpoints, LoRA, callbacks, evaluation, logs."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig
from transformers import TrainerCallback

import shadowmask.trl.trainer as trainer_module
from shadowmask import NEVER, ParityError, RecordError, ShadowMask
from shadowmask.eviction import list_evictors
from shadowmask.trl import SMDTrainer
from tiny_models import make_model
from tiny_trl import MAX_COMPLETION, history, letters, make_config, make_dataset, make_trainer, saved_model
from tolerances import FLOAT32, RESUMED_LOSS, TRL_GRADIENT, relative_gap

LOGGED = [
    "sampling_gap/mean",
    "sampling_gap/p99",
    "sampling_gap/max",
    "information_gap/kl",
    "information_gap/agreement_p5",
    "staleness/kl",
    "smd/distill_kl",
    "kv/bytes_peak",
    "kv/bytes_dense",
    "kv/retained_fraction",
    "reward",
    "loss",
    "entropy",
]

SCHEDULES: dict[str, dict[str, Any]] = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2},
    "two iterations": {"num_iterations": 2},
    "accumulation and iterations": {"gradient_accumulation_steps": 2, "num_iterations": 2},
    "generation ahead": {"steps_per_generation": 4},
    "small micro-batches": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 4},
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_records_travel_with_their_rows(schedule: str, tmp_path: Path) -> None:
    """Through TRL's shuffle, splits and reuse: a token hash is checked for every row that is scored."""
    trainer = make_trainer(tmp_path, **SCHEDULES[schedule])
    trainer.train()
    gaps = history(trainer, "sampling_gap/max")
    assert gaps and max(gaps) <= FLOAT32
    assert min(history(trainer, "kv/retained_fraction")) < 1
    assert all(key in trainer.state.log_history[0] for key in LOGGED)
    staleness = history(trainer, "staleness/kl")
    assert staleness[0] <= FLOAT32 and all(value >= -FLOAT32 for value in staleness)
    if schedule == "two iterations":
        assert max(staleness) > FLOAT32, "the second pass over a rollout must be off-policy"


@pytest.mark.parametrize("schedule", ["plain", "accumulation and iterations"])
def test_a_record_on_the_wrong_row_is_an_error(
    schedule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = SMDTrainer._generate_and_score_completions

    def exchanged(self: SMDTrainer, inputs: Any) -> dict[str, Any]:
        output = original(self, inputs)
        output["shadow"] = output["shadow"][1:] + output["shadow"][:1]
        return output

    monkeypatch.setattr(SMDTrainer, "_generate_and_score_completions", exchanged)
    with pytest.raises(RecordError, match="made for other tokens"):
        make_trainer(tmp_path, **SCHEDULES[schedule]).train()


def test_a_missing_record_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    original = SMDTrainer._generate_and_score_completions

    def forgetful(self: SMDTrainer, inputs: Any) -> dict[str, Any]:
        output = original(self, inputs)
        del output["shadow"]
        return output

    monkeypatch.setattr(SMDTrainer, "_generate_and_score_completions", forgetful)
    with pytest.raises(RecordError, match="no shadow masks"):
        make_trainer(tmp_path).train()


def _blind(self: SMDTrainer, inputs: Any) -> dict[str, Any]:
    """Records that claim that nothing was evicted, under the right token hashes: a naive learner."""
    output = _ORIGINAL(self, inputs)
    output["shadow"] = [
        dataclasses.replace(entry, evicted_at=torch.full_like(entry.evicted_at, NEVER))
        for entry in output["shadow"]
    ]
    return output


_ORIGINAL = SMDTrainer._generate_and_score_completions


def test_parity_action_raise_stops_a_learner_that_does_not_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SMDTrainer, "_generate_and_score_completions", _blind)
    with pytest.raises(ParityError, match=r"sampling_gap/max .* exceeds the tolerance"):
        make_trainer(tmp_path).train()


def test_parity_action_log_goes_on_and_shows_the_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SMDTrainer, "_generate_and_score_completions", _blind)
    trainer = make_trainer(tmp_path, parity_action="log")
    trainer.train()
    assert trainer.state.global_step == 3
    assert min(history(trainer, "sampling_gap/max")) > 100 * FLOAT32


def test_parity_is_checked_when_old_log_probabilities_are_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With several iterations the comparison happens right after the rollout; a broken sampler shows."""
    original = trainer_module.RolloutEngine.generate

    def broken(self: Any, *args: Any, **kwargs: Any) -> Any:
        batch = original(self, *args, **kwargs)
        return dataclasses.replace(batch, sparse_logprobs=[x + 0.01 for x in batch.sparse_logprobs])

    monkeypatch.setattr(trainer_module.RolloutEngine, "generate", broken)
    with pytest.raises(ParityError):
        make_trainer(tmp_path, num_iterations=2).train()
    make_trainer(tmp_path, num_iterations=2, parity_tolerance=0.1).train()
    with pytest.raises(ParityError):
        make_trainer(tmp_path, num_iterations=2, parity_tolerance=0.001).train()


def test_bfloat16_autocast_trains(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, bf16=True)
    trainer.train()
    assert trainer.state.global_step == 3 and max(history(trainer, "sampling_gap/mean")) > FLOAT32


@pytest.mark.parametrize("evictor", list_evictors())
def test_every_evictor_trains(evictor: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, evictor=evictor, max_steps=2)
    trainer.train()
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32
    assert (max(history(trainer, "kv/retained_fraction")) < 1) == (evictor != "dense")


@pytest.mark.parametrize("family", ["gemma2", "qwen3"])
def test_other_families_train(family: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, make_model(family, torch.float32), max_steps=2)
    trainer.train()
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32


def test_training_repeats_under_its_seed(tmp_path: Path) -> None:
    runs = []
    for _ in range(2):
        trainer = make_trainer(tmp_path)
        trainer.train()
        runs.append([history(trainer, key) for key in ("loss", "reward", "smd/distill_kl")])
    assert runs[0] == runs[1]
    other = make_trainer(tmp_path, seed=7)
    other.train()
    assert history(other, "reward") != runs[0][1]


def test_lora_trains_adapters_only_and_its_dense_teacher_uses_them(tmp_path: Path) -> None:
    lora = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    trainer = make_trainer(tmp_path, options={"peft_config": lora}, beta=0.04)
    before = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    trainer.train()
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32
    assert "kl" in trainer.state.log_history[0]
    changed = {n for n, p in trainer.model.named_parameters() if not torch.equal(p.detach(), before[n])}
    assert changed and all("lora_" in name for name in changed)
    trainer.save_model(str(tmp_path / "adapter"))
    assert (tmp_path / "adapter" / "adapter_model.safetensors").exists()


def test_gradient_checkpointing_gives_the_same_losses(tmp_path: Path) -> None:
    losses = []
    for on in (False, True):
        trainer = make_trainer(
            tmp_path, gradient_checkpointing=on, gradient_checkpointing_kwargs={"use_reentrant": False}
        )
        trainer.train()
        losses.append(history(trainer, "loss"))
    assert losses[0] == pytest.approx(losses[1], abs=RESUMED_LOSS)


def test_resuming_repeats_the_run(tmp_path: Path) -> None:
    """Four steps at once equal two steps, a checkpoint, and two more in a new process's trainer."""
    settings: dict[str, Any] = {"save_strategy": "steps", "save_steps": 2, "save_only_model": False}
    whole = make_trainer(tmp_path / "whole", max_steps=4, **settings)
    whole.train()
    first = make_trainer(tmp_path / "parts", max_steps=4, options={"callbacks": [_StopAt(2)]}, **settings)
    first.train()
    assert first.state.global_step == 2
    second = make_trainer(tmp_path / "parts", max_steps=4, **settings)
    second.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))
    assert second.state.global_step == 4
    for key in ("loss", "reward", "smd/distill_kl", "completions/mean_length"):
        assert history(second, key) == pytest.approx(history(whole, key), abs=RESUMED_LOSS), key
    assert history(whole, "reward")[2:] != history(whole, "reward")[:2]
    for a, b in zip(whole.model.parameters(), second.model.parameters(), strict=True):
        assert relative_gap(b.detach(), a.detach()) <= RESUMED_LOSS


class _StopAt(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step
        self.seen: list[str] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.seen.append("step")
        control.should_training_stop = state.global_step >= self.step
        return control

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "sampling_gap/max" in logs:
            self.seen.append("gap")


def test_callbacks_see_steps_and_our_metrics(tmp_path: Path) -> None:
    callback = _StopAt(2)
    trainer = make_trainer(tmp_path, options={"callbacks": [callback]})
    trainer.train()
    assert trainer.state.global_step == 2
    assert callback.seen.count("step") == 2 and callback.seen.count("gap") == 2


def test_evaluation_runs_under_the_training_cache(tmp_path: Path) -> None:
    trainer = make_trainer(
        tmp_path,
        options={"eval_dataset": make_dataset(4)},
        eval_strategy="steps",
        eval_steps=2,
        per_device_eval_batch_size=8,
        max_steps=2,
    )
    trainer.train()
    rewards = history(trainer, "eval_reward")
    assert len(rewards) == 1
    assert history(trainer, "eval_sampling_gap/max")[0] <= FLOAT32
    assert history(trainer, "eval_kv/retained_fraction")[0] < 1
    first = trainer.evaluate()
    assert "eval_reward" in first


def test_mask_truncated_completions(tmp_path: Path) -> None:
    """TRL clears the mask of rows that did not stop; they were sampled all the same and must replay."""
    trainer = make_trainer(tmp_path, mask_truncated_completions=True)
    trainer.train()
    assert max(history(trainer, "completions/clipped_ratio")) > 0
    assert max(history(trainer, "sampling_gap/max")) <= FLOAT32


def test_several_reward_functions_and_dataset_columns(tmp_path: Path) -> None:
    seen: list[list[str]] = []

    def with_column(completions: list[str], tag: list[str], **_: Any) -> list[float]:
        seen.append(tag)
        return [float(len(c)) for c in completions]

    async def asynchronous(completions: list[str], **_: Any) -> list[float]:
        return [0.5] * len(completions)

    dataset = make_dataset().add_column("tag", [f"t{n}" for n in range(12)])
    trainer = make_trainer(
        tmp_path,
        reward=[letters, with_column, asynchronous],
        options={"train_dataset": dataset},
        max_steps=1,
        reward_weights=[1.0, 0.5, 1.0],
    )
    trainer.train()
    assert len(seen[0]) == 8 and seen[0][0].startswith("t")
    assert "rewards/with_column/mean" in trainer.state.log_history[0]


def test_reference_model_is_conditioned_on_the_mask(tmp_path: Path) -> None:
    """With equal weights the KL to the reference is zero, which holds only if both replay the record."""
    trainer = make_trainer(tmp_path / "out", saved_model(tmp_path / "model"), beta=0.1, max_steps=1)
    trainer.train()
    assert trainer.ref_model is not None
    assert abs(history(trainer, "kl")[0]) <= FLOAT32


def test_tensorboard_gets_the_metrics(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    trainer = make_trainer(tmp_path, report_to="tensorboard", max_steps=1)
    trainer.train()
    assert list(tmp_path.rglob("events.out.tfevents.*"))


def batch_of(trainer: SMDTrainer) -> dict[str, Any]:
    """One generation batch, made by the trainer itself."""
    trainer.model.train()
    rows = [trainer.train_dataset[n // 4] for n in range(8)]
    return trainer._generate_and_score_completions(rows)


@pytest.mark.parametrize("loss_type", ["grpo", "bnpo", "dr_grpo", "dapo", "cispo", "sapo", "luspo", "vespo"])
def test_lambda_does_not_depend_on_accumulation(loss_type: str, tmp_path: Path) -> None:
    """1 x 8 rows and 2 x 4 rows give the same distillation gradient.

    ``bnpo`` divides by the tokens of the micro-batch (TRL's definition), so it is compared on rows of
    equal length only.
    """
    equal = {"stop": False} if loss_type == "bnpo" else {}
    gradients = []
    for size, steps in ((8, 1), (4, 2)):
        trainer = make_trainer(
            tmp_path,
            loss_type=loss_type,
            per_device_train_batch_size=size,
            gradient_accumulation_steps=steps,
            distill_coef=1.0,
            importance_sampling_level="sequence" if loss_type == "luspo" else "token",
        )
        if equal:
            trainer.eos_token_ids = [63]
            trainer.engine.generate = _never_stopping(trainer.engine.generate)
        batch = batch_of(trainer)
        batch["advantages"] = torch.zeros_like(batch["advantages"])
        trainer.current_gradient_accumulation_steps = steps
        trainer.model.zero_grad()
        for start in range(0, 8, size):
            part = {
                k: v[start : start + size] if isinstance(v, list) or getattr(v, "ndim", 0) else v
                for k, v in batch.items()
            }
            trainer._compute_loss(trainer.model, part).backward()
        gradients.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters()]))
    assert relative_gap(gradients[1], gradients[0]) <= TRL_GRADIENT


def _never_stopping(generate: Any) -> Any:
    return lambda *args, **kwargs: generate(*args, **kwargs | {"stop_token_ids": []})


def test_completions_are_cut_to_max_completion_length(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    batch = batch_of(trainer)
    lengths = [entry.lengths[0] - entry.prompt_lengths[0] for entry in batch["shadow"]]
    assert max(lengths) == MAX_COMPLETION == batch["completion_ids"].shape[1]
    assert isinstance(batch["shadow"][0], ShadowMask)
    assert make_config(tmp_path).make_evictor().budget == 10
