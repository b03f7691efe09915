"""`rollouts run CONFIG`: the episodes that a configuration file describes."""

from __future__ import annotations

import shlex
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from rollouts.errors import RolloutsError
from rollouts.terminal.table import counted, print_error, print_line, print_warning

if TYPE_CHECKING:
    from rollouts.cli.run.execution import MakeWorkers, RunParts
    from rollouts.cli.run.output import OutputDirectory

#: The time for the report at the end of a run, and after Ctrl-C, where a run must end soon.
REPORT_SECONDS = 30.0
INTERRUPTED_REPORT_SECONDS = 0.5


def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/run.md describes its keys.")],
    resume: Annotated[
        bool, typer.Option("--resume", help="Continue the run in the output directory where it stopped.")
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Check the file and print the first prompt; start no engine, write nothing."),
    ] = False,
    limit: Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N tasks.")] = None,
    workers: Annotated[
        str | None,
        typer.Option(
            "--workers",
            metavar="ADDRESS",
            help="Run the episodes in processes that connect to this address, such as tcp://127.0.0.1:7100 "
            "(rollouts worker); replaces listen of the table [workers].",
        ),
    ] = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the episodes in actors of a Ray cluster, as the table [ray] says.")
    ] = False,
) -> None:
    """Run the episodes of a configuration file; write trajectories, metrics and a summary to its output directory."""
    from rollouts.cli.run.dry_run import print_first_prompt
    from rollouts.cli.run.execution import make_parts, ray_workers_of_run, workers_of_run
    from rollouts.cli.run.output import check_output, prepare_output
    from rollouts.run_config.config_file import RunConfigError, read_config

    if ray and workers is not None:
        print_error("--ray and --workers say two different places for the episodes; use one of them")
        raise typer.Exit(2)
    try:
        parts = make_parts(read_config(config), offline=dry_run)
        count = None if limit is None else min(limit, sys.maxsize)  # islice takes no larger number
        with Console(stderr=True).status("checking the tasks"):
            parts.check_tasks(count)
        if dry_run:
            check_output(parts.file, resume=resume)
            print_first_prompt(parts, Console())
        else:
            make_workers = ray_workers_of_run(parts.file) if ray else workers_of_run(parts.file, workers)
            continuing = _resume_command(parts.file.path, limit, workers, ray)
            _run(parts, prepare_output(parts.file, resume=resume), count, make_workers, continuing)
    except RunConfigError as error:
        for problem in error.problems:
            print_error(problem.text(error.path))
        raise typer.Exit(2) from None


def _resume_command(path: Path, limit: int | None, workers: str | None, ray: bool) -> str:
    """The command that continues a run where it is interrupted, with the options that it was begun with."""
    command = ["rollouts", "run", str(path), "--resume"]
    if limit is not None:
        command += ["--limit", str(limit)]
    if workers is not None:
        command += ["--workers", workers]
    if ray:
        command.append("--ray")
    return shlex.join(command)


def _run(
    parts: RunParts,
    output: OutputDirectory,
    limit: int | None,
    make_workers: MakeWorkers | None,
    resume_command: str,
) -> None:
    """Run, then write and print the summary, also after Ctrl-C and an error of the run."""
    from rollouts.cli.report import write_report_at_the_end
    from rollouts.cli.run.execution import Execution
    from rollouts.cli.run.output import print_summary, read_group_rows, summarise, write_summary
    from rollouts.runner.journal import JournalInUseError, JournalOfAnotherRunError
    from rollouts.terminal.interrupts import exit_interrupted

    console = Console()
    started = time.monotonic()
    execution = Execution(
        parts, output, limit=limit, console=console, make_workers=make_workers, resume_command=resume_command
    )

    def report(*, complete: bool, report_seconds: float = REPORT_SECONDS) -> dict[str, Any]:
        rows = (row.values for row in read_group_rows(output.metrics))
        seconds = time.monotonic() - started
        summary = summarise(rows, complete=complete, process_seconds=seconds, metrics=execution.metrics())
        try:
            write_summary(output.summary, summary)
        except OSError:  # the disk is full, perhaps
            print_summary(summary, console)
            raise
        try:
            print_summary(summary, console)
            print_line(f"in {output.path}: trajectories.mmr, metrics.jsonl, summary.json")
        finally:  # also where nobody reads the output any more
            if parts.file.config.output.report:
                write_report_at_the_end(output.path, renderer=parts.renderer, seconds=report_seconds)
        return summary

    try:
        execution.run()
    except KeyboardInterrupt:
        if execution.has_begun:
            report(complete=False, report_seconds=INTERRUPTED_REPORT_SECONDS)
            print_line(f"interrupted; to continue: {resume_command}")
        else:
            print_line("interrupted before the first episode")
        exit_interrupted()
    except (JournalOfAnotherRunError, JournalInUseError):  # the summary of the other run stays
        raise
    except RolloutsError:
        if execution.has_begun:
            try:
                report(complete=False)
            except (OSError, RolloutsError) as error:  # on a full disk nothing can be written, the summary included
                print_error(f"{output.summary} was not written: {error}")
        raise
    missing = execution.missing_tasks()
    summary = report(complete=not missing)
    if missing:
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        print_warning(
            f"the groups of {counted(len(missing), 'task')} were lost, and the tasks were not run again, because the "
            f"source or --limit leaves them out: {named}"
        )
    if summary["episodes"] and summary["failed"] == summary["episodes"]:
        print_error("every episode failed; the summary has the errors")
        raise typer.Exit(1)
