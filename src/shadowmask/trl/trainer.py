"""SMDTrainer: TRL's GRPOTrainer whose rollouts evict and whose learner replays.

Few methods are overridden; rewards, groups, advantages, loss types, logging, checkpoints, PEFT and
distribution are TRL's. The record of each completion travels in the batch dict, so TRL's shuffling,
splitting and reuse over iterations keep it with its row, and a token hash proves that they did.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from jaxtyping import Float
from torch import Tensor, nn
from trl.models import unwrap_model_for_generation

from shadowmask.corrections import Correction, get_method, naive
from shadowmask.head import TokenStats
from shadowmask.losses import aggregate
from shadowmask.metrics import check_parity, off_policyness, sampling_gap, weight_statistics
from shadowmask.models import base_model, prepare_model
from shadowmask.packing import pack
from shadowmask.record import RecordError, ShadowMask
from shadowmask.rollout import RolloutBatch, RolloutEngine
from shadowmask.trl.checks import checked_rewards, refuse_unsupported
from shadowmask.trl.config import COMPILE_CHOICES, SMDConfig
from shadowmask.trl.forward import ScoringRequest, add_scoring_forward
from shadowmask.trl.guarded import GuardedTrainer
from shadowmask.trl.learner_log import learner_metrics, worst_side
from shadowmask.trl.rows import cat_rows, group_rows, pad_rows, unpad_rows


class SMDTrainer(GuardedTrainer):
    """GRPO with evicted rollouts, shadow-mask replay and dense-to-sparse distillation.

    Takes what ``GRPOTrainer`` takes, with an ``SMDConfig``. See that class for the settings.

    Raises:
        UnsupportedModelError: eviction cannot be replayed exactly in this model.
        ValueError: a setting whose effect on sampling could not be replayed.
    """

    _tag_names = ["trl", "grpo", "smd", "shadowmask"]  # noqa: RUF012 - TRL's model card reads these
    _name = "SMD"

    def __init__(
        self,
        model: Any,
        reward_funcs: Any,
        args: SMDConfig | None = None,
        train_dataset: Any = None,
        **options: Any,
    ) -> None:
        args = args if args is not None else SMDConfig()
        refuse_unsupported(args, options)
        if isinstance(train_dataset, Dataset) and len(train_dataset) == 0:
            raise ValueError("train_dataset is empty: it needs at least one prompt")
        super().__init__(model, checked_rewards(reward_funcs), args, train_dataset, **options)
        if self._is_vlm:
            raise ValueError("multimodal models are not supported: load the text model and its tokenizer")
        if self.aux_loss_enabled:
            raise ValueError(
                "the router load-balancing loss is not supported: set output_router_logits=False"
            )
        self.method = get_method(args.method)
        self._set_guards()
        for each in filter(None, (self.model, self.ref_model)):
            prepare_model(each)
            add_scoring_forward(base_model(each))
        self.engine = RolloutEngine(
            base_model(self.model),
            self._tokenizer,
            args.rollout_evictor(),
            args.evict_every if self.method.evicts else None,
            kv_memory_limit=args.kv_bytes_limit(),
            compile=COMPILE_CHOICES[args.compile_rollout],
        )
        self._rollout: RolloutBatch | None = None  # what _generate_single_turn has just made
        self._rollout_seconds = 0.0
        self._rollout_moments: dict[str, tuple[int, int]] = {}  # mode -> (global step, rollouts in it)
        self._records: list[ShadowMask] | None = None  # of the rows that are being scored
        self._loss_inputs: dict[str, Any] | None = None  # the batch whose loss is being computed
        self._last_stats: TokenStats | None = None
        # called with every training rollout and the rows' places in it, while the weights are the sampler's
        self.on_rollout: Callable[[RolloutBatch, list[int]], None] | None = None

    # -- rollout --------------------------------------------------------------------------------

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        """Sample one completion per given prompt (they come repeated) with the evicting cache."""
        if images is not None or multimodal_fields:
            raise ValueError("images are not supported")
        prompts, sizes, order = group_rows(prompt_ids)
        started = time.perf_counter()
        with (
            unwrap_model_for_generation(
                self.model_wrapped,
                self.accelerator,
                gather_deepspeed3_params=self.args.ds3_gather_for_generation,
                gradient_checkpointing_kwargs=self.args.gradient_checkpointing_kwargs,
            ),
            self.accelerator.autocast(),
        ):
            batch = self.engine.generate(
                prompts,
                group_size=sizes,
                max_new_tokens=self.max_completion_length,
                temperature=self.temperature,
                seed=self._rollout_seed(),
                stop_token_ids=self.eos_token_ids,
            )
        self._rollout = batch
        self._rollout_order = order
        self._rollout_seconds = time.perf_counter() - started
        self._log("time/rollout", self._rollout_seconds)
        self._log_rollout(batch)
        return (
            [batch.completion_ids[n] for n in order],
            [batch.sparse_logprobs[n].tolist() for n in order],
        )

    def _rollout_seed(self) -> int:
        """A new seed per rollout that depends only on the run's seed and progress, so runs repeat."""
        mode = "train" if self.model.training else "eval"
        step, count = self._rollout_moments.get(mode, (-1, 0))
        count = count + 1 if step == self.state.global_step else 0
        self._rollout_moments[mode] = (self.state.global_step, count)
        key = (self.args.seed, mode, self.state.global_step, count, self.accelerator.process_index)
        return int.from_bytes(hashlib.sha256(repr(key).encode()).digest()[:7], "big")

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        """TRL's, with the records and sampler log-probabilities added to the batch."""
        self._records = None
        started = time.perf_counter()
        output = super()._generate_and_score_completions(inputs)
        self._log("time/rewards", time.perf_counter() - started - self._rollout_seconds)
        assert self._rollout is not None
        order = self._rollout_order
        output["shadow"] = [self._rollout.shadow[n] for n in order]
        output["sparse_logprobs"] = [self._rollout.sparse_logprobs[n] for n in order]
        if "old_per_token_logps" in output:
            # same weights as the sampler's: this is the place to compare
            self._check_sampling_gap(output, output["old_per_token_logps"])
        if self.on_rollout is not None and self.model.training:
            with self.accelerator.autocast():
                self.on_rollout(self._rollout, order)
        self._rollout = None
        self._records = None
        return output

    # -- learner --------------------------------------------------------------------------------

    def _get_per_token_logps_and_entropies(
        self,
        model: nn.Module,
        input_ids: Tensor,
        attention_mask: Tensor,
        logits_to_keep: int,
        batch_size: int | None = None,
        compute_entropy: bool = False,
        compute_aux_loss: bool = False,
        **_multimodal: Any,
    ) -> tuple[Tensor, Tensor | None, None]:
        """Log-probabilities and entropies with each row's shadow mask replayed.

        Serves the policy, the old policy and the reference alike: all are conditioned on the mask, or,
        under a method with a dense learner, none is.
        """
        records = self._records_of_rows(len(input_ids))
        prompts, completions = unpad_rows(input_ids, logits_to_keep, records)
        lengths = [len(completion) for completion in completions]
        in_loss = self._loss_inputs is not None
        teacher = self._dense_track() if in_loss else False
        probe = self.spread.probe([tuple(p) for p in prompts], lengths) if in_loss else None
        batch_size = batch_size or len(input_ids)
        parts = []
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            shadow = ShadowMask.cat(records[rows])
            shadow.check_tokens(prompts[rows], completions[rows])
            packed = pack(prompts[rows], completions[rows], input_ids.device)
            if not self.method.replays:  # the record is of these tokens, and this learner ignores it
                shadow = ShadowMask.dense(prompts[rows], completions[rows])
            request = ScoringRequest(packed, shadow, self.temperature, teacher, probe)
            with self.accelerator.autocast():
                parts.append(model(input_ids=packed.input_ids, scoring_request=request))
        stats = cat_rows(parts)
        self._last_stats = stats
        logprobs = pad_rows(stats.logprobs, lengths, logits_to_keep)
        entropy = pad_rows(stats.entropy, lengths, logits_to_keep) if compute_entropy else None
        if self._loss_inputs is not None:
            self._correct(self._loss_inputs, logprobs.detach())
        return logprobs, entropy, None

    def _dense_track(self) -> bool | nn.Module:
        """Whose dense view is the teacher: nobody's where the learner is dense itself."""
        if not (self.method.replays and self.method.evicts):
            return False
        return True if self.teacher is None else self.teacher.model

    def _correct(self, inputs: dict[str, Any], logprobs: Float[Tensor, "completions tokens"]) -> None:
        """Weigh the policy term of every token as the method says, and log how far off-policy it is.

        TRL takes one advantage per token too, and every loss type is linear in it for weights >= 0; it
        reads them after it has asked for the log-probabilities, which is where this is called.
        """
        old = inputs.get("old_per_token_logps")
        old = logprobs if old is None else old
        mask = inputs["completion_mask"].bool()
        lengths = [len(row) for row in inputs["sparse_logprobs"]]
        sparse = pad_rows(torch.cat(inputs["sparse_logprobs"]).to(old), lengths, old.shape[1])
        rule = self.method.rule
        correction: Correction = (rule or naive)(sparse, old, mask, **self.args.correction_settings())
        if rule is not None:
            inputs["advantages"] = inputs["advantages"][:, None] * correction.weights
        metrics = off_policyness(sparse, old, mask)
        metrics |= weight_statistics(correction.weights, correction.rejected, mask)
        for name, value in metrics.items():
            self._log(name, value, worst_side(name))

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's policy loss on the learner's track, plus lambda KL(dense || shadow), averaged alike."""
        if inputs.get("shadow") is None:
            raise RecordError("the batch has no shadow masks: it cannot be replayed")
        inputs = dict(inputs)  # TRL reuses a batch over iterations; what _correct changes is of this one
        self._records, self._loss_inputs = inputs["shadow"], inputs
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._records = self._loss_inputs = None
        stats = self._last_stats
        self._last_stats = None
        assert stats is not None
        lengths = [entry.lengths[0] - entry.prompt_lengths[0] for entry in inputs["shadow"]]
        self._log_learner(stats, inputs, lengths)
        if stats.kl is None:
            return loss
        kl = pad_rows(stats.kl, lengths, inputs["completion_ids"].shape[1])
        if self.args.kl_cap is not None:
            kl = kl.clamp(max=self.args.kl_cap)  # beyond the cap a token gives no gradient
        distill, scale = self._distill_term(kl, inputs)
        self._log("smd/distill_kl", float(distill.detach()))
        coef = self.args.distill_weight(float(stats.kl.detach().mean()) if len(stats.kl) else 0.0)
        self._log("smd/lambda", coef)
        return loss + coef * distill * scale if coef else loss

    def _distill_term(
        self, kl: Float[Tensor, "completions tokens"], inputs: dict[str, Any]
    ) -> tuple[Tensor, float]:
        """The KL averaged as ``loss_type`` averages the policy term, and the share of this micro-batch."""
        mask = inputs["completion_mask"]
        training = self.model.training
        steps = self.current_gradient_accumulation_steps if training else 1
        if self.loss_type in ("cispo", "dapo", "vespo"):
            # num_items_in_batch counts the whole generation batch; bring it to one optimizer step
            items = inputs["num_items_in_batch"].clamp(min=1.0) / self.accelerator.num_processes
            if training:
                items = items * steps / self.args.steps_per_generation
            return aggregate(kl, mask, self.loss_type, num_items=items / steps), 1.0 / steps
        term = aggregate(kl, mask, self.loss_type, max_completion_length=self.max_completion_length)
        return term, 1.0 / steps

    def _records_of_rows(self, rows: int) -> list[ShadowMask]:
        """The records of the rows that TRL wants scored: the batch's own, or the fresh rollout's."""
        records = self._records
        if records is None and self._rollout is not None:
            records = [self._rollout.shadow[n] for n in self._rollout_order]
        if records is None or len(records) != rows:
            have = "none" if records is None else str(len(records))
            raise RecordError(f"{rows} rows are to be scored, but there are {have} shadow masks for them")
        return records

    # -- metrics --------------------------------------------------------------------------------

    def _log_rollout(self, batch: RolloutBatch) -> None:
        self._log("kv/bytes_peak", batch.kv_bytes_peak)
        self._log("kv/bytes_dense", batch.kv_bytes_dense)
        self._log("kv/bytes_unshared", batch.kv_bytes_unshared)
        self._log("kv/rows", batch.rows)
        self._log("kv/retained_fraction", batch.shadow.retained_fraction())

    def _log_learner(self, stats: TokenStats, inputs: dict[str, Any], lengths: list[int]) -> None:
        learner = stats.logprobs.detach()
        old = inputs.get("old_per_token_logps")
        width = inputs["completion_ids"].shape[1]
        if old is not None:
            old = torch.cat([row[:n] for row, n in zip(old, lengths, strict=True)])
        sparse = torch.cat(inputs["sparse_logprobs"]).to(learner)
        for name, value in learner_metrics(stats, sparse, old, self.method.replays).items():
            logged = self._log(name, value, worst_side(name))
            if name == "information_gap/agreement_p5" and self.model.training:
                self._agreements.append(logged)
        mode = "train" if self.model.training else "eval"
        fresh = self._rollout_moments[mode][0] == self.state.global_step  # same weights as the sampler's
        if "old_per_token_logps" not in inputs and fresh:
            self._check_sampling_gap(inputs, pad_rows(learner, lengths, width))

    def _check_sampling_gap(self, inputs: dict[str, Any], logprobs: Tensor) -> None:
        """Log the gap. It must be noise if the learner replays; else it is the method's off-policyness."""
        sparse = inputs["sparse_logprobs"]
        shadow = torch.cat([row[: len(s)] for row, s in zip(logprobs, sparse, strict=True)])
        gap = sampling_gap(torch.cat(sparse).to(shadow), shadow)
        for name, value in gap.items():
            self._log(name, value, worst_side(name))
        if self.method.replays and self.args.parity_action == "raise":
            check_parity(gap, self._compute_dtype(), self.args.parity_tolerance)

    def _compute_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else base_model(self.model).dtype
