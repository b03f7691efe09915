"""Runs the groups of a configuration and writes them to its output directory."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

from rich.console import Console

from rollouts.cli.run.stored_groups import StoredGroups, remove_failed_groups
from rollouts.engines.protocol import ChatEngine, Engine
from rollouts.observability import (
    EngineMonitor,
    JsonLinesSink,
    MetricHistory,
    ProgressDisplay,
    RendererStats,
    RunMetrics,
)
from rollouts.observability.metric_sinks import last_step
from rollouts.observability.run_metrics import Source
from rollouts.run_config.engines import connect
from rollouts.run_config.group_files import GroupFiles
from rollouts.run_config.output import OutputDirectory, metric_sinks
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.tasks import FileTaskSource, TaskSource, first_tasks
from rollouts.runner.group_run import ScoreEpisode
from rollouts.runner.journal import Journal
from rollouts.runner.runner import Runner
from rollouts.task import Task
from rollouts.terminal.interrupts import run_with_deadline
from rollouts.terminal.text import counted, print_note
from rollouts.workers.worker_pool import WorkerPool

#: Returns the context in which workers run the episodes of a run.
MakeWorkers: TypeAlias = Callable[[], AbstractAsyncContextManager[WorkerPool]]


@dataclass(slots=True)
class Execution:
    """The run of this process: all tasks, or the first `limit`.

    `make_workers` returns the context of the workers that run its episodes; None: they run in this process.
    With `rerun_failed`, groups of earlier processes that have failed episodes are run again. `metrics` and
    `journal` are there once the run has begun, so that it can be continued.
    """

    parts: RunParts
    output: OutputDirectory
    limit: int | None
    console: Console
    resume_command: str
    make_workers: MakeWorkers | None = None
    rerun_failed: bool = False
    metrics: RunMetrics | None = None
    journal: Journal | None = None

    @property
    def missing(self) -> list[str]:
        """Tasks whose groups an earlier process wrote, the files have lost, and this one has not written again."""
        return [] if self.journal is None else sorted(self.journal.lost)

    def run(self) -> None:
        """Run, and write every group as it finishes. Called once, in the main thread.

        Raises `RunConfigError` if the engine cannot be used, `JournalError`, and `KeyboardInterrupt` after
        Ctrl-C.
        """
        engine = self.parts.make_engine() if self.make_workers is None else None
        message = f"interrupted, and stopped at once; to continue: {self.resume_command}"
        # It has ended after 4 seconds, also if a method of an environment does not return.
        run_with_deadline(self._run(engine), 4.0, message)

    async def _run(self, engine: Engine | ChatEngine | None) -> None:
        async with AsyncExitStack() as opened:
            sources: list[Source] = []
            score_episode: ScoreEpisode | None = None
            if engine is not None:
                opened.push_async_callback(engine.close)
                await connect(self.parts.file, engine)
            if (teacher := self.parts.teacher) is not None:
                of_teacher = teacher.make_engine()
                opened.push_async_callback(of_teacher.close)
                await connect(teacher.file, of_teacher)
                await teacher.check(of_teacher, engine)
                score_episode = partial(teacher.scored, of_teacher)
            if engine is not None:
                if isinstance(engine, Engine):
                    sources.append(await opened.enter_async_context(EngineMonitor(engine)))
                if self.parts.renderer is not None:
                    sources.append(RendererStats(self.parts.renderer))
                place = await opened.enter_async_context(self.parts.place(engine, self.parts.renderer))
                sources += [place.metrics] if isinstance(place, WorkerPool) else []
                await self._run_at(place, sources, score_episode)
            elif self.make_workers is not None:
                workers = await opened.enter_async_context(self.make_workers())
                await self._run_at(workers, [workers.metrics], score_episode)

    async def _run_at(
        self, place: Engine | ChatEngine | WorkerPool, sources: list[Source], score_episode: ScoreEpisode | None
    ) -> None:
        parts, limit = self.parts, self.limit
        tasks = parts.tasks if limit is None else first_tasks(parts.tasks, limit)
        journal = Journal.open(self.output.journal, configuration=parts.journal_configuration())
        async with AsyncExitStack() as opened:
            opened.push_async_callback(journal.close)  # the runner closes it, if it comes to that
            again: frozenset[str] = frozenset()
            with self.console.status("reading the groups that are written"):  # 10,000 take some seconds
                if self.rerun_failed:
                    journal.run_failed_again()
                    again = await asyncio.to_thread(remove_failed_groups, self.output)
                stored = await asyncio.to_thread(StoredGroups, self.output)
            journal.count_as_delivered(stored.task_ids, lost=stored.without_record)
            self.journal = journal
            sinks = [JsonLinesSink(self.output.runner_metrics), *metric_sinks(parts.file, self.output)]
            self.metrics = metrics = RunMetrics(sources=sources)
            runner = parts.make_runner(place, journal=journal, listeners=[metrics], score_episode=score_episode)
            progress = ProgressDisplay(metrics, total_groups=limit, console=self.console)
            history = MetricHistory(metrics, sinks, first_step=last_step(self.output.runner_metrics))
            with history, progress:
                async with runner:
                    await runner.resume()
                    if again:
                        print_note(f"{counted(len(again), 'task')} with failed episodes run again")
                    if lost := sorted(journal.lost - again):
                        named = ", ".join(lost[:5]) + (", ..." if len(lost) > 5 else "")
                        print_note(
                            f"trajectories.mmr has lost the groups of {counted(len(lost), 'task')}, which are run "
                            f"again unless the journal still has them: {named}"
                        )
                    stored.remove_rows_without_record()
                    with GroupFiles(self.output) as files:
                        await _complete_rows(runner, parts.tasks, stored, files)
                        await _write_groups(runner, tasks, files)


async def _complete_rows(runner: Runner, tasks: TaskSource, stored: StoredGroups, files: GroupFiles) -> None:
    """Write the lines that `metrics.jsonl` lacks, with the data of a file of tasks where there is one."""
    found: dict[str, Task] = {}
    if stored.without_row and isinstance(tasks, FileTaskSource):
        found = {task.task_id: task for task in tasks if task.task_id in stored.without_row}
    for task_id, episodes in stored.groups_without_row():
        files.write_row(await runner.group_of(found.get(task_id, Task(task_id)), episodes))
    if stored.without_row:
        count = counted(len(stored.without_row), "group")
        print_note(f"metrics.jsonl lacked the lines of {count}; they were computed from trajectories.mmr")


async def _write_groups(runner: Runner, tasks: TaskSource, files: GroupFiles) -> None:
    """Write the groups as they finish. A group counts as delivered when it has been written."""
    loop = asyncio.get_running_loop()
    with ThreadPoolExecutor(1, thread_name_prefix="group-files") as thread:
        async for group in runner.stream(tasks):
            await loop.run_in_executor(thread, files.write, group)
