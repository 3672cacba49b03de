"""A reward that fails for one sample costs that sample its reward, not the run its life.

A reward that fails for every sample is broken, or is fed the wrong columns, and says so.
"""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable, Sequence
from typing import Any

LOWEST = 0.0
SHOWN = 60  # characters of a completion in a warning


def score_each(
    score: Callable[..., float], completions: Sequence[Any], *columns: Sequence[Any]
) -> list[float]:
    """Call ``score(completion, *values)`` for every sample; one that raises gets 0.0 and a warning.

    Raises:
        ValueError: it raised for every sample, or the columns differ in length.
    """
    return _isolated(lambda n, *values: score(*values), completions, completions, *columns)


def isolate_failures(function: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a batch reward in TRL's signature: when it raises, call it again for one sample at a time.

    Coroutine functions are returned as they are.
    """
    if inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(type(function).__call__):
        return function

    @functools.wraps(function)
    def isolated(**columns: Any) -> Any:
        try:
            return function(**columns)
        except Exception as error:
            completions = columns.get("completions") or []
            if len(completions) < 2:
                raise _all_failed(len(completions), error) from error

            def one(n: int, _: Any) -> Any:
                result = list(function(**_row(columns, n, len(completions))))
                if len(result) != 1:
                    raise ValueError(f"the reward returned {len(result)} values for one completion") from None
                return result[0]

            return _isolated(one, completions, completions)

    return isolated


def _row(columns: dict[str, Any], n: int, rows: int) -> dict[str, Any]:
    """The columns of one sample; what is no column (TRL's state, its loggers) goes along whole."""
    return {
        name: [values[n]] if isinstance(values, list | tuple) and len(values) == rows else values
        for name, values in columns.items()
    }


def _isolated(score: Callable[..., Any], completions: Sequence[Any], *columns: Sequence[Any]) -> list[Any]:
    scores: list[Any] = []
    failures: list[tuple[int, Exception]] = []
    for n, values in enumerate(zip(*columns, strict=True)):
        try:
            scores.append(score(n, *values))
        except Exception as error:
            scores.append(LOWEST)
            failures.append((n, error))
    if failures and len(failures) == len(scores):
        raise _all_failed(len(failures), failures[0][1]) from failures[0][1]
    for n, failure in failures:
        shown = repr(completions[n])
        shown = shown if len(shown) <= SHOWN else shown[:SHOWN] + "..."
        warnings.warn(
            f"the reward raised {type(failure).__name__}: {failure} for sample {n} ({shown}); "
            f"it gets {LOWEST}",
            stacklevel=4,
        )
    return scores


def _all_failed(count: int, error: Exception) -> ValueError:
    return ValueError(
        f"the reward raised for every one of {count} completions; the first: {type(error).__name__}: {error}"
    )
