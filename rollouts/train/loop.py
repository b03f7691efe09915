"""The loop of `rollouts train`: groups, a step of the trainer, new weights for the engine, evaluation, checkpoint."""

import asyncio
import gc
import hashlib
import json
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

from rich.console import Console

from rollouts.engines.protocol import ChatEngine, Engine
from rollouts.errors import RolloutsError
from rollouts.evaluation import EvaluationResults
from rollouts.observability import JsonLinesSink, MetricHistory, RendererStats, RunMetrics, TrainingLog
from rollouts.observability.group_metrics import GroupMetrics
from rollouts.observability.metric_sinks import last_step
from rollouts.run_config.engines import connect
from rollouts.run_config.group_files import GroupFiles
from rollouts.run_config.output import OutputDirectory, metric_sinks
from rollouts.run_config.parts import make_mode, make_tally
from rollouts.run_config.run_parts import RunParts
from rollouts.run_config.sections import TrainSection
from rollouts.run_config.tasks import FileTaskSource
from rollouts.runner.events import GroupSkipped, GroupStale, RunnerEvent
from rollouts.runner.group import Group
from rollouts.runner.group_run import ScoreEpisode
from rollouts.runner.modes import Synchronous
from rollouts.task import Task
from rollouts.terminal.interrupts import run_with_deadline
from rollouts.train.checkpoints import Checkpoints, TrainingState
from rollouts.train.learning import Learner
from rollouts.train.policy import Policy
from rollouts.train.task_order import TaskOrder
from rollouts.workers.worker_pool import WorkerPool

#: Where episodes run (`RunParts.place`).
Place: TypeAlias = Engine | ChatEngine | WorkerPool


