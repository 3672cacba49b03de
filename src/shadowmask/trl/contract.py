"""What ``SMDTrainer`` relies on inside TRL, and how it notices when that has changed.

TRL's private methods change from minor to minor; their names and roles hardly do. We override few of
them, call ``super()`` where a body is wanted, and copy none. Everything relied upon is listed here and
checked by ``contract_violations``, which the tests run and which can be run against a new TRL version.
"""

from __future__ import annotations

import importlib.metadata
import inspect

SUPPORTED = ((1, 16), (1, 17))  # first supported, first unsupported

# method -> leading parameters that we pass on or receive by position
METHODS = {
    "_generate_single_turn": ("self", "prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_generate_and_score_completions": ("self", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "self",
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "batch_size",
        "compute_entropy",
        "compute_aux_loss",
    ),
    "_compute_loss": ("self", "model", "inputs"),
}
# names that the bodies we call by super() must still use
BATCH_KEYS = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "num_items_in_batch")
ATTRIBUTES = (
    "aux_loss_enabled",
    "eos_token_ids",
    "current_gradient_accumulation_steps",
    "loss_type",
    "_metrics",
    "max_completion_length",
    "temperature",
    "ref_model",
    "_dist",
)


def check_trl_version() -> None:
    """Raise ImportError with the remedy unless a supported TRL is installed."""
    try:
        version = importlib.metadata.version("trl")
    except importlib.metadata.PackageNotFoundError as error:
        raise ImportError("shadowmask.trl needs TRL: pip install 'shadowmask[trl]'") from error
    major_minor = tuple(int(part) for part in version.split(".")[:2])
    if not SUPPORTED[0] <= major_minor < SUPPORTED[1]:
        low, high = (".".join(map(str, bound)) for bound in SUPPORTED)
        raise ImportError(
            f"shadowmask.trl overrides methods that TRL {version} may have changed; "
            f"install a supported version: pip install 'trl>={low},<{high}'"
        )


def contract_violations() -> list[str]:
    """Everything that the installed TRL no longer provides as we need it; empty if all is well."""
    from trl.trainer import grpo_trainer

    from trl import GRPOTrainer

    found = []
    for name, expected in METHODS.items():
        method = getattr(GRPOTrainer, name, None)
        if method is None:
            found.append(f"GRPOTrainer.{name} is gone")
            continue
        actual = tuple(inspect.signature(method).parameters)[: len(expected)]
        if actual != expected:
            found.append(f"GRPOTrainer.{name} takes {actual}, expected {expected}")
    source = inspect.getsource(grpo_trainer)
    found += [f"batch key {key!r} is gone" for key in BATCH_KEYS if f'"{key}"' not in source]
    found += [f"attribute {name} is gone" for name in ATTRIBUTES if f"self.{name}" not in source]
    if "shuffle_sequence_dict(generation_batch)" not in source:
        found.append("_prepare_inputs no longer shuffles every entry of the batch dict in unison")
    if "if advantages.dim() == 1:" not in source:
        found.append("_compute_loss no longer takes one advantage per token")
    return found
