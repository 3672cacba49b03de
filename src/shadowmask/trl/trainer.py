"""SMDTrainer: TRL's GRPOTrainer whose rollouts evict and whose learner replays.

Four methods are overridden; rewards, groups, advantages, loss types, logging, checkpoints, PEFT and
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
from torch.nn.utils.rnn import pad_sequence
from trl.models import unwrap_model_for_generation

from shadowmask.head import TokenStats
from shadowmask.losses import aggregate
from shadowmask.metrics import check_parity, information_gap, sampling_gap, staleness_kl
from shadowmask.models import base_model, prepare_model
from shadowmask.packing import pack
from shadowmask.record import RecordError, ShadowMask
from shadowmask.rollout import RolloutBatch, RolloutEngine
from shadowmask.trl.checks import checked_rewards, refuse_unsupported
from shadowmask.trl.config import COMPILE_CHOICES, SMDConfig
from shadowmask.trl.forward import ScoringRequest, add_scoring_forward
from trl import GRPOTrainer


class SMDTrainer(GRPOTrainer):
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
        for each in filter(None, (self.model, self.ref_model)):
            prepare_model(each)
            add_scoring_forward(base_model(each))
        self.engine = RolloutEngine(
            base_model(self.model),
            self._tokenizer,
            args.make_evictor(),
            args.evict_every,
            kv_memory_limit=args.kv_bytes_limit(),
            compile=COMPILE_CHOICES[args.compile_rollout],
        )
        self._rollout: RolloutBatch | None = None  # what _generate_single_turn has just made
        self._rollout_seconds = 0.0
        self._rollout_moments: dict[str, tuple[int, int]] = {}  # mode -> (global step, rollouts in it)
        self._records: list[ShadowMask] | None = None  # of the rows that are being scored
        self._with_teacher = False
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
        prompts, sizes, order = _group(prompt_ids)
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

        Serves the policy, the old policy and the reference alike: all are conditioned on the mask.
        """
        records = self._records_of_rows(len(input_ids))
        prompts, completions = _unpad(input_ids, logits_to_keep, records)
        batch_size = batch_size or len(input_ids)
        parts = []
        for start in range(0, len(input_ids), batch_size):
            rows = slice(start, start + batch_size)
            shadow = ShadowMask.cat(records[rows])
            shadow.check_tokens(prompts[rows], completions[rows])
            packed = pack(prompts[rows], completions[rows], input_ids.device)
            request = ScoringRequest(packed, shadow, self.temperature, self._with_teacher)
            with self.accelerator.autocast():
                parts.append(model(input_ids=packed.input_ids, scoring_request=request))
        lengths = [len(completion) for completion in completions]
        stats = _cat(parts)
        self._last_stats = stats
        logprobs = _pad(stats.logprobs, lengths, logits_to_keep)
        entropy = _pad(stats.entropy, lengths, logits_to_keep) if compute_entropy else None
        return logprobs, entropy, None

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """TRL's policy loss on the shadow track, plus lambda KL(dense || shadow), averaged alike."""
        if inputs.get("shadow") is None:
            raise RecordError("the batch has no shadow masks: it cannot be replayed")
        self._records = inputs["shadow"]
        self._with_teacher = True
        try:
            loss = super()._compute_loss(model, inputs)
        finally:
            self._with_teacher = False
            self._records = None
        stats = self._last_stats
        self._last_stats = None
        assert stats is not None and stats.kl is not None
        lengths = [entry.lengths[0] - entry.prompt_lengths[0] for entry in inputs["shadow"]]
        width = inputs["completion_ids"].shape[1]
        kl = _pad(stats.kl, lengths, width)
        distill, scale = self._distill_term(kl, inputs)
        self._log_learner(stats, inputs, lengths, width)
        self._log("smd/distill_kl", float(distill.detach()))
        return loss + self.args.distill_coef * distill * scale if self.args.distill_coef else loss

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

    def _log_learner(self, stats: TokenStats, inputs: dict[str, Any], lengths: list[int], width: int) -> None:
        assert stats.kl is not None and stats.teacher_logprobs is not None
        shadow = stats.logprobs.detach()
        sparse = torch.cat(inputs["sparse_logprobs"]).to(shadow)
        self._log("staleness/kl", staleness_kl(shadow, sparse))
        for name, value in information_gap(shadow, stats.teacher_logprobs, stats.kl.detach()).items():
            self._log(name, value, worst="min" if name.endswith("p5") else None)
        mode = "train" if self.model.training else "eval"
        fresh = self._rollout_moments[mode][0] == self.state.global_step  # same weights as the sampler's
        if "old_per_token_logps" not in inputs and fresh:
            self._check_sampling_gap(inputs, _pad(shadow, lengths, width))

    def _check_sampling_gap(self, inputs: dict[str, Any], logprobs: Tensor) -> None:
        sparse = inputs["sparse_logprobs"]
        shadow = torch.cat([row[: len(s)] for row, s in zip(logprobs, sparse, strict=True)])
        gap = sampling_gap(torch.cat(sparse).to(shadow), shadow)
        for name, value in gap.items():
            self._log(name, value, worst="max" if name.endswith(("max", "p99")) else None)
        if self.args.parity_action == "raise":
            check_parity(gap, self._compute_dtype(), self.args.parity_tolerance)

    def _compute_dtype(self) -> torch.dtype:
        if self.args.bf16:
            return torch.bfloat16
        return torch.float16 if self.args.fp16 else base_model(self.model).dtype

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """TRL's, but a worst case over micro-batches stays one: TRL would average it."""
        metrics = self._metrics["train" if self.model.training else "eval"]
        for name, values in metrics.items():
            if values and name.startswith(("sampling_gap/", "information_gap/")):
                if name.endswith(("/max", "/p99")):
                    metrics[name] = [max(values)]
                elif name.endswith("/agreement_p5"):
                    metrics[name] = [min(values)]
        super().log(logs, start_time)

    def _log(self, name: str, value: float, worst: str | None = None) -> None:
        """Append a metric; over processes its mean, or its worst side (``"max"``, ``"min"``)."""
        values = self.accelerator.gather(torch.tensor(float(value), device=self.accelerator.device))
        reduced = {"max": values.max, "min": values.min, None: values.mean}[worst]()
        mode = "train" if self.model.training else "eval"
        self._metrics[mode][name].append(float(reduced))


