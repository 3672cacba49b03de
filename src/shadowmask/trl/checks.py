"""Refusals: settings that TRL accepts and that exact replay cannot honour, and bad input."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Sequence
from typing import Any

from numpy import ndarray
from torch import Tensor

from shadowmask.trl.config import SMDConfig

# setting -> (its neutral value, why anything else is refused)
_FILTERS = {
    "top_k": (0, "a sampling filter"),
    "top_p": (1.0, "a sampling filter"),
    "min_p": (None, "a sampling filter"),
    "repetition_penalty": (1.0, "a penalty"),
}


def refuse_unsupported(args: SMDConfig, options: dict[str, Any]) -> None:
    """Raise ValueError for anything that would make the sampler differ from what the learner replays."""
    for name, (neutral, kind) in _FILTERS.items():
        value = getattr(args, name)
        if value != neutral and not (neutral in (0, None) and not value):
            raise ValueError(
                f"{name}={value}: {kind} changes the sampled distribution and is not replayed by the "
                f"learner; set {name}={neutral}"
            )
    if args.temperature <= 0:
        raise ValueError(f"temperature={args.temperature} must be positive in training")
    for name in ("use_vllm", "use_transformers_continuous_batching"):
        if getattr(args, name):
            raise ValueError(f"{name}=True: rollouts are made by shadowmask's own engine; set it to False")
    for name in ("generation_kwargs", "cache_implementation"):
        if getattr(args, name):
            raise ValueError(f"{name}={getattr(args, name)!r} is not supported by the evicting sampler")
    if args.router_aux_loss_coef:
        raise ValueError("router_aux_loss_coef: the load-balancing loss is not computed on packed rows")
    for name in ("rollout_func", "tools", "environment_factory"):
        if options.get(name):
            raise ValueError(f"{name} is not supported: multi-turn rollouts keep no shadow mask yet")


def checked_rewards(reward_funcs: Any) -> Any:
    """Wrap plain reward functions so that a wrong length or NaN is one clear error."""
    if not isinstance(reward_funcs, list):
        return _checked(reward_funcs)
    return [_checked(function) for function in reward_funcs]


def _checked(function: Any) -> Any:
    if not (inspect.isfunction(function) or inspect.ismethod(function)):
        return function  # a model, a model's name, or a callable object with its own contract
    name = function.__name__
    if inspect.iscoroutinefunction(function):

        @functools.wraps(function)
        async def checked_async(*args: Any, **kwargs: Any) -> Any:
            return _check(name, await function(*args, **kwargs), kwargs)

        return checked_async

    @functools.wraps(function)
    def checked(*args: Any, **kwargs: Any) -> Any:
        return _check(name, function(*args, **kwargs), kwargs)

    return checked


def _check(name: str, rewards: Any, kwargs: dict[str, Any]) -> Sequence[Any]:
    expected = len(kwargs["completions"])
    if not isinstance(rewards, Sequence | Tensor | ndarray) or isinstance(rewards, str):
        raise ValueError(
            f"reward function {name!r} returned a {type(rewards).__name__}, not a list of numbers"
        )
    if len(rewards) != expected:
        raise ValueError(
            f"reward function {name!r} returned {len(rewards)} values for {expected} completions"
        )
    checked: list[float | None] = []
    for n, reward in enumerate(rewards):
        try:
            value = None if reward is None else float(reward)
        except (TypeError, ValueError) as error:
            raise ValueError(f"reward function {name!r} returned {reward!r} for completion {n}") from error
        if value is not None and not math.isfinite(value):
            raise ValueError(
                f"reward function {name!r} returned {reward} for completion {n}; return None to leave "
                "a completion out"
            )
        checked.append(value)
    return checked
