"""Runs the groups of a configuration and writes them to its output directory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from typing import TypeAlias

from rich.console import Console

from rollouts.cli.run.group_files import GroupFiles
from rollouts.cli.run.output_directory import OutputDirectory
from rollouts.cli.run.parts import RunParts
from rollouts.cli.run.stored_groups import StoredGroups
from rollouts.engines.protocol import Engine
from rollouts.observability import (
    EngineMonitor,
    JsonLinesSink,
    MetricHistory,
    MetricSink,
    ProgressDisplay,
    RendererStats,
    RunMetrics,
    TensorBoardSink,
    WaitWatcher,
    WandbSink,
)
from rollouts.observability.metric_sinks import last_step
from rollouts.observability.run_metrics import Source
from rollouts.run_config.engines import connect
from rollouts.run_config.tasks import TaskSource, first_tasks
from rollouts.runner.journal import Journal
from rollouts.runner.runner import Runner
from rollouts.task import Task
from rollouts.terminal.interrupt_deadline import run_with_deadline
from rollouts.terminal.text import counted, print_note
from rollouts.workers.protocol import Workers

#: Returns the context in which workers run the episodes of a run.
MakeWorkers: TypeAlias = Callable[[], AbstractAsyncContextManager[Workers]]

#: A run that is interrupted has ended after this time, also if a method of an environment does not return.
_INTERRUPT_SECONDS = 4.0

#: An episode that waits longer for one thing is logged.
_LONG_WAIT_SECONDS = 120.0


class Execution:
    """The run of this process: all tasks, or the first `limit`. `metrics` are those of the runner so far.

    `make_workers` returns the context of the workers that run its episodes; None: they run in this process.
    """

    def __init__(
        self,
        parts: RunParts,
        output: OutputDirectory,
        *,
        limit: int | None,
        console: Console,
        resume_command: str,
        make_workers: MakeWorkers | None = None,
    ) -> None:
        self._parts = parts
        self._output = output
        self._limit = limit
        self._console = console
        self._resume_command = resume_command
        self._make_workers = make_workers
        self._metrics: RunMetrics | None = None
        self._journal: Journal | None = None

    def run(self) -> None:
        """Run, and write every group as it finishes. Called once, in the main thread.

        Raises `RunConfigError` if the engine cannot be used, `JournalError`, and `KeyboardInterrupt` after Ctrl-C.
        """
        engine = self._parts.make_engine() if self._make_workers is None else None
        message = f"interrupted, and stopped at once; to continue: {self._resume_command}"
        run_with_deadline(self._run(engine), _INTERRUPT_SECONDS, message)

    @property
    def has_begun(self) -> bool:
        """Whether the journal is open, so that the run can be continued."""
        return self._metrics is not None

    def metrics(self) -> dict[str, float]:
        """The metrics of the runner by name (`rollouts.observability.METRICS`); empty before it began."""
        return {} if self._metrics is None else dict(self._metrics.metrics())

    def missing_tasks(self) -> list[str]:
        """Tasks whose groups an earlier process wrote, the files have lost, and this process has not written again."""
        return [] if self._journal is None else sorted(self._journal.lost)

    async def _run(self, engine: Engine | None) -> None:
        async with AsyncExitStack() as opened:
            sources: list[Source] = []
            if engine is not None:
                opened.push_async_callback(engine.close)
                await connect(self._parts.file, engine)
                sources = [await opened.enter_async_context(EngineMonitor(engine)), RendererStats(self._parts.renderer)]
                await self._run_at(engine, sources)
            elif self._make_workers is not None:
                workers = await opened.enter_async_context(self._make_workers())
                await self._run_at(workers, [workers.metrics])

    async def _run_at(self, place: Engine | Workers, sources: list[Source]) -> None:
        parts, limit = self._parts, self._limit
        tasks = parts.tasks if limit is None else first_tasks(parts.tasks, limit)
        journal = Journal.open(self._output.journal, configuration=parts.journal_configuration())
        async with AsyncExitStack() as opened:
            opened.push_async_callback(journal.close)  # the runner closes it, if it comes to that
            with self._console.status("reading the groups that are written"):  # 10,000 take some seconds
                stored = await asyncio.to_thread(StoredGroups, self._output)
            journal.count_as_delivered(stored.task_ids, lost=stored.without_record)
            self._journal = journal
            sinks = self._sinks()
            self._metrics = metrics = RunMetrics(sources=sources)
            waits = WaitWatcher(threshold_seconds=_LONG_WAIT_SECONDS)
            runner = parts.make_runner(place, journal=journal, listeners=[metrics, waits])
            progress = ProgressDisplay(metrics, total_groups=limit, console=self._console)
            history = MetricHistory(metrics, sinks, first_step=last_step(self._output.runner_metrics))
            with waits, history, progress:
                async with runner:
                    await runner.resume()
                    if lost := journal.lost:
                        print_note(
                            f"trajectories.mmr has lost the groups of {counted(len(lost), 'task')}; "
                            "they are written again from the journal, or run again"
                        )
                    stored.remove_rows_without_record()
                    with GroupFiles(self._output) as files:
                        await _complete_rows(runner, stored, files)
                        await _write_groups(runner, tasks, files)

    def _sinks(self) -> list[MetricSink]:
        """Where the metrics of the runner are written. Raises `MissingExtraError` and `RunConfigError`."""
        output = self._parts.file.config.output
        sinks: list[MetricSink] = []
        if output.tensorboard:
            sinks.append(TensorBoardSink(self._output.tensorboard))
        if output.wandb is not None:
            with self._parts.file.naming("output", "wandb"):
                sinks.append(WandbSink(**output.wandb.model_dump(), directory=self._output.path))
        return [JsonLinesSink(self._output.runner_metrics), *sinks]


async def _complete_rows(runner: Runner, stored: StoredGroups, files: GroupFiles) -> None:
    """Write the lines that `metrics.jsonl` has lost, or that a process was killed before it had written."""
    for task_id, episodes in stored.groups_without_row():
        files.write_row(await runner.group_of(Task(task_id), episodes))
    if stored.without_row:
        count = counted(len(stored.without_row), "group")
        print_note(f"metrics.jsonl lacked the lines of {count}; they were computed from trajectories.mmr")


async def _write_groups(runner: Runner, tasks: TaskSource, files: GroupFiles) -> None:
    """Write the groups as they finish. A group counts as delivered when it has been written."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="group-files") as thread:
        async for group in runner.stream(tasks):
            await loop.run_in_executor(thread, files.write, group)
