"""`rollouts run CONFIG`: the episodes that a configuration file describes."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeAlias

import typer
from rich.console import Console

from rollouts.cli.options import SET, changes_of, takes
from rollouts.errors import RolloutsError
from rollouts.terminal.text import counted, exit_with_error, print_error, print_line, print_warning

if TYPE_CHECKING:
    from rollouts.cli.run.execution import Execution, MakeWorkers
    from rollouts.run_config.config_file import ConfigFile
    from rollouts.run_config.output import OutputDirectory
    from rollouts.run_config.run_parts import RunParts
    from rollouts.train.loop import Training

#: The time for the report at the end of a run, and after Ctrl-C, where a run must end soon.
REPORT_SECONDS = 30.0
INTERRUPTED_REPORT_SECONDS = 0.5


Limit: TypeAlias = Annotated[int | None, typer.Option(min=1, metavar="N", help="Only the first N tasks.")]
Resume: TypeAlias = Annotated[
    bool, typer.Option("--resume", help="Continue in the output directory where the run stopped.")
]
RerunFailed: TypeAlias = Annotated[
    bool, typer.Option("--rerun-failed", help="With --resume: also run the tasks again that have failed episodes.")
]
DryRun: TypeAlias = Annotated[
    bool,
    typer.Option("--dry-run", help="Check everything and print the first prompt; start no engine, write nothing."),
]


@takes(SET)
def run(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/run.md describes its keys.")],
    resume: Resume = False,
    rerun_failed: RerunFailed = False,
    dry_run: DryRun = False,
    limit: Limit = None,
    ray: Annotated[
        bool, typer.Option("--ray", help="Run the episodes in actors of a Ray cluster, as the table [ray] says.")
    ] = False,
    **values: Any,
) -> None:
    """Run the episodes of a configuration file; write trajectories, metrics and a summary to its output directory."""
    from rollouts.cli.run.ray_workers import ray_workers_of_run
    from rollouts.cli.run.summary import print_summary
    from rollouts.run_config.config_file import read_config
    from rollouts.run_config.output import prepare_output

    check_rerun(rerun_failed, resume=resume, limit=limit)
    with exit_on_problems():
        file = read_config(config, changes_of((SET,), values))
        parts = checked_parts(file, limit=limit, dry_run=dry_run)
        if dry_run:
            end_dry_run(parts, resume=resume)
            return
        make_workers = ray_workers_of_run(parts.file) if ray else None
        output = prepare_output(parts.file, resume=resume)

        def show(summary: Mapping[str, Any]) -> None:
            print_summary(summary, Console())
            print_line(f"in {output.path}: trajectories.mmr, metrics.jsonl, summary.json")

        run_and_report(parts, output, limit, make_workers, show, rerun_failed=rerun_failed)


def check_rerun(rerun_failed: bool, *, resume: bool, limit: int | None) -> None:
    if rerun_failed and not resume:
        exit_with_error("--rerun-failed: it is for a run that is continued; pass --resume, too")
    if rerun_failed and limit is not None:
        exit_with_error("--rerun-failed: with --limit, groups would leave the files and not run again; leave it out")


@contextmanager
def exit_on_problems() -> Iterator[None]:
    """End the command with the problems of a configuration, a line each, if the block finds any."""
    from rollouts.run_config.errors import RunConfigError

    try:
        yield
    except RunConfigError as error:
        for problem in error.problems:
            print_error(str(problem))
        raise typer.Exit(2) from None


def checked_parts(file: ConfigFile, *, limit: int | None, dry_run: bool) -> RunParts:
    """The parts, after a check of the tasks. Raises `RunConfigError` and `TaskFileError`."""
    from rollouts.run_config.run_parts import make_parts
    from rollouts.run_config.tasks import check_tasks

    parts = make_parts(file, offline=dry_run)
    with Console(stderr=True).status("checking the tasks"):
        check_tasks(file, parts.tasks, limit)
    return parts


def end_dry_run(parts: RunParts, *, resume: bool) -> None:
    """Check the output directory, and print the first prompt."""
    from rollouts.cli.run.dry_run import print_first_prompt
    from rollouts.run_config.output import check_output

    check_output(parts.file, resume=resume)
    print_first_prompt(parts, Console())


def resume_command() -> str:
    """The command that continues this one where it is interrupted."""
    options = [option for option in sys.argv[1:] if option not in ("--resume", "--rerun-failed")]
    return shlex.join(["rollouts", *options, "--resume"])


def run_and_report(
    parts: RunParts,
    output: OutputDirectory,
    limit: int | None,
    make_workers: MakeWorkers | None,
    show: Callable[[Mapping[str, Any]], None],
    *,
    rerun_failed: bool,
) -> None:
    """Run the tasks as `reported` says. Exits with an error where every episode has failed."""
    from rollouts.cli.run.execution import Execution

    execution = Execution(
        parts,
        output,
        limit=limit,
        console=Console(),
        make_workers=make_workers,
        resume_command=resume_command(),
        rerun_failed=rerun_failed,
    )
    summary = reported(execution, show)
    missing = execution.missing
    if missing:
        named = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
        print_warning(
            f"the groups of {counted(len(missing), 'task')} were lost, and the tasks were not run again, because the "
            f"source or --limit leaves them out: {named}"
        )
    if summary["episodes"] and summary["failed"] == summary["episodes"]:
        print_error("every episode failed; the summary has the errors")
        raise typer.Exit(1)


def reported(run: Execution | Training, show: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Run, then write the summary, `show` it and write the report, also after Ctrl-C and an error. Returns the summary.

    A run that has not begun, because its engine cannot be used, for example, leaves those of before.
    """
    from rollouts.cli.report import write_report_at_the_end
    from rollouts.cli.run.summary import summarise
    from rollouts.files import replaced_file
    from rollouts.run_config.group_files import read_group_rows
    from rollouts.runner.errors import JournalOfAnotherRunError
    from rollouts.terminal.interrupts import exit_interrupted

    started = time.monotonic()
    output, parts = run.output, run.parts

    def report(*, complete: bool, seconds: float = REPORT_SECONDS) -> dict[str, Any]:
        rows = (row.values for row in read_group_rows(output.metrics))
        metrics = {} if run.metrics is None else dict(run.metrics.metrics())
        summary = summarise(rows, complete=complete, process_seconds=time.monotonic() - started, metrics=metrics)
        summary["configuration"] = parts.description()
        try:
            with replaced_file(output.summary) as file:
                file.write((json.dumps(summary, indent=2) + "\n").encode())
        except OSError:  # the disk is full, perhaps
            show(summary)
            raise
        try:
            show(summary)
        finally:  # also where nobody reads the output any more
            if parts.file.config.output.report:
                write_report_at_the_end(output.path, renderer=parts.renderer, seconds=seconds)
        return summary

    try:
        run.run()
    except KeyboardInterrupt:
        if run.metrics is not None:
            report(complete=False, seconds=INTERRUPTED_REPORT_SECONDS)
        print_line(f"interrupted; to continue: {run.resume_command}")
        exit_interrupted()
    except JournalOfAnotherRunError:  # the summary of the other run stays
        raise
    except (OSError, RolloutsError):
        if run.metrics is not None:
            try:
                report(complete=False)
            except (OSError, RolloutsError) as error:  # on a full disk nothing can be written, the summary included
                print_error(f"{output.summary} was not written: {error}")
        raise
    return report(complete=not run.missing)