@dataclass(slots=True)
class Training:
    """The training run of this process. `held_out` and `conversations` are None where the file has none."""

    parts: RunParts
    section: TrainSection
    output: OutputDirectory
    console: Console
    held_out: Iterable[Task] | None
    conversations: Sequence[Task] | None
    resume_command: str
    metrics: RunMetrics | None = None
    missing: Sequence[str] = ()
    state: TrainingState = field(default_factory=TrainingState)

    def run(self) -> None:
        """Train to the last step, from the newest checkpoint where there is one. Called once, in the main thread.

        Raises `RunConfigError`; `RolloutsError` where the mismatch is too large; `OSError` on a full disk, and
        `KeyboardInterrupt` after Ctrl-C: the newest checkpoint stays.
        """
        message = f"interrupted, and stopped at once; to continue: {self.resume_command}"
        run_with_deadline(self._train(), 4.0, message)

    async def _train(self) -> None:
        parts, section, output = self.parts, self.section, self.output
        file = parts.file
        async with AsyncExitStack() as opened:
            output.lock_training(opened)
            policy = Policy(parts, section, output.weights)
            checkpoints = Checkpoints(output, file, self._configuration(policy), section.keep)
            restored = checkpoints.restore(policy.trainer)
            if restored is not None:
                self.console.print(f"continuing after step {restored.step} of {section.steps}")
            state = restored or TrainingState()
            learner = Learner(policy, file, section)
            order = TaskOrder(
                parts.tasks,
                seed=file.config.seed,
                shuffle=section.shuffle,
                revisit=section.revisit_solved,
                **state.tasks,
            )
            sinks = metric_sinks(file, output)
            # Episodes are made of several hundred thousand objects; scanning those of torch each time costs as much.
            gc.freeze()
            gc.set_threshold(50_000, 20, 20)
            log = opened.enter_context(TrainingLog(output.path, sinks=sinks))
            if (server := await policy.server()) is not None:  # before a warm start, which takes long
                opened.push_async_callback(server.close)
            if restored is None:
                if self.conversations is not None and (supervised := file.config.supervised) is not None:
                    self.console.print(f"warm start: {supervised.steps} supervised steps")
                    await asyncio.to_thread(learner.warm_start, self.conversations, log)
                state = replace(state, tasks=order.state())
                state = await asyncio.to_thread(checkpoints.save, policy.trainer, state)
            engine, *others = await policy.engines(server, state.step)
            for each in (*others, engine):
                if each is not server:
                    opened.push_async_callback(each.close)
            score = await self._teacher(opened, engine)
            place = await opened.enter_async_context(parts.place(engine, parts.renderer))
            self.metrics = RunMetrics(sources=[RendererStats(policy.renderer)])
            mode = Synchronous() if file.config.mode is None else make_mode(file)
            runner = parts.make_runner(
                place,
                listeners=[self.metrics, partial(_end_left_out, order)],
                score_episode=score,
                mode=mode,
                tasks=order,
                engine=engine,
            )
            runner_sinks = [JsonLinesSink(output.runner_metrics), *sinks]
            opened.enter_context(MetricHistory(self.metrics, runner_sinks, first_step=last_step(output.runner_metrics)))
            files = opened.enter_context(GroupFiles(output, durable=False))
            await opened.enter_async_context(runner)
            if state.step == 0:
                state = await self._evaluated(engine, place, log, state)
            await self._write_best(policy, state)
            first, began, success = state.step, time.monotonic(), file.config.evaluation.threshold
            for step in range(first + 1, section.steps + 1):
                started = time.monotonic()
                groups = await runner.collect(section.groups)
                if len(groups) < section.groups:
                    cure = "a list is taken again, a generator is not, and of tasks with one id only the first is taken"
                    raise RolloutsError(f"the tasks ended in step {step}: {cure}; or take fewer steps")
                groups.sort(key=lambda group: order.position(group.task.task_id))
                sampled = time.monotonic()
                figures = _figures(groups)
                writing = asyncio.create_task(asyncio.to_thread(files.write_all, groups))
                try:
                    mismatch = await asyncio.to_thread(learner.learn, groups, step, log, figures)
                finally:
                    await writing
                await runner.update_weights(await asyncio.to_thread(policy.weights, step), policy.version(step))
                if not isinstance(mode, Synchronous):
                    mismatch = await learner.check_engine(engine, step)
                for group in groups:
                    is_solved = not group.num_failed and bool(group.rewards.min() >= success)
                    order.end(group.task.task_id, is_solved=is_solved)
                ended = time.monotonic()
                log.write(step, {"seconds_sampling": sampled - started, "seconds_training": ended - sampled})
                state = replace(state, step=step, tasks=order.state())
                self._print(step, first, figures, mismatch, ended - began, ended - started)
                if step == section.steps or step % file.config.evaluation.every == 0:
                    state = await self._evaluated(engine, place, log, state)
                if step == section.steps or step % section.checkpoint_every == 0 or step == state.best_step:
                    state = await asyncio.to_thread(checkpoints.save, policy.trainer, state)
                    await self._write_best(policy, state)
            await asyncio.to_thread(policy.save, output.path / "last")
            self.state = state

    def _configuration(self, policy: Policy) -> dict[str, Any]:
        """What must not change while the run continues: values, modules, files of tasks, what is not trained.

        A position in the order of the tasks is that of a row, and rewards are compared.
        """
        values = self.parts.configuration_and_files()
        values["evaluation"] = self.parts.file.config.evaluation.model_dump(mode="json", exclude={"every"})
        if isinstance(self.held_out, FileTaskSource):
            values["evaluation"]["content_of_the_file"] = self.held_out.digest()
        # Of the base model under an adapter no checkpoint has the weights; one of each tensor tells models apart.
        parameters = policy.trainer.model.parameters()
        kept = [each.detach().flatten()[:1].tolist() for each in parameters if not each.requires_grad]
        values["base_weights"] = hashlib.sha256(json.dumps(kept).encode()).hexdigest()
        return values

    async def _write_best(self, policy: Policy, state: TrainingState) -> None:
        """Write the weights of a checkpoint that names itself the best; a kill before the end leaves those of before.

        A process that continues from this checkpoint does it again.
        """
        if state.step == state.best_step:
            await asyncio.to_thread(policy.save, self.output.path / "best")

    async def _teacher(self, opened: AsyncExitStack, engine: Engine) -> ScoreEpisode | None:
        if (teacher := self.parts.teacher) is None:
            return None
        of_teacher = teacher.make_engine()
        opened.push_async_callback(of_teacher.close)
        await connect(teacher.file, of_teacher)
        await teacher.check(of_teacher, engine)
        return partial(teacher.scored, of_teacher)

    async def _evaluated(self, engine: Engine, place: Place, log: TrainingLog, state: TrainingState) -> TrainingState:
        """The state after an evaluation on the held-out tasks, where there are any."""
        if self.held_out is None:
            return state
        results = await self._evaluate(engine, place, self.held_out, state.step)
        reward = None if results.total_reward is None else results.total_reward.value
        if reward is None:
            raise RolloutsError(f"step {state.step}: every held-out episode failed; {results.errors}")
        success = results.pass_at_k[1].value
        log.write(state.step, {"held_out_reward": reward, "held_out_success": success})
        self.console.print(f"step {state.step}: held-out reward {reward:.3f}, success {success:.3f}", highlight=False)
        if state.best_reward is not None and reward <= state.best_reward:
            return state
        return replace(state, best_step=state.step, best_reward=reward)

    async def _evaluate(self, engine: Engine, place: Place, tasks: Iterable[Task], step: int) -> EvaluationResults:
        samples = self.parts.file.config.evaluation.samples
        tally = make_tally(self.parts.file, samples, 1)  # of pass@1 is the success in training.jsonl
        output = OutputDirectory(self.output.evaluations / str(step))
        if output.path.exists():  # of a killed process
            shutil.rmtree(output.path)
        output.path.mkdir(parents=True)
        parts = self.parts.with_all_groups()
        runner = parts.make_runner(place, listeners=[], group_size=samples, engine=engine)
        async with runner:
            with GroupFiles(output, durable=False) as files:
                async for group in runner.stream(tasks):
                    files.write(group)
                    tally.add(GroupMetrics.of(group))
        results = tally.results(complete=True, configuration=parts.description())
        results.write(output.results)
        return results

    def _print(
        self, step: int, first: int, figures: Mapping[str, float], mismatch: float, seconds: float, of_step: float
    ) -> None:
        equal = figures["equal_rewards"]
        left = round(seconds / (step - first) * (self.section.steps - step))
        self.console.print(
            f"step {step}/{self.section.steps}: {left // 60}:{left % 60:02} left  reward {figures['reward']:.3f}  "
            f"mismatch {'-' if math.isnan(mismatch) else f'{mismatch:.0e}'}  {of_step:.1f} s/step"
            f"{f'  {equal:.0%} of the groups have equal rewards' if equal >= 0.8 else ''}",
            soft_wrap=True,
            highlight=False,
        )


def _end_left_out(order: TaskOrder, event: RunnerEvent) -> None:
    """A group that is left out is not taken again."""
    if isinstance(event, GroupSkipped) or (isinstance(event, GroupStale) and event.action == "drop"):
        order.end(event.task_id)


def _figures(groups: Sequence[Group]) -> dict[str, float]:
    rewards = [float(group.rewards[index]) for group in groups for index, _ in group.succeeded()]
    episodes = [episode for group in groups for _, episode in group.succeeded()]
    count = max(len(episodes), 1)
    return {
        "reward": sum(rewards) / count,
        "sampled_tokens": sum(len(node.logprobs) for each in episodes for node in each.nodes) / count,
        "turns": sum(each.num_turns for each in episodes) / count,
        "failed": float(sum(group.num_failed for group in groups)),
    }
