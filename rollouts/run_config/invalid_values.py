"""The problems of values that a configuration file cannot have: key, reason and cure, from the errors of pydantic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from typing import Any, get_args, get_origin

from pydantic import BaseModel, ValidationError

from rollouts.errors import short_repr, validation_errors
from rollouts.run_config.errors import ConfigProblem, KeyPath, key_text

#: Keys whose text is a path.
_PATH_KEYS = ("path", "directory", "model", "chat_template", "file", "log")


def config_problems(error: ValidationError, model: type[BaseModel], data: Mapping[str, Any]) -> list[ConfigProblem]:
    """The problems of `data`, which `model` refused."""
    return [_problem(details, model, data) for details in validation_errors(error)]


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
