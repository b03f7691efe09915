"""Every error of the three packages crosses process boundaries: pickled or copied, it keeps its fields and its text."""

import copy
import dataclasses
import inspect
import pickle
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
from error_classes import error_classes

from rollouts import Trajectory
from rollouts.errors import ContextLengthError
from transport.errors import DecodeError


def argument(annotation: Any, name: str) -> Any:
    """A value of the annotated type; texts and numbers differ from parameter to parameter."""
    origin, parameters = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        return argument(parameters[0], name)
    if origin is typing.Literal:
        return parameters[0]
    if origin is tuple and parameters[-1] is not ...:
        return tuple(argument(each, name) for each in parameters)
    if origin in (tuple, list, Iterable, Sequence):
        return tuple(argument(parameters[0], f"{name}{index}") for index in range(2))
    if origin in (dict, Mapping):
        return {argument(parameters[0], name): argument(parameters[1], name)}
    plain: dict[Any, Callable[[], Any]] = {
        str: lambda: f"the {name}",
        int: lambda: len(name),
        float: lambda: len(name) / 4,
        bool: lambda: True,
        object: lambda: {name: [1, 2.5]},
        Path: lambda: Path(name),
        Trajectory: lambda: Trajectory(name),
        BaseException: lambda: ValueError(name),
        Exception: lambda: ValueError(name),
    }
    if annotation in plain:
        return plain[annotation]()
    if isinstance(annotation, type) and issubclass(annotation, Exception):
        return an_error(annotation)
    if dataclasses.is_dataclass(annotation):
        hints = typing.get_type_hints(annotation)
        return annotation(
            **{field.name: argument(hints[field.name], field.name) for field in dataclasses.fields(annotation)}
        )
    raise AssertionError(f"give `argument` a value for {annotation}")


def an_error(error_class: type[Exception]) -> Exception:
    constructor = error_class.__init__
    if not isinstance(constructor, types.FunctionType):
        return error_class("a text")
    hints = typing.get_type_hints(constructor)
    positional, named = [], {}
    for name, parameter in list(inspect.signature(constructor).parameters.items())[1:]:
        value = argument(hints[name], name)
        if parameter.kind is parameter.KEYWORD_ONLY:
            named[name] = value
        else:
            positional.append(value)
    return error_class(*positional, **named)


def content(value: Any) -> Any:
    """A value that can be compared: an error as its class, text, arguments and fields."""
    if isinstance(value, BaseException):
        return type(value), str(value), value.args, content(vars(value))
    if isinstance(value, dict):
        return {key: content(each) for key, each in value.items()}
    if type(value) in (list, tuple):
        return [content(each) for each in value]
    return value.episode_id if isinstance(value, Trajectory) else value


COPIES: dict[str, Callable[[Any], Any]] = {
    **{
        f"pickle protocol {protocol}": lambda error, protocol=protocol: pickle.loads(pickle.dumps(error, protocol))
        for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1)  # older ones know no `__slots__`
    },
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
}


@pytest.mark.parametrize("error_class", error_classes(), ids=lambda each: f"{each.__module__}.{each.__name__}")
def test_an_error_keeps_its_class_text_and_fields(error_class: type[Exception]) -> None:
    error = an_error(error_class)
    error.add_note("a note")
    for name, copied in COPIES.items():
        result = copied(error)
        assert result is not error
        assert content(result) == content(error), name


def test_the_walk_finds_the_errors_of_all_packages() -> None:
    found = error_classes()
    assert len(found) > 60
    assert {each.__module__ for each in found} >= {
        "renderers.errors",
        "renderers.parsing.json_text",
        "transport.errors",
        "rollouts.errors",
        "rollouts.episodes.errors",
    }


def test_a_subclass_of_a_user_keeps_its_fields_too() -> None:
    error = copy.copy(NamedError(name="a", count=3))
    assert (error.name, error.count, str(error)) == ("a", 3, "3 of a")
    assert vars(pickle.loads(pickle.dumps(error))) == vars(error)


class NamedError(DecodeError):
    def __init__(self, *, name: str, count: int) -> None:
        self.name = name
        self.count = count
        super().__init__(f"{count} of {name}")


def raise_in_child() -> None:
    raise ContextLengthError("r-1", prompt_tokens=9, limit=8)


@pytest.mark.slow
def test_an_error_raised_in_another_process_arrives_with_its_fields() -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool, pytest.raises(ContextLengthError) as caught:
        pool.submit(raise_in_child).result(timeout=60)
    assert (caught.value.request_id, caught.value.prompt_tokens, caught.value.limit) == ("r-1", 9, 8)
