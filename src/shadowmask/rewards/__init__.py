"""Rewards: one completion against one reference, and what keeps a bad sample from stopping a run."""

from shadowmask.rewards.answers import final_answer, final_text
from shadowmask.rewards.guard import isolate_failures, score_each
from shadowmask.rewards.maths import boxed_answer, math_correct
from shadowmask.rewards.numbers import last_number, numbers_in, plain, to_number
from shadowmask.rewards.qa import exact_match, mentions, normalize, token_f1
from shadowmask.rewards.summary import rouge_l
from shadowmask.rewards.text import Completion, completion_text

__all__ = [
    "Completion",
    "boxed_answer",
    "completion_text",
    "exact_match",
    "final_answer",
    "final_text",
    "isolate_failures",
    "last_number",
    "math_correct",
    "mentions",
    "normalize",
    "numbers_in",
    "plain",
    "rouge_l",
    "score_each",
    "to_number",
    "token_f1",
]
