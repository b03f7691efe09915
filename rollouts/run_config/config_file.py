"""The file of `rollouts run`: read, checked, and its problems described."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn, TypeAlias, TypeVar, cast, get_args, get_origin

from pydantic import BaseModel, ValidationError

from renderers import RendererError
from renderers.process.files import open_readable
from rollouts.errors import MissingExtraError, RolloutsError, short_repr
from rollouts.run_config.sections import RendererSection, RunConfig
from transport import TransportError

T = TypeVar("T")

#: From the top of the document: names of keys, and numbers of array elements from 0.
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong in a configuration file: the key, as `tasks.path` or "" for the file; reason and cure."""

    key: str
    reason: str

    def text(self, path: Path) -> str:
        return f"{path}: {self.key}{': ' * bool(self.key)}{self.reason}"


class RunConfigError(RolloutsError, ValueError):
    """A configuration file of `rollouts run` cannot be used. `problems` has an entry for each thing that is wrong.

    Cure: correct the keys that the text lists; `rollouts run --dry-run` checks the file.
    """

    def __init__(self, path: Path, problems: Sequence[ConfigProblem]) -> None:
        self.path = path
        self.problems = tuple(problems)
        super().__init__("\n".join(problem.text(path) for problem in problems))


class ProblemList:
    """Collects the problems of several parts of a configuration, so that all of them are reported at once."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._problems: list[ConfigProblem] = []

    def attempt(self, make: Callable[[], T]) -> T:
        """What `make` returns. If it raised `RunConfigError`, its problems are kept, and `check` will raise."""
        try:
            return make()
        except RunConfigError as error:
            self._problems.extend(error.problems)
            return cast(T, None)

    def check(self) -> None:
        """Raises `RunConfigError` with all problems if there is one."""
        if self._problems:
            raise RunConfigError(self._path, self._problems)


class TaskFileError(RolloutsError, ValueError):
    """A file of tasks cannot be read. `row` is the line of a JSONL file, else the number of the row; both from 1.

    Cure: correct the line or row that the text names.
    """

    def __init__(self, path: Path, row: int | None, reason: str, *, unit: str = "line") -> None:
        self.row = row
        super().__init__(f"{path}{'' if row is None else f', {unit} {row}'}: {reason}")


# Errors of pydantic as problems of a configuration file: key, reason and cure.


#: Keys whose text is a path.
_PATH_KEYS = ("path", "directory", "model", "chat_template", "file", "log")


def config_problems(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of `data`, which `model` refused."""
    return [_problem(details, model, data) for details in error.errors(include_url=False)]


