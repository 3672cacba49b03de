"""Expected attention: keep what future queries are expected to look at, times the length of the value.

Source: Expected Attention (arXiv:2510.00636), ``ExpectedAttentionPress`` in ``NVIDIA/kvpress``. Future
queries are taken as normal with mean m and covariance C, so the expected exponential of key k's logit is
exp(m.k / sqrt(d) + k.C.k / (2 d)). Over the keys behind the sinks this becomes a softmax, averaged over
the query heads that share a KV head and multiplied by the norm of the value. Needs: the last
``observation_window`` queries, keys and values.

Here m.k and k.C.k are the mean and the variance of the logits of the last queries: the same numbers,
without a head_dim x head_dim matrix per head. Memory: a window x slots matrix per query head.

Differences, all from what queries are at hand:

- The original estimates m and C from all prompt queries *before* rotation, without those of the sinks,
  and rotates the estimate by the average over the next 512 positions. Here the sample is the last
  ``observation_window`` queries, each rotated to its own position: fewer, more local, and placed just
  behind the next query instead of ahead of it. Positions below ``num_sinks`` are left out as well. (While
  decoding, kvpress, too, goes by a buffer of recent queries.)
- ``observation_window`` 64 is our choice; the rank of C is less than that.
- A softcap applies to the logits before mean and variance are taken. Under a sliding window, keys that
  the next query cannot reach score 0.
- A recent window always stays. Of the other keys, those inside the observation window are scored by some
  queries that came before them.
- Models that normalise queries are served as any other (the original refuses them).
"""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from shadowmask.eviction.base import NUM_SINKS, Evictor, LayerView, softmax_over, widen, window_logits


class ExpectedAttentionEvictor(Evictor):
    name = "expected-attention"

    def __init__(
        self,
        budget: int | None = None,
        compression_ratio: float | None = None,
        num_sinks: int = NUM_SINKS,
        recent_window: int | None = None,
        observation_window: int = 64,
        share: str | None = None,
    ) -> None:
        if observation_window < 1:
            raise ValueError(f"observation_window={observation_window} must be at least 1")
        self.observation_window = observation_window
        super().__init__(budget, compression_ratio, num_sinks, recent_window, share)

    def score(self, view: LayerView) -> Float[Tensor, "batch kv_heads slots"]:
        expected = softmax_over(self.expected_logits(view), self._reachable(view)).mean(dim=2)
        return expected * widen(view.values).norm(dim=-1)

    def expected_logits(self, view: LayerView) -> Float[Tensor, "batch kv_heads per_kv slots"]:
        """Logarithm of the expected exponential of every logit: mean + variance / 2 over the sample."""
        assert view.window_positions is not None
        logits, _ = window_logits(view)
        sampled = (view.window_positions >= self.num_sinks)[:, None, None, :, None]
        count = sampled.sum(dim=3).clamp(min=1)
        mean = logits.masked_fill(~sampled, 0.0).sum(dim=3) / count
        deviation = (logits - mean.unsqueeze(3)).masked_fill(~sampled, 0.0)
        return mean + deviation.square().sum(dim=3) / count / 2

    def _reachable(self, view: LayerView) -> Tensor:
        """Slots that the next query can attend to, sinks left out: bool (batch, kv_heads, 1, slots)."""
        reachable = view.positions >= self.num_sinks
        if view.sliding_window is not None:
            earliest = view.query_positions + 2 - view.sliding_window
            reachable = reachable & (view.positions >= earliest[:, None, None])
        return reachable[:, :, None]
