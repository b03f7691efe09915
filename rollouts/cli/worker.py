"""The worker of a process: made of a configuration file, or by a function."""

from __future__ import annotations

import importlib
import inspect
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import reduce
from pathlib import Path
from typing import Annotated, Any, Final, Self

import typer

from rollouts.errors import ArgumentError, describe_exception
from rollouts.run_config.config_file import read_config
from rollouts.run_config.engines import connect as connect_engine
from rollouts.run_config.parts import make_worker_parts, worker_configuration
from rollouts.terminal.interrupts import PrintableFormatter
from rollouts.terminal.table import print_error, print_line
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


# `rollouts keys DIRECTORY`: the keys with which workers and their orchestrator know each other.


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the two files are written.")],
) -> None:
    """Make keys for `rollouts run --workers` and `rollouts worker`: a file for the run, and one for its workers."""
    from rollouts.workers.link.keys import write_key_files

    orchestrator, worker = write_key_files(directory)
    print_line(f'{orchestrator}: for the run; key_file = "..." in the table [workers]')
    print_line(f"{worker}: for each machine with workers; rollouts worker --key-file")


# `rollouts worker --connect ADDRESS CONFIG`: a process that runs the episodes of a run elsewhere.


#: No orchestrator for as long as `--wait` says.
_NO_ORCHESTRATOR: Final = 3
#: A worker that is interrupted has ended after this time, also if a method of an environment does not return.
_INTERRUPT_SECONDS: Final = 4.0


def worker(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG",
            help="The file of the run, or module:function, which is called and returns an EpisodeWorker.",
        ),
    ],
    connect: Annotated[
        str, typer.Option("--connect", metavar="ADDRESS", help="The address of the run, such as tcp://127.0.0.1:7100.")
    ],
    key_file: Annotated[
        Path | None, typer.Option("--key-file", metavar="FILE", help="The worker's keys, made by `rollouts keys`.")
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Episodes at once; by default the concurrency of the file."),
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The name in logs; by default host and process id.")
    ] = None,
    wait: Annotated[
        float, typer.Option(min=0.0, metavar="SECONDS", help="How long to wait for a run, and for one that is lost.")
    ] = 300.0,
) -> None:
    """Run episodes of `rollouts run --workers` in this process, until the run has ended.

    Exits with 0 after the run has ended, with 3 if there is no run at the address for the time of --wait, with 2 if the
    run refuses this worker.
    """
    from rollouts.run_config.config_file import RunConfigError
    from rollouts.terminal.interrupts import exit_interrupted, run_with_deadline
    from rollouts.workers.link import OrchestratorLostError, read_worker_keys

    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("rollouts.workers").setLevel(logging.INFO)
    try:
        keys = None if key_file is None else read_worker_keys(key_file)
        process = WorkerProcess.of(source, slots)
        message = "interrupted, and stopped at once"
        run_with_deadline(process.run(connect, keys=keys, name=name, wait=wait), _INTERRUPT_SECONDS, message)
    except KeyboardInterrupt:
        print_error("interrupted; the episodes of this worker run again on others")
        exit_interrupted()
    except OrchestratorLostError as error:
        print_error(str(error))
        raise typer.Exit(_NO_ORCHESTRATOR) from None
    except RunConfigError as error:
        for problem in error.problems:
            print_error(problem.text(error.path))
        raise typer.Exit(2) from None