def unsafe_values(data: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of values that no key can have.

    Integers of more than 64 bits cannot be recorded, and are not TOML's; no file name has a null character.
    """
    problems = []
    for path, value in _values((), data):
        if isinstance(value, int) and not -(2**63) <= value < 2**63:
            reason = f"{short_repr(value)} is out of range; write an integer from {-(2**63)} to below {2**63}"
        elif isinstance(value, str) and "\0" in value and path[-1] in _PATH_KEYS:
            reason = f"{short_repr(value)} has a null character, which no file name has; remove it"
        else:
            continue
        problems.append(ConfigProblem(key_text(path), reason))
    return problems


def _values(path: KeyPath, value: object) -> Iterator[tuple[KeyPath, object]]:
    """Every value that is no table and no array, with its path."""
    if isinstance(value, Mapping):
        for key, member in value.items():
            yield from _values((*path, key), member)
    elif isinstance(value, list):
        for index, member in enumerate(value):
            yield from _values((*path, index), member)
    else:
        yield path, value


def key_text(path: KeyPath) -> str:
    """A path as it is written in errors: `tasks.path`, `engine.completions[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' * bool(text)}{part}"
    return text


def _problem(details: Any, model: type[BaseModel], data: Mapping[str, Any]) -> ConfigProblem:
    kind: str = details["type"]
    path, table, models = _resolve(details["loc"], model, data)
    if kind in ("union_tag_not_found", "union_tag_invalid"):
        path = (*path, "kind")
        reason = _wrong_choice(details.get("ctx", {}).get("tag"), [_kind(one) for one in models])
    else:
        reason = _reason(details, path, table)
    return ConfigProblem(key_text(path), reason)


def _reason(details: Any, path: KeyPath, table: type[BaseModel] | None) -> str:
    kind, value = details["type"], details["input"]
    if kind == "missing":
        return _missing(path, table)
    if kind == "extra_forbidden":
        return _unknown_key(path, table)
    if kind == "literal_error":
        return _wrong_choice(value, details["ctx"]["expected"].replace(" or ", ", ").split(", "))
    if kind == "string_pattern_mismatch" and path[-1] == "api_key_env":
        # The value is not repeated: it may be the key itself.
        return 'this is no name of an environment variable; write one, such as "VLLM_API_KEY"'
    if kind == "string_pattern_mismatch":
        return f'{short_repr(value)} is no import path; write "module:name" or "package.module:name"'
    if header := _header(path, table):
        return f"{short_repr(value)} is no such table; write {header} and its keys below it"
    return f"{short_repr(value)}: {details['msg']}"


def _missing(path: KeyPath, table: type[BaseModel] | None) -> str:
    if header := _header(path, table):
        return f"the table is missing; add {header}"
    return f"the key is missing; add `{path[-1]} = ...` to {_table_name(path[:-1])}"


def _header(path: KeyPath, table: type[BaseModel] | None) -> str:
    """The line that begins the table of a key, "[key]", or each of its tables, "[[key]]"; "" where it has none."""
    field = None if table is None else table.model_fields.get(str(path[-1]))
    if field is None or not _models(field.annotation):
        return ""
    return f"[[{key_text(path)}]]" if get_origin(field.annotation) is list else f"[{key_text(path)}]"


def _unknown_key(path: KeyPath, table: type[BaseModel] | None) -> str:
    # The value is not repeated: an unknown key may hold a secret.
    name = str(path[-1])
    known = [] if table is None else list(table.model_fields)
    if name == "api_key":
        return 'a key is never written in the file; put it in an environment variable: api_key_env = "VLLM_API_KEY"'
    close = _closest(name, known)
    suggestion = f"did you mean `{close}`? " if close else ""
    return f"{_table_name(path[:-1])} has no such key; {suggestion}its keys are {', '.join(known)}"


def _wrong_choice(value: object, choices: Sequence[str]) -> str:
    choices = [choice.strip("'") for choice in choices]
    listed = " or ".join(f'"{choice}"' for choice in choices)
    if value is None:
        return f"the key is missing; write {listed}"
    close = _closest(str(value), choices)
    suggestion = f'did you mean "{close}"? ' if close else ""
    return f"{short_repr(value)} is not known; {suggestion}write {listed}"


def _closest(name: str, known: Sequence[str]) -> str | None:
    """The known name that is most like `name`; None where there is none."""
    return next(iter(get_close_matches(name, known, n=1)), None)


def _table_name(path: KeyPath) -> str:
    return f"[{key_text(path)}]" if path else "the top of the file"


def _resolve(
    location: Sequence[str | int], model: type[BaseModel], data: Any
) -> tuple[KeyPath, type[BaseModel] | None, list[type[BaseModel]]]:
    """The path in the file of pydantic's location, the model of the table that holds its last key, and the models that
    the value of that key may have.

    Pydantic inserts the `kind` of a table into the location.
    """
    path: list[str | int] = []
    table: type[BaseModel] | None = None
    models = [model]
    value = data
    for part in location:
        if len(models) > 1 and isinstance(value, Mapping) and value.get("kind") == part:
            models = [one for one in models if _kind(one) == part]
            continue
        path.append(part)
        if isinstance(part, str):  # the tables of an array have the models of the array
            table = models[0] if len(models) == 1 else None
            field = None if table is None else table.model_fields.get(part)
            models = [] if field is None else _models(field.annotation)
        try:
            value = value[part]
        except (KeyError, IndexError, TypeError):
            value = None
    return tuple(path), table, models


def _kind(model: type[BaseModel]) -> str:
    """The `kind` of a table that has this model."""
    return str(get_args(model.model_fields["kind"].annotation)[0])


def _models(annotation: Any) -> list[type[BaseModel]]:
    """The models in an annotation: of a table, those of a union, those of the tables of an array."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]


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
        _raise_syntax_error(path, text, error)
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


def _raise_syntax_error(path: Path, text: str, error: tomllib.TOMLDecodeError) -> NoReturn:
    lines, place = text.splitlines(), re.search(r"at line (\d+)", str(error))
    cure = _syntax_cure(lines[int(place[1]) - 1] if place else "".join(lines[-1:]))
    raise RunConfigError(path, [ConfigProblem("", f"not TOML: {error}{cure}")]) from None


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
