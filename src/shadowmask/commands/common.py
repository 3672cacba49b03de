"""What several commands need: parsing, loading models, importing a user's reward function."""

from __future__ import annotations

import dataclasses
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import torch
import yaml
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging as transformers_logging

from shadowmask.commands.errors import UserError
from trl import TrlParser

DEMO_MODEL = "demo"


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)  # argparse would print a usage of several hundred flags


def parse(kinds: Sequence[type], arguments: Sequence[str], command: str, about: str) -> tuple[Any, ...]:
    """Parse flags and ``--config file.yaml`` into dataclasses.

    Flags win over files, and of several files (``--config a.yaml --config b.yaml``) the later one.

    Raises:
        UserError: a config file that is missing or no mapping, or a key that no dataclass has.
    """
    arguments = split_equals(arguments)
    parser = _Parser(list(kinds), prog=f"shadowmask {command}", description=about, allow_abbrev=False)
    if {"--help", "-h"} & set(arguments):
        print(help_text(kinds, command, about))
        raise SystemExit(0)
    files, arguments = take_configs(arguments)
    _check_flags(parser, arguments)
    known = {action.dest for action in parser._actions}
    for file in files:
        settings = _read_config(file)
        for name in settings:
            if name not in known:
                near = get_close_matches(str(name), known, n=1)
                hint = f", did you mean {near[0]!r}?" if near else ""
                raise UserError(f"config file {file!r}: unknown setting {name!r}{hint}")
        parser.set_defaults_with_config(**settings)
    return parser.parse_args_into_dataclasses(args=arguments)


