"""The page of all errors, made of the docstrings of their classes: when each is raised, and its cure."""

import inspect
from collections.abc import Sequence
from itertools import groupby

from error_classes import error_classes

from rollouts.errors import EngineError

PAGE = "reference/errors.md"
CURE = "Cure: "
_TITLE = "# Errors and their cures\n"
_INTRODUCTION = """
The text of an error has the value that was wrong, its place, and what to do. This page has the cure of each class, and
when it is raised. Each class derives from the root of its package: `renderers` from
[`RendererError`](#RendererError), `transport` from [`TransportError`](#TransportError), `rollouts` from
[`RolloutsError`](#RolloutsError). Errors keep their fields when they are copied or sent to another process.

`rollouts doctor URL --model DIR` checks a server and has a cure for each thing that it finds
([`rollouts doctor`](commands.md#rollouts-doctor)).
"""


def error_page() -> str:
    """The page in Markdown. The anchor of a class is its name."""
    classes = error_classes()
    parts = [_TITLE, _INTRODUCTION]
    for module, of_module in groupby(classes, key=lambda each: each.__module__):
        parts.append(f"\n## {module}\n")
        parts += [_entry(each, classes) for each in of_module]
    return "\n".join(parts)


def when_and_cure(error_class: type[Exception]) -> tuple[str, str]:
    """The two parts of the docstring. The cure is the last paragraph, after `Cure: `; empty where there is none."""
    text = inspect.cleandoc(error_class.__dict__.get("__doc__") or "")
    when, found, cure = text.rpartition(CURE)
    return (when.strip(), cure) if found else (text, "")


def _entry(error_class: type[Exception], classes: Sequence[type[Exception]]) -> str:
    when, cure = when_and_cure(error_class)
    bases = ", ".join(_base(each, classes) for each in error_class.__bases__ if issubclass(each, Exception))
    doctor = " [`rollouts doctor`](commands.md#rollouts-doctor) checks the server."
    more = doctor if issubclass(error_class, EngineError) and "rollouts doctor" not in cure else ""
    return (
        f"\n### `{error_class.__name__}` {{ #{error_class.__name__} }}\n\n"
        f"Is a {bases}. {when}\n\n"
        f"**Cure:** {cure[:1].upper()}{cure[1:]}{more}\n"
    )


def _base(base: type[Exception], classes: Sequence[type[Exception]]) -> str:
    return f"[`{base.__name__}`](#{base.__name__})" if base in classes else f"`{base.__name__}`"
