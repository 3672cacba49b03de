"""``shadowmask <command>``: dispatch, and errors as one clear line.

Commands import their libraries when they are called, so ``shadowmask --help`` is instant.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from difflib import get_close_matches

from shadowmask.commands.errors import Interrupted, UserError

COMMANDS = {
    "train": "train a model by RL with an evicted KV cache (no arguments: the CPU demo)",
    "eval": "score a model on a task's held-out prompts, dense and under evictors",
    "bench": "measure a step, a rollout and the learner against stock TRL and dense paths",
    "compare": "run a grid of training runs over seeds: table and figures",
    "rollout": "sample completions with an evicted cache and show what was evicted",
    "inspect": "look at a rollout token by token: what was evicted when, and which answer it made worse",
    "report": "one page on a run or several: curves, gaps, memory, settings, completions, warnings",
}

DEBUG = "SHADOWMASK_DEBUG"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the process's exit status (0 good, 1 failed, 2 usage, 130 interrupted)."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_usage())
        return 0 if arguments else 2
    if arguments[0] == "--version":
        from importlib.metadata import version

        print(f"shadowmask {version('shadowmask')}")
        return 0
    command, *rest = arguments
    if command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        hint = f", did you mean {near[0]!r}?" if near else f"; commands: {', '.join(COMMANDS)}"
        print(f"shadowmask: unknown command {command!r}{hint}", file=sys.stderr)
        return 2
    return _run(command, rest)


def _run(command: str, arguments: list[str]) -> int:
    try:
        importlib.import_module(f"shadowmask.commands.{command}").main(arguments)
    except KeyboardInterrupt:
        print(f"\nshadowmask {command}: interrupted", file=sys.stderr)
        return 130
    except Interrupted as stop:
        print(f"shadowmask {command}: {stop}", file=sys.stderr)
        return 130
    except BrokenPipeError:
        return 1
    except Exception as error:
        if os.environ.get(DEBUG) or not _is_for_users(error):
            raise
        line = " ".join(str(error).split())
        if isinstance(error, ModuleNotFoundError):
            line += "; the command line needs: pip install 'shadowmask[demo]'"
        print(f"shadowmask {command}: {line}", file=sys.stderr)
        return 1
    return 0


def _is_for_users(error: Exception) -> bool:
    """Errors whose message says what to change. Anything else is our fault and keeps its traceback."""
    from shadowmask.metrics import ParityError

    return isinstance(error, (UserError, ValueError, ParityError, ImportError, OSError))


def _usage() -> str:
    width = max(map(len, COMMANDS))
    lines = [f"  {name:{width}}  {what}" for name, what in COMMANDS.items()]
    return "\n".join(
        [
            "usage: shadowmask <command> [--field value ...] [--config file.yaml]",
            "",
            "RL post-training with an evicted KV cache that the learner replays exactly.",
            "",
            *lines,
            "",
            "shadowmask <command> --help lists its settings; any of them may stand in the YAML file.",
            f"{DEBUG}=1 in the environment shows tracebacks.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