def _group(prompt_ids: list[list[int]]) -> tuple[list[list[int]], list[int], list[int]]:
    """Find repeated prompts. Returns distinct prompts, their counts, and for each input row the
    index of its completion in prompt-major order."""
    rows: dict[tuple[int, ...], list[int]] = {}
    for n, prompt in enumerate(prompt_ids):
        rows.setdefault(tuple(prompt), []).append(n)
    order = [0] * len(prompt_ids)
    for position, row in enumerate(n for members in rows.values() for n in members):
        order[row] = position
    return [list(p) for p in rows], [len(members) for members in rows.values()], order


def _unpad(
    input_ids: Tensor, completion_width: int, records: list[ShadowMask]
) -> tuple[list[list[int]], list[list[int]]]:
    """Cut left-padded prompts and right-padded completions down to the recorded lengths.

    The lengths come from the record, never from TRL's masks: ``mask_truncated_completions`` clears
    those for rows that were sampled all the same.
    """
    boundary = input_ids.shape[1] - completion_width
    prompts, completions = [], []
    for row, record in zip(input_ids.tolist(), records, strict=True):
        prompt, total = record.prompt_lengths[0], record.lengths[0]
        prompts.append(row[boundary - prompt : boundary])
        completions.append(row[boundary : boundary + total - prompt])
    return prompts, completions


def _pad(values: Float[Tensor, " targets"], lengths: list[int], width: int) -> Tensor:
    """Lay ragged per-token values out as TRL does: one row per completion, zeros behind."""
    rows = pad_sequence(list(values.split(lengths)), batch_first=True)
    return nn.functional.pad(rows, (0, width - rows.shape[1]))


def _cat(parts: list[TokenStats]) -> TokenStats:
    if len(parts) == 1:
        return parts[0]
    columns: list[Any] = [
        None if column[0] is None else torch.cat(list(column)) for column in zip(*parts, strict=True)
    ]
    return TokenStats(*columns)
