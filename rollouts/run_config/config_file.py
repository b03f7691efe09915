"""Configurations: a file and the options that change it, read and checked."""

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, NamedTuple, get_args

from pydantic import BaseModel, ValidationError

from renderers import RendererError
from renderers.errors import MissingExtraError
from renderers.process.files import open_readable
from rollouts.errors import RolloutsError, short_repr, validation_errors
from rollouts.run_config.errors import ConfigProblem, KeyPath, RunConfigError, key_text
from rollouts.run_config.sections import EngineConfig, RunConfig
from transport import TransportError

#: Kinds of pydantic's errors. The value of an unknown key may be a secret; texts of our own have what may be printed.
_WITHOUT_VALUE = ("extra_forbidden", "missing", "value_error", "union_tag_invalid", "union_tag_not_found")


class Change(NamedTuple):
    """A value that takes the place of that of the file, and the option that gave it."""

    key: KeyPath
    value: Any
    option: str


@dataclass(frozen=True, slots=True)
class EngineFile:
    """A configuration of which engine and renderer are used, and its file. Paths are relative to `directory`.

    `changes` are the values that options gave. `prefix` is the table that has the tables of `config`, in
    errors: those of the teacher are `teacher.engine`...
    """

    path: Path
    config: EngineConfig
    changes: tuple[Change, ...] = ()
    prefix: KeyPath = ()

    @property
    def directory(self) -> Path:
        return self.path.resolve().parent

    def resolve(self, path: str) -> Path:
        """A path of the file, absolute."""
        return self.directory / Path(path).expanduser()

    def error(self, key: KeyPath, reason: str) -> RunConfigError:
        """The error that the value of `key` cannot be used."""
        return RunConfigError([_problem(self.path, self.changes, (*self.prefix, *key), reason)])

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


@dataclass(frozen=True, slots=True)
class ConfigFile(EngineFile):
    """The configuration of a run."""

    config: RunConfig


def read_config(path: Path, changes: Sequence[Change] = ()) -> ConfigFile:
    """Read and check a file. What it refers to (files, modules, environment variables) is not looked up.

    Raises `RunConfigError` with every problem of the file, and `OSError` for a file that cannot be read.
    """
    return checked_config(path, read_values(path), changes)


def read_values(path: Path) -> dict[str, Any]:
    """The values of a file. Raises `RunConfigError` for one that is not TOML, and `OSError`."""
    with open_readable(path) as file:
        content = file.read()
    try:
        return tomllib.loads(content.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:  # also of bytes that are not UTF-8
        raise RunConfigError([ConfigProblem(str(path), "", f"not TOML: {error}")]) from error


def engine_kind(values: Mapping[str, Any]) -> str:
    """The kind of the engine in the values of a file, which are not checked yet; empty where they name none."""
    engine = values.get("engine")
    return str(engine.get("kind", "")) if isinstance(engine, dict) else ""


def checked_config(path: Path, values: dict[str, Any], changes: Sequence[Change] = ()) -> ConfigFile:
    """The configuration of the values of a file. Raises `RunConfigError` with every problem."""
    return ConfigFile(path, _checked(RunConfig, path, values, changes), tuple(changes))


def checked_engine_config(path: Path, values: dict[str, Any], changes: Sequence[Change] = ()) -> EngineFile:
    """The configuration of an engine in the values of a file, which may lack the tables of a run."""
    return EngineFile(path, _checked(EngineConfig, path, values, changes), tuple(changes))


def _checked(model: type[Any], path: Path, values: dict[str, Any], changes: Sequence[Change]) -> Any:
    for change in changes:
        table: Any = values
        for part in change.key[:-1]:
            table = table.setdefault(part, {}) if isinstance(table, dict) else table
        if isinstance(table, dict):  # else the check below names the value that is no table
            table[change.key[-1]] = change.value
    try:
        return model.model_validate(values)
    except ValidationError as error:
        # Without the error of pydantic: it quotes values, which may be secrets.
        problems = [_problem(path, changes, *_key_and_reason(details, model)) for details in validation_errors(error)]
    raise RunConfigError(problems)


def _problem(path: Path, changes: Sequence[Change], key: KeyPath, reason: str) -> ConfigProblem:
    options = {len(change.key): change.option for change in changes if key[: len(change.key)] == change.key}
    return ConfigProblem(options[max(options)] if options else str(path), key_text(key), reason)


def _key_and_reason(details: Any, model: type[BaseModel]) -> tuple[KeyPath, str]:
    """The key of an error of pydantic, and its message with the value and the choices."""
    kind, message = details["type"], details["msg"].removeprefix("Value error, ")
    key, keys, models = _place(details["loc"], model)
    if kind == "extra_forbidden":
        written, choices = str(key[-1]), list(keys)
        message = f"{message}; the keys here are {', '.join(choices)}"
        if written == "api_key":
            message = 'a key is never written in the file; name its environment variable: api_key_env = "VLLM_API_KEY"'
    elif kind == "literal_error":
        written, choices = str(details["input"]), re.findall("'([^']*)'", details["ctx"]["expected"])
    elif kind in ("union_tag_invalid", "union_tag_not_found"):
        key = (*key, "kind")
        written, choices = str(details["ctx"].get("tag", "")), [_kind(one) for one in models]
        message = f"{message}; the kinds are {', '.join(choices)}"
    else:
        written, choices = "", []
    if kind in ("dict_type", "model_type", "model_attributes_type"):
        message = 'no table; write { key = value } in a file, and JSON with --set: KEY={"key": "value"}'
    if kind not in _WITHOUT_VALUE:
        message = f"{short_repr(details['input'])}: {message}"
    if close := get_close_matches(written, choices, n=1):
        message = f"{message}; did you mean {close[0]!r}?"
    return key, message


def _place(
    location: Sequence[str | int], model: type[BaseModel]
) -> tuple[KeyPath, Mapping[str, Any], Sequence[type[BaseModel]]]:
    """The key of pydantic's location, the keys of the table that holds it, and the models that its value may have.

    Pydantic's location also has the `kind` of each table.
    """
    key: list[str | int] = []
    keys: Mapping[str, Any] = {}
    models = [model]
    for part in location:
        if len(models) > 1:
            models = [one for one in models if _kind(one) == part]
            continue
        key.append(part)
        if isinstance(part, str):  # the tables of an array have the models of the array
            keys = models[0].model_fields if models else {}
            models = _models(keys[part].annotation) if part in keys else []
    return tuple(key), keys, models


def _kind(model: type[BaseModel]) -> str:
    """The `kind` of a table that has this model."""
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation: of a table, those of a union, those of the tables of an array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]
