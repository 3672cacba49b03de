"""A sample that cannot be scored costs its own reward; a broken reward stops the run."""

import asyncio
import warnings

import pytest

from shadowmask.rewards import isolate_failures, score_each


def reciprocal(completion, scale):
    return scale / int(completion)


def test_a_sample_that_raises_gets_zero_and_one_warning_that_names_it():
    with pytest.warns(UserWarning, match=r"ZeroDivisionError: .* for sample 1 \('0'\)") as caught:
        assert score_each(reciprocal, ["1", "0", "4"], [2, 2, 2]) == [2.0, 0.0, 0.5]
    assert len(caught) == 1


def test_all_samples_raising_is_an_error_that_names_the_first():
    with pytest.raises(ValueError, match="every one of 2 completions; the first: ZeroDivisionError"):
        score_each(reciprocal, ["0", "0"], [1, 1])


def test_no_samples_are_no_error():
    assert score_each(reciprocal, [], []) == []


def test_columns_of_another_length_are_an_error():
    with pytest.raises(ValueError):
        score_each(reciprocal, ["1", "2"], [1])


def batch_reward(prompts, completions, scale, trainer_state=None, **kwargs):
    """Raises as a whole when one completion is no number, as a user's reward would."""
    assert trainer_state == "state"
    assert len(prompts) == len(completions) == len(scale)
    return [float(text) * s for text, s in zip(completions, scale, strict=True)]


def call(function, completions):
    return function(
        prompts=["?"] * len(completions),
        completions=completions,
        scale=[2.0] * len(completions),
        trainer_state="state",
    )


def test_a_batch_reward_that_works_is_called_once_and_keeps_its_name():
    wrapped = isolate_failures(batch_reward)
    assert wrapped.__name__ == "batch_reward"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert call(wrapped, ["1", "2"]) == [2.0, 4.0]


def test_a_batch_reward_that_raises_is_asked_again_sample_by_sample():
    with pytest.warns(
        UserWarning, match=r"could not convert string to float: 'x' for sample 2 \('x'\)"
    ) as caught:
        assert call(isolate_failures(batch_reward), ["1", "2", "x"]) == [2.0, 4.0, 0.0]
    assert len(caught) == 1


@pytest.mark.parametrize("completions", [["x"], ["x", "y"]])
def test_a_batch_reward_that_always_raises_stops(completions):
    with pytest.raises(ValueError, match="could not convert string to float: 'x'"):
        call(isolate_failures(batch_reward), completions)


def test_a_reward_may_abstain_for_a_sample():
    def abstains(completions, **kwargs):
        return [None if not text else 1 / len(text.strip()) for text in completions]

    with pytest.warns(UserWarning, match="sample 1"):
        assert isolate_failures(abstains)(completions=["", " ", "ab"]) == [None, 0.0, 0.5]


def test_coroutine_functions_are_left_alone():
    async def reward(completions, **kwargs):
        await asyncio.sleep(0)
        return [0.0]

    assert isolate_failures(reward) is reward


def test_an_interrupt_is_not_a_failing_sample():
    def interrupted(completion):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        score_each(interrupted, ["1", "2"])