def take_configs(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide arguments into the files of every ``--config`` and the rest.

    Raises:
        UserError: a ``--config`` without a file, or a file that does not exist.
    """
    files, rest = [], list(arguments)
    while "--config" in rest:
        place = rest.index("--config")
        if place + 1 == len(rest):
            raise UserError("--config needs a file")
        if not Path(rest[place + 1]).is_file():
            raise UserError(f"config file {rest[place + 1]!r} does not exist")
        files.append(rest[place + 1])
        del rest[place : place + 2]
    return files, rest


def _read_config(file: str) -> dict[str, Any]:
    try:
        settings = yaml.safe_load(Path(file).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise UserError(f"config file {file!r} is not valid YAML: {error}") from error
    if not isinstance(settings, dict):
        raise UserError(f"config file {file!r} must hold settings, one 'name: value' a line")
    for name, value in (settings.pop("env", None) or {}).items():  # as TrlParser does
        os.environ[name] = str(value)
    return settings


# of the several hundred settings that TRL and transformers add, those that most runs touch
COMMON = (
    *("output_dir", "max_steps", "num_train_epochs", "learning_rate", "per_device_train_batch_size"),
    *("gradient_accumulation_steps", "num_generations", "max_completion_length", "temperature", "beta"),
    *("loss_type", "num_iterations", "bf16", "gradient_checkpointing", "save_steps", "logging_steps"),
    *("report_to", "seed", "model_name_or_path", "dtype", "use_peft", "lora_r", "lora_alpha"),
)


def help_text(kinds: Sequence[type], command: str, about: str) -> str:
    """What a newcomer needs to know: our own settings in full, of the inherited ones the common."""
    lines = [f"usage: shadowmask {command} [--config file.yaml ...] [--setting value ...]", "", about, ""]
    inherited: list[str] = []
    for kind in kinds:
        own = inspect.get_annotations(kind)
        for spec in dataclasses.fields(kind):
            text = f"  --{spec.name:28} {_help_of(spec)}"
            if spec.name in COMMON:
                inherited.append(text)
            elif spec.name in own and kind.__module__.startswith("shadowmask"):
                lines.append(text)
    if inherited:
        lines += [
            "",
            "common settings of TRL's GRPOConfig (every field of it is a flag) and ModelConfig:",
            *inherited,
        ]
    return "\n".join(lines)


def _help_of(spec: dataclasses.Field[Any]) -> str:
    text = " ".join(str(spec.metadata.get("help", "")).split())
    text = text.split(". ")[0] if len(text) > 160 else text
    has_default = spec.default is not dataclasses.MISSING and spec.default is not None
    return f"{text} [{spec.default}]" if has_default else text


def split_positional(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """The names in front of the first flag, and the rest."""
    first = next((n for n, text in enumerate(arguments) if text.startswith("-")), len(arguments))
    return list(arguments[:first]), list(arguments[first:])


def split_equals(arguments: Sequence[str]) -> list[str]:
    """Turn ``--flag=value`` into two arguments, so that looking for a flag finds both spellings."""
    out: list[str] = []
    for argument in arguments:
        out += argument.split("=", 1) if argument.startswith("--") and "=" in argument else [argument]
    return out


def _check_flags(parser: TrlParser, arguments: list[str]) -> None:
    """Name the nearest flag for a misspelt one; argparse's own message lists hundreds of flags."""
    known = {option for action in parser._actions for option in action.option_strings} | {"--config"}
    for argument in arguments:
        if argument.startswith("--") and argument not in known:
            near = get_close_matches(argument, known, n=1)
            hint = f", did you mean {near[0]}?" if near else ""
            raise UserError(f"unknown setting {argument}{hint}")


def load_model(
    name: str, dtype: str | None, revision: str = "main", trust_remote_code: bool = False
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the bundled model (``demo``), a local folder, or a model from the hub.

    Raises:
        UserError: it is neither, or there is no network to fetch it.
    """
    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()  # control characters help nobody in a log
    kind = getattr(torch, dtype or "float32", None)
    if not isinstance(kind, torch.dtype):
        raise UserError(f"dtype={dtype!r} is not a torch dtype, e.g. float32 or bfloat16")
    if name == DEMO_MODEL:
        from shadowmask.demo.model import load_demo_model

        return load_demo_model(kind)
    name = os.path.expanduser(name)
    if _looks_local(name) and not Path(name).is_dir():
        raise UserError(f"model folder {name!r} does not exist")
    try:
        source: dict[str, Any] = {"revision": revision, "trust_remote_code": trust_remote_code}
        tokenizer = AutoTokenizer.from_pretrained(name, **source)
        model = AutoModelForCausalLM.from_pretrained(name, dtype=kind, **source)
    except (OSError, ValueError) as error:
        reason = first_line(error)
        raise UserError(
            f"model {name!r} cannot be loaded: not a model folder, not on the hub, or no network ({reason})"
        ) from error
    return model, tokenizer


def first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _looks_local(name: str) -> bool:
    return name.startswith((".", "/")) or (os.sep in name and Path(name).parent.is_dir())


def import_function(spec: str) -> Callable[..., Any]:
    """Import ``module:function`` or ``path.py:function``.

    The working directory counts, as with ``python -m``, and so does the folder of a file.

    Raises:
        UserError: no such module, file or function.
    """
    module_name, _, function_name = spec.rpartition(":")
    if not module_name or not function_name:
        raise UserError(f"reward {spec!r} must have the form module:function or path.py:function")
    try:
        module = _import_file(module_name) if module_name.endswith(".py") else _import_module(module_name)
    except ImportError as error:
        raise UserError(f"reward {spec!r}: cannot import {module_name!r} ({error})") from error
    except SyntaxError as error:
        raise UserError(f"reward {spec!r}: {module_name}, line {error.lineno}: {error.msg}") from error
    function = getattr(module, function_name, None)
    if not callable(function):
        raise UserError(f"reward {spec!r}: {module_name} has no function {function_name!r}")
    return function


def _import_module(name: str) -> ModuleType:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    return importlib.import_module(name)


def _import_file(name: str) -> ModuleType:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise ImportError("there is no such file")
    if str(path.parent) not in sys.path:
        sys.path.insert(0, str(path.parent))
    found = importlib.util.spec_from_file_location(path.stem, path)
    assert found is not None and found.loader is not None  # the name ends in .py
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module
