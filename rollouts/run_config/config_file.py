"""Reads and checks a configuration file of `rollouts run`."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from pydantic import ValidationError

from renderers import RendererError
from renderers.file_reading import open_readable
from rollouts.errors import MissingExtraError, RolloutsError
from rollouts.run_config.errors import ConfigProblem, KeyPath, RunConfigError
from rollouts.run_config.problem_texts import config_problems, key_text, unsafe_values
from rollouts.run_config.sections import RunConfig
from transport import TransportError


@dataclass(frozen=True, slots=True)
class ConfigFile:
    """A configuration and its file. Paths in it are relative to `directory`."""

    path: Path
    config: RunConfig

    @property
    def directory(self) -> Path:
        return self.path.resolve().parent

    def resolve(self, path: str) -> Path:
        """A path of the file, absolute."""
        return self.directory / Path(path).expanduser()

    def error(self, key: KeyPath, reason: str) -> RunConfigError:
        """The error that the value of `key` cannot be used."""
        return RunConfigError(self.path, [ConfigProblem(key_text(key), reason)])

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


def read_config(path: Path) -> ConfigFile:
    """Read and check a file. What it refers to (files, modules, environment variables) is not looked up.

    Raises `RunConfigError` with every problem of the file, and `OSError` for a file that cannot be read.
    """
    text = _read_text(path)
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        _raise_syntax_error(path, text, error)
    except RecursionError as error:
        problem = ConfigProblem("", "nested too deep; write fewer arrays in arrays")
        raise RunConfigError(path, [problem]) from error
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


def _raise_syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> NoReturn:
    message = str(error)
    place = re.search(r" \(at (?:line (\d+), column (\d+)|end of document)\)$", message)
    line = int(place[1]) if place and place[1] else text.count("\n") + 1
    column = f", column {place[2]}" if place and place[2] else ""
    reason = message[: place.start()] if place else message
    cure = _syntax_cure(text.splitlines()[line - 1] if line <= len(text.splitlines()) else "")
    raise RunConfigError(path, [ConfigProblem("", f"line {line}{column}: not TOML: {reason}{cure}")]) from None


def _syntax_cure(line: str) -> str:
    """What to write instead, for the usual mistakes."""
    name, equals, value = (part.strip() for part in line.partition("="))
    if equals and re.fullmatch(r"True|False", value):
        return f"; write {value.lower()}"
    if equals and value in ("", "None", "null"):
        return "; TOML has no such value: remove the key"
    if equals and re.fullmatch(r"[A-Za-z_./~][^\"'\[\]{}]*", value):
        return f'; write text in quotes: {name} = "..."'
    if ":" in line and not equals:
        return "; write `key = value`"
    return ""
