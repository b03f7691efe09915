"""The errors of configuration files and of files of tasks."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias, TypeVar, cast

from rollouts.errors import RolloutsError

T = TypeVar("T")

#: From the top of the document: names of keys, and numbers of array elements from 0.
KeyPath: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class ConfigProblem:
    """One thing that is wrong in a configuration.

    `origin` is the file, or the option that gave the value; `key` is "tasks.path", or "" for the whole file.
    """

    origin: str
    key: str
    reason: str

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.origin, self.key, self.reason)))


class RunConfigError(RolloutsError, ValueError):
    """A configuration cannot be used. `problems` has an entry for each thing that is wrong.

    Cure: correct the keys that the text lists; `rollouts run --dry-run` checks the file.
    """

    def __init__(self, problems: Sequence[ConfigProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(map(str, problems)))


class ProblemList:
    """Collects the problems of several parts of a configuration, so that all of them are reported at once."""

    def __init__(self) -> None:
        self._problems: list[ConfigProblem] = []

    def attempt(self, make: Callable[[], T]) -> T:
        """What `make` returns. If it raised `RunConfigError`, its problems are kept, and `check` will raise."""
        try:
            return make()
        except RunConfigError as error:
            self.add(error)
            return cast(T, None)

    def add(self, error: RunConfigError) -> None:
        self._problems.extend(error.problems)

    def check(self) -> None:
        """Raises `RunConfigError` with all problems if there is one."""
        if self._problems:
            raise RunConfigError(list(dict.fromkeys(self._problems)))


class TaskFileError(RolloutsError, ValueError):
    """A file of tasks cannot be read. `place` is that of a row, such as "line 3"; "" for the whole file.

    Cure: correct the line or row that the text names.
    """

    def __init__(self, path: Path, place: str, reason: str) -> None:
        super().__init__(f"{path}{', ' * bool(place)}{place}: {reason}")


def key_text(path: KeyPath) -> str:
    """A path as it is written in errors: `tasks.path`, `engine.completions[2]`."""
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f"{'.' * bool(text)}{part}"
    return text
