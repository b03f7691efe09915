"""What to do about an error of an episode: the cure in the docstring of its class."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from renderers.errors import RendererError
from rollouts.episodes.errors import EpisodeError  # and with it the errors of episodes, which are found by their root
from rollouts.errors import RolloutsError
from transport import TransportError

_OTHER: Final = "The text of the error and the episode show the cause."
_ROOTS: Final = (EpisodeError, RolloutsError, RendererError, TransportError)


def cure_of(kind: str) -> str:
    """The cure for errors of the class `kind`; a general sentence for a class of another package."""
    for error_class in (found for root in _ROOTS for found in _descendants(root)):
        _, mark, cure = (error_class.__doc__ or "").rpartition("Cure:")
        if error_class.__name__ == kind and mark:
            return " ".join(cure.split())
    return _OTHER


def _descendants(error_class: type[Exception]) -> Iterator[type[Exception]]:
    yield error_class
    for child in error_class.__subclasses__():
        yield from _descendants(child)
