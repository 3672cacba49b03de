"""Every tolerance of the test suite, with the reason for it. Tests contain no bare numbers.

Log-probabilities and losses are in nats. "Small models" are those of ``tiny_models``: 2-3 layers,
hidden size 64.
"""

import torch

# Sampler and learner sum the same terms in another order (slots against positions, one query against
# many). float64 rounding is 1e-16; 1e-12 leaves room for depth and for log-probabilities around -20.
FLOAT64 = 1e-12
# float32 rounding is 6e-8; design section 6 allows 5e-6 on the small models.
FLOAT32 = 5e-6
# bfloat16 has 8 bits: 4e-3 relative, summed over a few layers (design section 6).
BFLOAT16 = 2e-2
PARITY = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16}

# A wrong record must stand out from noise by far, not merely exceed the tolerance: gaps of wrong
# records on the small models are between 1e-2 and 5.
WRONG_RECORD = 1e-3

# Gradients in float64, relative to the largest entry of the reference's gradient: sums over some
# hundred tokens, so a few more digits than a single log-probability are lost.
GRADIENT_FLOAT64 = 1e-10
# Mixture of experts: transformers computes the router's softmax in float32, so the gradient through it
# is rounded to 1e-7 of its own size, a small part of the whole.
GRADIENT_ROUTER = 1e-7
# The same in float32.
GRADIENT_FLOAT32 = 2e-5
# A gradient that must differ (negative controls) does so by at least this fraction.
GRADIENT_DIFFERS = 1e-3

# TRL computes with padded rows and its own head; float32 models in TRL tests, losses of order 1.
TRL_LOSS = 5e-6
# Relative to the largest gradient entry: importance ratios and sequence-level weights amplify noise.
TRL_GRADIENT = 1e-4

# Two runs of the same numbers in the same order.
EXACT = 0.0
# Values printed with few digits or computed by hand in decimal.
HAND_COMPUTED = 1e-6

# Per-token advantages broadcast in another order than per-row ones: one rounding of float32.
SAME_METHOD = 1e-6

# Training resumed from a checkpoint repeats the steps; optimizer state is stored in float32 exactly,
# so only the order of sums may differ.
RESUMED_LOSS = 1e-6

# Share of trials: a uniform choice of 1 in n, over some thousand draws, strays by less than this
# (five standard deviations of a binomial share with 4,000 draws: 5 * sqrt(0.25 / 4000) = 0.04).
UNIFORM_SHARE = 0.04


def relative_gap(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference as a fraction of the largest expected entry."""
    scale = float(expected.abs().max())
    assert scale > 0, "the reference is zero everywhere: the comparison would prove nothing"
    return float((actual - expected).abs().max()) / scale
