"""Runs the groups of a configuration and writes them to its output directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from rich.console import Console

from rollouts.cli.run.group_files import GroupFiles
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.cli.run.parts import RunParts
from rollouts.engines.protocol import Engine
from rollouts.observability import EngineMonitor, ProgressDisplay, RendererStats, RunMetrics
from rollouts.run_config.engines import connect
from rollouts.run_config.tasks import TaskSource, first_tasks
from rollouts.runner.journal import Journal
from rollouts.runner.runner import Runner
from rollouts.terminal.interrupt_deadline import run_with_deadline

#: A run that is interrupted has ended after this time, also if a method of an environment does not return.
_INTERRUPT_SECONDS = 4.0


def execute(parts: RunParts, output: OutputDirectory, *, limit: int | None, console: Console) -> None:
    """Run all tasks, or the first `limit`, and write every group.

    Raises `RunConfigError` if the engine cannot be used, `JournalOfAnotherRunError`, and `KeyboardInterrupt` after
    Ctrl-C.
    """
    engine = parts.make_engine()
    message = f"interrupted, and stopped at once; to continue: rollouts run {parts.file.path} --resume"
    run_with_deadline(_run(parts, engine, output, limit, console), _INTERRUPT_SECONDS, message)


async def _run(parts: RunParts, engine: Engine, output: OutputDirectory, limit: int | None, console: Console) -> None:
    try:
        await connect(parts.file, engine)
        tasks = parts.tasks if limit is None else first_tasks(parts.tasks, limit)
        journal = Journal.open(output.journal, configuration=parts.journal_configuration())
        async with EngineMonitor(engine) as monitor:
            metrics = RunMetrics(sources=[monitor, RendererStats(parts.renderer)])
            runner = parts.make_runner(engine, journal=journal, listeners=[metrics])
            with GroupFiles(output) as files, ProgressDisplay(metrics, total_groups=limit, console=console):
                async with runner:
                    await _write_groups(runner, tasks, files)
    finally:
        await engine.close()


async def _write_groups(runner: Runner, tasks: TaskSource, files: GroupFiles) -> None:
    """Write the groups as they finish. A group counts as delivered when it has been written."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="group-files") as thread:
        async for group in runner.stream(tasks):
            await loop.run_in_executor(thread, files.write, group)
