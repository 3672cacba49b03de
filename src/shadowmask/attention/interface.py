"""How our attention gets into an unmodified Hugging Face model.

``install`` registers one attention function under the name ``shadowmask`` (with a mask function under
the same name) and selects it on a model. Every forward that samples or replays passes an
``AttentionSession`` as a keyword; Hugging Face hands unknown keywords down to the attention function,
and activation checkpointing captures them, so a recomputation sees the same session.

Without a session the model is the plain dense model that it was before. That is not a way around
replay: a session counts the layers it served, and ``run_decoder`` raises if one was not reached.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from shadowmask.attention.kernel import Scoring, masked_attention
from shadowmask.record import RecordError

NAME = "shadowmask"


@runtime_checkable
class AttentionSession(Protocol):
    """One forward's attention: given a layer's queries, keys and values, returns its outputs."""

    def attend(
        self,
        layer: int,
        query: Float[Tensor, "batch heads query head_dim"],
        key: Float[Tensor, "batch kv_heads query head_dim"],
        value: Float[Tensor, "batch kv_heads query value_dim"],
        scoring: Scoring,
    ) -> Float[Tensor, "batch heads query value_dim"]: ...

    @property
    def layers_served(self) -> set[int]: ...


def shadowmask_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    attention_session: AttentionSession | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The registered function, in Hugging Face's signature."""
    if dropout:
        raise RecordError(f"attention dropout {dropout} is active in {type(module).__name__}: set it to 0")
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    scoring = Scoring(scaling, softcap, sliding_window, s_aux)
    if attention_session is None:
        return _plain_attention(query, key, value, attention_mask, scoring), None
    if attention_mask is not None and attention_mask.numel() != 1:  # run_decoder's own has one element
        raise RecordError(
            f"{type(module).__name__} makes an attention mask of its own {tuple(attention_mask.shape)}, "
            "which no record describes"
        )
    layer: int = module.layer_idx  # type: ignore[assignment]
    out = attention_session.attend(layer, query, key, value, scoring)
    return out.transpose(1, 2).contiguous(), None


def _plain_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scoring: Scoring
) -> Tensor:
    if mask is not None and mask.shape[-1] != key.shape[2]:
        raise RecordError(
            f"a mask for {mask.shape[-1]} keys where there are {key.shape[2]}: the model does not hand the "
            "attention session down to its layers, so its evictions cannot be replayed"
        )
    if mask is not None and mask.dtype != torch.bool:
        mask = mask >= 0  # an additive mask made by somebody else
    out = masked_attention(query, key, value, mask, scoring)
    return out.transpose(1, 2).contiguous()


def _plain_mask(*args: Any, **kwargs: Any) -> Tensor | None:
    # always an explicit mask: our function has no is_causal shortcut
    return sdpa_mask(*args, **{**kwargs, "allow_is_causal_skip": False})


def install(model: PreTrainedModel) -> None:
    """Register the attention function (idempotent) and select it on this model."""
    AttentionInterface.register(NAME, shadowmask_attention)
    AttentionMaskInterface.register(NAME, _plain_mask)
    model.set_attn_implementation(NAME)
    if model.config.get_text_config()._attn_implementation != NAME or NAME not in ALL_ATTENTION_FUNCTIONS:
        raise RecordError(f"{type(model).__name__} does not take a registered attention function")


def run_decoder(
    decoder: nn.Module,
    input_ids: Int[Tensor, "batch tokens"],
    position_ids: Int[Tensor, "batch tokens"],
    session: AttentionSession,
    num_layers: int,
) -> Float[Tensor, "batch tokens hidden"]:
    """Run the decoder (without head) with a session in charge of attention; return hidden states.

    Raises:
        RecordError: some layer never asked the session, i.e. the model attends in a way of its own.
    """
    # A 4-D mask is passed through by transformers as it is, so no tokens x tokens mask is built.
    # The session makes its own and never reads this one.
    ready_made = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=input_ids.device)
    outputs = decoder(
        input_ids=input_ids,
        attention_mask=ready_made,
        position_ids=position_ids,
        use_cache=False,
        attention_session=session,
    )
    missing = set(range(num_layers)) - session.layers_served
    if missing:
        raise RecordError(
            f"{type(decoder).__name__}: layers {sorted(missing)} did not use the attention session, so "
            "their evictions cannot be replayed. Was the model prepared with shadowmask.prepare_model?"
        )
    return outputs.last_hidden_state
