"""Importing the module that defines a trainer's types."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import Any

from rollouts.training.adapters.errors import MissingTrainerError


def trainer_module(name: str, given: ModuleType | None = None) -> Any:
    """`given`, or else the module `name`. Raises `MissingTrainerError` where it cannot be imported."""
    if given is not None:
        return given
    try:
        return import_module(name)
    except ImportError as error:
        raise MissingTrainerError(name, str(error)) from error
