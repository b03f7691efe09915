"""The file of `rollouts run`: read and checked."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from renderers import RendererError
from renderers.errors import MissingExtraError
from renderers.process.files import open_readable
from rollouts.errors import RolloutsError
from rollouts.run_config.errors import ConfigProblem, KeyPath, RunConfigError, key_text
from rollouts.run_config.invalid_values import config_problems, unsafe_values
from rollouts.run_config.sections import RendererSection, RunConfig
from transport import TransportError

#: What Python's limit of 4,300 digits refuses.
_LONG_INTEGER = re.compile(r"\b[0-9][0-9_]{4299,}")


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration and its file. Paths in it are relative to `directory`.

    `prefix` is the table that has the tables of `config`, in errors: those of the teacher are `teacher.engine`...
    """

    path: Path
    config: RunConfig
    prefix: KeyPath = ()

    @property
    def renderer(self) -> RendererSection:
        """The table of the renderer, which every engine of tokens needs. Raises `RunConfigError`."""
        if self.config.renderer is None:
            raise self.error(("renderer",), "the table is missing; add [renderer]")
        return self.config.renderer

    @property
    def directory(self) -> Path:
        return self.path.resolve().parent

    def resolve(self, path: str) -> Path:
        """A path of the file, absolute."""
        return self.directory / Path(path).expanduser()

    def error(self, key: KeyPath, reason: str) -> RunConfigError:
        """The error that the value of `key` cannot be used."""
        return RunConfigError(self.path, [ConfigProblem(key_text((*self.prefix, *key)), reason)])

    @contextmanager
    def naming(self, *key: str | int) -> Iterator[None]:
        """Turn an error of this distribution inside the block into one that names the key."""
        try:
            yield
        except (RunConfigError, MissingExtraError):
            raise
        except (RolloutsError, RendererError, TransportError, OSError) as error:
            reason = f"{error.strerror or error}: {error.filename}" if isinstance(error, OSError) else str(error)
            raise self.error(key, reason) from error


def read_config(path: Path, changes: Mapping[KeyPath, Any] = MappingProxyType({})) -> ConfigFile:
    """Read and check a file. What it refers to (files, modules, environment variables) is not looked up.

    `changes` are values that take the place of those of the file, by their keys. Raises `RunConfigError` with every
    problem of the file, and `OSError` for a file that cannot be read.
    """
    text = _read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise RunConfigError(path, [ConfigProblem("", f"not TOML: {error}")]) from None
    except ValueError as error:  # of Python: the integer has more digits than it reads
        number = _LONG_INTEGER.search(text)
        line = text.count("\n", 0, 0 if number is None else number.start()) + 1
        reason = f"line {line}: an integer of too many digits; write one from {-(2**63)} to below {2**63}"
        raise RunConfigError(path, [ConfigProblem("", reason)]) from error
    except RecursionError as error:
        problem = ConfigProblem("", "nested too deep; write fewer arrays in arrays")
        raise RunConfigError(path, [problem]) from error
    return checked_config(path, data, changes)


def checked_config(
    path: Path, data: dict[str, Any], changes: Mapping[KeyPath, Any] = MappingProxyType({})
) -> ConfigFile:
    """The configuration of the values of a file. Raises `RunConfigError` with every problem."""
    for key, value in changes.items():
        table: Any = data
        for part in key[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else table
        if isinstance(table, dict):  # else the check below names the value that is no table
            table[key[-1]] = value
    if unsafe := unsafe_values(data):
        raise RunConfigError(path, unsafe)
    try:
        return ConfigFile(path, RunConfig.model_validate(data))
    except ValidationError as error:
        # Without the error of pydantic: it quotes values, which may be secrets.
        problems = config_problems(error, RunConfig, data)
    raise RunConfigError(path, problems)


def _read_text(path: Path) -> str:
    with open_readable(path) as file:
        content = file.read()
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        reason = f"line {line}: byte {content[error.start]:#04x} is not UTF-8; save the file as UTF-8"
        raise RunConfigError(path, [ConfigProblem("", reason)]) from error
