"""`rollouts worker --connect ADDRESS CONFIG`, a process that runs the episodes of a run elsewhere; `rollouts keys`."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated, Final

import typer

from rollouts.terminal.interrupts import PrintableFormatter
from rollouts.terminal.table import print_error, print_line

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
    from rollouts.cli.worker_process import WorkerProcess
    from rollouts.run_config.config_file import RunConfigError
    from rollouts.terminal.interrupts import exit_interrupted, run_with_deadline
    from rollouts.workers.link import OrchestratorLostError, read_worker_keys

    handler = logging.StreamHandler()
    handler.setFormatter(PrintableFormatter("%(asctime)s %(message)s"))
    logging.basicConfig(handlers=[handler], level=logging.WARNING)
    logging.getLogger("rollouts.workers").setLevel(logging.INFO)
    try:
        worker_keys = None if key_file is None else read_worker_keys(key_file)
        process = WorkerProcess.of(source, slots)
        message = "interrupted, and stopped at once"
        run_with_deadline(process.run(connect, keys=worker_keys, name=name, wait=wait), _INTERRUPT_SECONDS, message)
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


def keys(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Where the two files are written.")],
) -> None:
    """Make keys for `rollouts run --workers` and `rollouts worker`: a file for the run, and one for its workers."""
    from rollouts.workers.link.keys import write_key_files

    orchestrator, worker_file = write_key_files(directory)
    print_line(f'{orchestrator}: for the run; key_file = "..." in the table [workers]')
    print_line(f"{worker_file}: for each machine with workers; rollouts worker --key-file")
