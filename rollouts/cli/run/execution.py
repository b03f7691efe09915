"""Runs the groups of a configuration and writes them to its output directory."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

from rich.console import Console

from rollouts.cli.run.group_files import GroupFiles
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.cli.run.parts import RunParts
from rollouts.engines.protocol import Engine
from rollouts.observability import EngineMonitor, ProgressDisplay, RendererStats, RunMetrics, WaitWatcher
from rollouts.run_config.engines import connect
from rollouts.run_config.tasks import TaskSource, first_tasks
from rollouts.runner.journal import Journal
from rollouts.runner.runner import Runner
from rollouts.terminal.interrupt_deadline import run_with_deadline

#: A run that is interrupted has ended after this time, also if a method of an environment does not return.
_INTERRUPT_SECONDS = 4.0

#: An episode that waits longer for one thing is logged.
_LONG_WAIT_SECONDS = 120.0


class Execution:
    """The run of this process: all tasks, or the first `limit`. `metrics` are those of the runner so far."""

    def __init__(self, parts: RunParts, output: OutputDirectory, *, limit: int | None, console: Console) -> None:
        self._parts = parts
        self._output = output
        self._limit = limit
        self._console = console
        self._metrics: RunMetrics | None = None

    def run(self) -> None:
        """Run, and write every group as it finishes. Called once, in the main thread.

        Raises `RunConfigError` if the engine cannot be used, `JournalError`, and `KeyboardInterrupt` after Ctrl-C.
        """
        engine = self._parts.make_engine()
        message = f"interrupted, and stopped at once; to continue: rollouts run {self._parts.file.path} --resume"
        run_with_deadline(self._run(engine), _INTERRUPT_SECONDS, message)

    @property
    def has_begun(self) -> bool:
        """Whether the journal is open, so that the run can be continued."""
        return self._metrics is not None

    def metrics(self) -> dict[str, float]:
        """The metrics of the runner by name (`rollouts.observability.METRICS`); empty before it began."""
        return {} if self._metrics is None else dict(self._metrics.metrics())

    async def _run(self, engine: Engine) -> None:
        parts, limit = self._parts, self._limit
        try:
            await connect(parts.file, engine)
            tasks = parts.tasks if limit is None else first_tasks(parts.tasks, limit)
            journal = Journal.open(self._output.journal, configuration=parts.journal_configuration())
            async with AsyncExitStack() as opened, EngineMonitor(engine) as monitor:
                opened.push_async_callback(journal.close)  # the runner closes it, if it comes to that
                self._metrics = metrics = RunMetrics(sources=[monitor, RendererStats(parts.renderer)])
                waits = WaitWatcher(threshold_seconds=_LONG_WAIT_SECONDS)
                runner = parts.make_runner(engine, journal=journal, listeners=[metrics, waits])
                progress = ProgressDisplay(metrics, total_groups=limit, console=self._console)
                with GroupFiles(self._output) as files, waits, progress:
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
