"""Servers of MCP: how each is reached, and the process of one that is started here."""

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rollouts.errors import ArgumentError


@dataclass(frozen=True, slots=True)
class StdioServer:
    """A server that is started as a process and spoken to over its standard input and output.

    `command` is a program, found in this process's PATH; `args` are its arguments; `cwd` is its working
    directory. `env` is its whole environment: the process receives no other variable of this one, neither
    PATH nor HOME. A program that starts others needs `env={"PATH": os.environ["PATH"]}`. Not on Windows.
    Raises `ArgumentError`.
    """

    command: str
    args: Sequence[str] = ()
    env: Mapping[str, str] = field(default_factory=dict, repr=False)  # the values may be secret
    cwd: str | Path | None = None

    def __post_init__(self) -> None:
        if isinstance(self.args, str) or not all(isinstance(arg, str) for arg in self.args):
            raise ArgumentError("args", self.args, "pass a list of texts, one for each argument")
        texts = isinstance(self.env, Mapping) and all(
            isinstance(text, str) for pair in self.env.items() for text in pair
        )
        if not texts:
            names = list(self.env) if isinstance(self.env, Mapping) else self.env  # not the values: they may be secret
            raise ArgumentError("env", names, "pass a mapping from names to texts")


@dataclass(frozen=True, slots=True)
class HttpServer:
    """A server that is reached over HTTP (the transport "streamable HTTP"). `headers` are sent with every request."""

    url: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)


def process_arguments(server: StdioServer, inherited: Sequence[str]) -> tuple[str, list[str]]:
    """The program to start, and its arguments, so that the process has no variables but those of `server.env`.

    `inherited` are the variables that the client of MCP passes on from this process; `env -u` removes them
    again. Raises `FileNotFoundError` if the program, or `env`, is not found.
    """
    program = _found(server.command)
    removed = [name for name in inherited if name in os.environ and name not in server.env]
    if not removed:
        return program, list(server.args)
    unset = [argument for name in removed for argument in ("-u", name)]
    return _found("env"), [*unset, program, *server.args]


def _found(command: str) -> str:
    program = shutil.which(command)
    if program is None:
        raise FileNotFoundError(f"there is no program {command!r} that can be run; pass its path")
    return os.path.abspath(program)
