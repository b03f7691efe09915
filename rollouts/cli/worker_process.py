"""The worker of a process: made of a configuration file, or by a function."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Any, Self

from rollouts.errors import ArgumentError, describe_exception
from rollouts.run_config.config_file import read_config
from rollouts.run_config.engines import connect as connect_engine
from rollouts.run_config.parts import make_worker_parts, worker_configuration
from rollouts.workers.episode_worker import EpisodeWorker
from rollouts.workers.link import run_link_worker
from transport.link import ClientKeys


@dataclass(frozen=True, slots=True)
class WorkerProcess:
    """What runs in the process of a worker. `open` makes the worker, and closes it at the end of its context."""

    open: Callable[[], AbstractAsyncContextManager[EpisodeWorker]]
    configuration: str = ""

    @classmethod
    def of(cls, source: str, slots: int | None) -> Self:
        """The worker of a configuration file, or of "module:function".

        Raises `RunConfigError`, `ArgumentError`, `MissingExtraError`, and `OSError` for a file that cannot be read.
        """
        path = Path(source)
        if path.suffix == ".toml" or path.exists():
            return cls._of_file(path, slots)
        if slots is not None:
            raise ArgumentError("--slots", slots, f"{source} makes the worker; pass slots= to its EpisodeWorker")
        return cls._of_function(source)

    @classmethod
    def _of_file(cls, path: Path, slots: int | None) -> Self:
        file = read_config(path)
        parts = make_worker_parts(file)

        @asynccontextmanager
        async def opened() -> AsyncIterator[EpisodeWorker]:
            engine = parts.make_engine()
            try:
                await connect_engine(file, engine)
                number = slots or file.config.concurrency
                worker = EpisodeWorker(parts.make_environment, engine, parts.renderer, slots=number)
                try:
                    yield worker
                finally:
                    await worker.close()
            finally:
                await engine.close()

        return cls(opened, worker_configuration(file))

    @classmethod
    def _of_function(cls, import_path: str) -> Self:
        function = _imported_function(import_path)

        @asynccontextmanager
        async def opened() -> AsyncIterator[EpisodeWorker]:
            made: Any = function()
            worker = await made if inspect.isawaitable(made) else made
            if not isinstance(worker, EpisodeWorker):
                raise ArgumentError(import_path, worker, "return an EpisodeWorker(make_environment, engine, renderer)")
            try:
                yield worker
            finally:
                await worker.close()

        return cls(opened)

    async def run(self, address: str, *, keys: ClientKeys | None, name: str | None, wait: float) -> None:
        """Run jobs until the run has ended. Raises as `run_link_worker`."""
        async with self.open() as worker:
            await run_link_worker(
                worker, address, keys=keys, name=name, wait_seconds=wait, configuration=self.configuration
            )


def _imported_function(import_path: str) -> Callable[[], object]:
    """The function of "module:function"; modules of the working directory can be imported. Raises `ArgumentError`."""
    module_name, colon, name = import_path.partition(":")
    if not (module_name and colon and name):
        raise ArgumentError("CONFIG", import_path, "there is no such file; write a path, or module:function")
    sys.path.insert(0, str(Path.cwd()))
    try:
        found = reduce(getattr, name.split("."), importlib.import_module(module_name))
    except (Exception, SystemExit) as error:
        # A module of a user may raise anything, and call sys.exit.
        raise ArgumentError("CONFIG", import_path, f"importing it raised {describe_exception(error)}") from error
    if not callable(found):
        raise ArgumentError("CONFIG", import_path, f"it is a {type(found).__name__}; name a function")
    function: Callable[[], object] = found
    return function
