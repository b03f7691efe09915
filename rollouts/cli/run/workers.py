"""The workers of a run: processes that connect to an address."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager

from rollouts.cli.run.execution import MakeWorkers
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.sections import WorkersSection
from rollouts.run_config.workers import worker_configuration
from rollouts.terminal.text import print_line
from rollouts.workers.protocol import Workers


def workers_of_run(file: ConfigFile, address: str | None) -> MakeWorkers | None:
    """What makes the workers of a configuration; `address` replaces the one of the file. None for a run without them.

    Raises `RunConfigError` for keys that cannot be read, and `MissingExtraError`. The function binds the address, and
    raises `RunConfigError` if that is not possible.
    """
    section = file.config.workers
    if section is None:
        if address is None:
            return None
        section = WorkersSection(listen=address)
    listen = address or section.listen
    from rollouts.workers.link import LinkWorkers, read_orchestrator_keys

    keys = None
    if section.key_file is not None:
        with file.naming("workers", "key_file"):
            keys = read_orchestrator_keys(file.resolve(section.key_file))

    def make() -> AbstractAsyncContextManager[Workers]:
        with file.naming("workers", "listen"):
            workers = LinkWorkers(
                listen,
                keys=keys,
                allow_remote=section.allow_remote,
                configuration=worker_configuration(file),
                max_losses=section.max_losses,
            )
        print_line(f"workers connect with: rollouts worker --connect {workers.address} {file.path}")
        return workers

    return make
