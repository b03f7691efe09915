"""`rollouts train CONFIG`: reinforcement learning on the episodes that a configuration file describes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from rollouts.cli.options import SET, changes_of, takes
from rollouts.cli.run.command import (
    DryRun,
    Resume,
    checked_parts,
    exit_on_problems,
    reported,
    resume_command,
)
from rollouts.terminal.interrupts import defer_interrupts
from rollouts.terminal.text import print_line

if TYPE_CHECKING:
    from rollouts.run_config.config_file import ConfigFile
    from rollouts.run_config.sections import TasksSection
    from rollouts.run_config.tasks import TaskSource
    from rollouts.task import Task

#: Tasks of a generator, which are held in memory.
_MOST_LISTED: Final = 10_000


@takes(SET)
def train(
    config: Annotated[Path, typer.Argument(metavar="CONFIG", help="A TOML file; docs/train.md describes its keys.")],
    resume: Resume = False,
    dry_run: DryRun = False,
    **values: Any,
) -> None:
    """Train the model of a configuration file on the rewards of its episodes; write checkpoints and a report."""
    from rollouts.run_config.config_file import read_config

    with exit_on_problems():
        file = read_config(config, changes_of((SET,), values))
        train_from(file, resume_command(), resume=resume, dry_run=dry_run)


def train_from(file: ConfigFile, to_resume: str, *, resume: bool = False, dry_run: bool = False) -> None:
    """Train as a configuration says. Raises `RunConfigError`; exits after Ctrl-C.

    `to_resume` is the command that continues the run.
    """
    from rollouts.evaluation.statistics import scipy_stats
    from rollouts.run_config.output import check_output, prepare_output
    from rollouts.run_config.parts import make_tally
    from rollouts.run_config.sections import AdapterOption

    if (section := file.config.train) is None:
        raise file.error(("train",), "the table is missing; add [train] with steps and groups")
    if not isinstance(file.config.engine, AdapterOption):
        raise file.error(("engine", "kind"), "it takes no weights; train with local, vllm, sglang or fleet")
    if file.config.engine.adapter is not None:
        raise file.error(("engine", "adapter"), "a new adapter is trained; remove the key, or merge it into the model")
    output = check_output(file, resume=resume, trains=True)
    parts = checked_parts(file, limit=None, dry_run=dry_run)
    held_out = _tasks(file, "evaluation", file.config.evaluation.tasks)
    if held_out is not None:
        with defer_interrupts():
            scipy_stats()  # an error now, and not after the first evaluation
        make_tally(file, file.config.evaluation.samples)
    conversations = _conversations(file)
    # Threads of torch that spin between two calls would slow down the rest of the process.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if dry_run:
        from rollouts.cli.run.dry_run import print_first_prompt

        request = print_first_prompt(parts, Console())
        assert request is not None  # of the kinds of engines above
        with defer_interrupts():
            from rollouts.train.plan import print_plan

        with Console(stderr=True).status("loading the model, and measuring a few rows"):
            print_plan(parts, section, output, request, held_out, conversations, Console())
        return
    with defer_interrupts():
        from rollouts.train.loop import Training

    prepare_output(file, resume=resume, trains=True)
    output.checkpoints.mkdir(exist_ok=True)  # what says that it is the directory of a training run
    training = Training(parts, section, output, Console(), held_out, conversations, to_resume)
    reported(training, lambda _: None)
    state, kept = training.state, ["last", "checkpoints", "trajectories.mmr", "training.jsonl"]
    if state.best_step is not None:
        kept = [f"best (step {state.best_step}, held-out reward {state.best_reward:.3f})", "evaluations", *kept]
    print_line(f"in {output.path}: {', '.join(kept)}")


def _tasks(file: ConfigFile, table: str, section: TasksSection | None) -> Iterable[Task] | None:
    """The tasks of a table beside [tasks]. Raises `RunConfigError`."""
    from rollouts.run_config.sections import TasksOfVerifiers
    from rollouts.run_config.tasks import check_tasks, first_tasks, make_tasks

    if section is None:
        return None
    own = replace(file, config=file.config.model_copy(update={"tasks": section}), prefix=(table,))
    if isinstance(section, TasksOfVerifiers):
        raise own.error(("tasks", "kind"), "the taskset has the tasks of [tasks] alone; name a file or an import path")
    tasks = make_tasks(own)
    if isinstance(tasks, Iterator | AsyncIterable):  # each evaluation takes them again
        tasks = asyncio.run(_listed(first_tasks(tasks, _MOST_LISTED + 1)))
        if len(tasks) > _MOST_LISTED:
            reason = f"it gives more than {_MOST_LISTED:,} tasks, and may have no end; give a list or a file"
            raise own.error(("tasks",), reason)
    check_tasks(own, tasks)
    return tasks


async def _listed(tasks: TaskSource) -> list[Task]:
    return [task async for task in tasks] if isinstance(tasks, AsyncIterable) else list(tasks)


def _conversations(file: ConfigFile) -> Sequence[Task] | None:
    if (section := file.config.supervised) is None:
        return None
    tasks = _tasks(file, "supervised", section.tasks)
    found = list(tasks or ())
    for task in found:
        messages = task.data.get("messages") if isinstance(task.data, dict) else None
        messages = messages if isinstance(messages, list) else []
        roles = [one.get("role") if isinstance(one, dict) else None for one in messages]
        if None in roles or "assistant" not in roles:
            reason = f'task {task.task_id:.80} has no "messages", each with a role, and one of the assistant'
            raise file.error(("supervised", "tasks"), f"{reason}; write the conversation that is learned")
    return found
