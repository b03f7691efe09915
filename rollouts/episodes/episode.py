"""One episode: an environment and an engine alternate, turn by turn."""

import asyncio
import inspect
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from renderers import Renderer, RendererError, RendererPool
from rollouts.engines.protocol import ChatEngine, Engine, SamplingParams, check_engine
from rollouts.episodes.activity import EpisodeActivity, EpisodeObserver
from rollouts.episodes.calls import renderer_pool
from rollouts.episodes.chat_turns import new_recorder
from rollouts.episodes.context import EpisodeContext, PlayedTurns
from rollouts.episodes.environment import Environment, EnvironmentFactory, environment_name
from rollouts.episodes.environment_calls import (
    CLOSE_SECONDS,
    attach_context,
    check_environment,
    close_environment,
    environment_tools,
    make_environment,
    reset_environment,
    step_environment,
)
from rollouts.episodes.errors import (
    EnvironmentFailedError,
    EnvironmentProtocolError,
    EpisodeError,
    EpisodeLimitError,
    EpisodesError,
    ends_process,
    ends_task,
)
from rollouts.episodes.limits import OVERLONG_ERRORS, EpisodeLimits, max_turns_limit, overlong_limit
from rollouts.episodes.turns import EpisodeRecorder, EpisodeSettings, check_only_new, check_sampling
from rollouts.errors import (
    ArgumentError,
    RolloutsError,
    describe_exception,
    exception_text,
    text_with_notes,
)
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory
from rollouts.values import call_error, check_choice, check_integer, whole_number

log = logging.getLogger("rollouts")

#: How long an episode waits for its environment, `close` included, after it has ended or was cancelled.
END_SECONDS = CLOSE_SECONDS + 1.0

#: What follows an episode that fails: its trajectory has the error, or it stops the others.
OnError = Literal["return", "raise"]

#: Called with the trajectory of every episode that ends.
OnEnd = Callable[[Trajectory], object]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode of a run: the seeds of environment and sampler, and the group whose rewards it is compared with.

    Seeds may be numpy integers. Raises `ArgumentError` for other seeds.
    """

    seed: int
    sampling_seed: int | None = None
    group_id: str = ""
    episode_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("seed",) if self.sampling_seed is None else ("seed", "sampling_seed"):
            number = whole_number(value := getattr(self, name))
            if number is None:
                raise ArgumentError(name, value, "pass an integer")
            object.__setattr__(self, name, number)

    def new_trajectory(self) -> Trajectory:
        """An empty trajectory; an episode without an id has a random one."""
        return Trajectory(self.episode_id or uuid.uuid4().hex, seed=self.seed, group_id=self.group_id)


async def run_episode(
    environment: Environment,
    *,
    engine: Engine | ChatEngine,
    renderer: Renderer | RendererPool | None,
    sampling: SamplingParams,
    max_turns: int,
    seed: int = 0,
    group_id: str = "",
    episode_id: str | None = None,
    on_end: OnEnd | None = None,
) -> Trajectory:
    """Run one episode of an environment with an engine.

    The first prompt is rendered; every later prompt extends prompt + completion through the renderer's bridge, which
    keeps the earlier images. Where the bridge refuses, the conversation is rendered again and the trajectory forks.
    The renderer runs on the threads of the `RendererPool`, or of a pool that is made for this episode.

    `seed` goes to the environment; `sampling.seed`, if given, seeds turn t with (seed, t). `sampling.n` is 1. An
    episode that is not done after `max_turns`, or whose next prompt is too long for the model, ends `truncated`;
    `truncation_reason` says which.

    Raises `EpisodeError` with the completed turns, whatever engine, renderer or environment return or raise; and
    `ArgumentError` for an invalid argument, before the episode begins. `on_end` is called once, with the
    finished trajectory, also when the episode fails or is cancelled. A cancelled episode (`task.cancel()`,
    `asyncio.wait_for`) raises `CancelledError`, as every coroutine does; only `on_end` receives its turns.
    """
    trajectory = EpisodeSpec(seed, group_id=group_id, episode_id=episode_id).new_trajectory()
    check_on_end(on_end)
    check_environment(environment)
    check_settings(engine, renderer, sampling, max_turns)
    with renderer_pool(renderer) as pool:
        settings = EpisodeSettings(engine, pool, sampling, EpisodeLimits(max_turns=max_turns))
        return await record_episode(lambda: environment, trajectory, settings, on_end)


def check_settings(engine: object, renderer: object, sampling: object, max_turns: object) -> None:
    """Raises `ArgumentError`."""
    check_engine(engine)
    check_renderer(renderer, engine)
    check_sampling(sampling)
    check_integer("max_turns", max_turns)


def check_renderer(renderer: object, engine: object) -> None:
    """Raises `ArgumentError` for what is no renderer; a `ChatEngine` has none."""
    if isinstance(engine, ChatEngine):
        if renderer is not None:
            raise ArgumentError("renderer", renderer, "pass None: a chat endpoint renders the messages itself")
        return
    if isinstance(renderer, type) or not callable(getattr(renderer, "get_stop_token_ids", None)):
        raise ArgumentError("renderer", renderer, "pass a renderer, such as load_renderer(directory)")


def check_on_end(on_end: OnEnd | None, name: str = "on_end") -> None:
    """Raises `ArgumentError`."""
    if on_end is not None and (not callable(on_end) or inspect.iscoroutinefunction(on_end)):
        raise ArgumentError(name, on_end, "pass a function that is not async, or None")


async def record_episode(
    factory: EnvironmentFactory,
    trajectory: Trajectory,
    settings: EpisodeSettings,
    on_end: OnEnd | None = None,
    observer: EpisodeObserver | None = None,
) -> Trajectory:
    """Run one episode into an empty trajectory, finish it, and pass it to `on_end`. Raises `EpisodeError`."""
    trajectory.started_at, started = time.time(), time.monotonic()
    failure: BaseException | None = None
    try:
        await _run(factory, new_recorder(trajectory, settings, EpisodeActivity(observer)))
    except BaseException as error:  # noqa: BLE001  no exception of any component may lose the completed turns
        trajectory.error = text_with_notes(error, describe_exception(error))
        failure = error
        if not ends_task(error):  # otherwise it is raised below, after `on_end` has received the turns
            text_of = exception_text if isinstance(error, RolloutsError | RendererError) else describe_exception
            failure = EpisodeError(text_of(error), trajectory)
            failure.__cause__ = error
    trajectory.seconds = time.monotonic() - started
    trajectory.finish()
    if on_end is not None:
        try:
            on_end(trajectory)
        except Exception:
            if failure is None or isinstance(failure, Exception):
                raise
            log.exception("on_end failed for episode %s, which was cancelled", trajectory.episode_id)
    if failure is None:
        return trajectory
    try:
        raise failure
    finally:
        del failure  # it refers to this frame: the memory of the episode would wait for Python's collector


async def _run(factory: EnvironmentFactory, recorder: EpisodeRecorder) -> None:
    """Run the turns of an episode within its deadlines, and close the environment."""
    trajectory = recorder.trajectory
    trajectory.provenance = Provenance.of(recorder.renderer, recorder.engine)
    reached = await _play_in_own_task(factory, recorder)
    if reached is None:
        trajectory.done = True
    else:
        trajectory.truncated = True
        trajectory.truncation_reason = reached.reason


async def _play_in_own_task(factory: EnvironmentFactory, recorder: EpisodeRecorder) -> EpisodeLimitError | None:
    """Run all code of the environment in one task of its own, which is left if it ignores its cancellation.

    The end of a cancelled episode, of one whose deadline passed, and of one that is over, then does not depend on
    what the environment does with a `CancelledError`. Returns the limit that ended the episode, or None.
    """
    ended: asyncio.Future[EpisodeLimitError | None] = asyncio.get_running_loop().create_future()
    playing = asyncio.create_task(_play(factory, recorder, ended))
    deadline: EpisodeLimitError | None = None
    try:
        async with recorder.deadlines.scope:
            await asyncio.wait([playing, ended], return_when=asyncio.FIRST_COMPLETED)
    except TimeoutError:
        deadline = recorder.deadlines.passed(recorder.activity)
    finally:
        if not ended.done():
            playing.cancel()
        if not playing.done():
            await _wait_for_end(playing, recorder)
    if ended.done():
        return ended.result()
    if deadline is not None:
        return deadline
    if playing.cancelled():
        text = "code of the environment cancelled the task of its episode; cancel only tasks that it has made"
        raise EnvironmentProtocolError(text)
    try:
        return _result_of(playing)
    finally:
        del playing  # its exception refers to this frame, as in `record_episode`


def _result_of(playing: asyncio.Task[EpisodeLimitError | None]) -> EpisodeLimitError | None:
    """The result of a task that has ended, or its exception."""
    error = playing.exception()
    try:
        if error is not None and not isinstance(error, Exception) and not ends_process(error):
            # Raised further, a GeneratorExit would count as one of the task that waits.
            raise EnvironmentFailedError("", "code of the environment", error) from error
        return playing.result()
    finally:
        del playing, error


async def _play(
    factory: EnvironmentFactory, recorder: EpisodeRecorder, ended: asyncio.Future[EpisodeLimitError | None]
) -> EpisodeLimitError | None:
    """Make the environment, play it and close it. `ended` receives the result before the environment is closed."""
    recorder.deadlines.begin_turn()
    recorder.activity.waits_for("environment.make", 0)
    environment = await make_environment(factory)
    try:
        context = EpisodeContext(recorder, play_environment, seed=recorder.trajectory.seed, agent="", path=())
        reached = await play_environment(environment, context, recorder.limits.max_turns, PlayedTurns())
        ended.set_result(reached)
    finally:
        try:
            await recorder.close()
        finally:
            await close_environment(environment)
    return reached


async def _wait_for_end(playing: asyncio.Task[Any], recorder: EpisodeRecorder) -> None:
    """Wait at most `END_SECONDS` for the task, also where the caller is cancelled meanwhile."""
    recorder.is_closed = True
    playing.add_done_callback(lambda task: task.cancelled() or task.exception())  # it is reported already, or late
    loop = asyncio.get_running_loop()
    until = loop.time() + END_SECONDS
    cancellation: asyncio.CancelledError | None = None
    while not playing.done() and (left := until - loop.time()) > 0:
        try:
            await asyncio.wait([playing], timeout=left)
        except asyncio.CancelledError as error:
            cancellation = error
    if not playing.done():
        log.error(
            "episode %s is left: its environment had not ended %s seconds after it was cancelled, or after its close "
            "was; last it waited for %s in turn %d",
            recorder.trajectory.episode_id,
            END_SECONDS,
            recorder.activity.part,
            recorder.activity.turn,
        )
    if cancellation is not None:
        raise cancellation


async def play_environment(
    environment: Environment, context: EpisodeContext, max_turns: int | None, played: PlayedTurns
) -> EpisodeLimitError | None:
    """Play an environment until it is done, has had `max_turns`, or the episode has reached a limit.

    Returns the limit that ended it; None where its task is done.
    """
    try:
        return await _play_turns(environment, context, max_turns, played)
    except EpisodeLimitError as error:  # reached before the first turn, or in the environment
        return error
    except OVERLONG_ERRORS as error:
        return overlong_limit(error)


async def _play_turns(
    environment: Environment, context: EpisodeContext, max_turns: int | None, played: PlayedTurns
) -> EpisodeLimitError | None:
    recorder = context.recorder
    name = environment_name(environment)
    began = time.perf_counter()
    recorder.activity.waits_for("environment.reset", recorder.trajectory.num_turns)
    await attach_context(environment, context)
    messages = await reset_environment(environment, context.seed)
    tools = environment_tools(environment)
    environment_seconds = time.perf_counter() - began
    prompt = await recorder.first_prompt(messages, tools, f"{name}.reset")
    while True:
        turn = await recorder.sample(prompt, agent=context.agent, path=(*context.path, len(played.indices)))
        played.indices.append(turn.index)
        played.message = turn.message
        began = time.perf_counter()
        recorder.activity.waits_for("environment.step", turn.index)
        failed = True
        try:
            step = await step_environment(environment, turn.message, turn.parsed)
            recorder.trajectory.record_reward(step.reward, step.info, turn=turn.index)
            failed = False
        finally:  # the turn is in the trajectory, also if the step fails
            recorder.finish_turn(turn, environment_seconds + time.perf_counter() - began, failed=failed)
        environment_seconds = 0.0
        played.reward += float(step.reward)
        if step.done:
            return EpisodeLimitError("environment", step.truncation_reason) if step.truncation_reason else None
        if (limit := recorder.limit_reached()) is not None:
            return limit
        if max_turns is not None and len(played.indices) == max_turns:
            return max_turns_limit(max_turns)
        if context.agent == "":
            recorder.deadlines.begin_turn()
        check_only_new(step.messages, turn, f"{name}.step")
        prompt = await recorder.next_prompt(turn, step.messages, f"{name}.step")
        del turn  # its prompt would stay in memory during the next turn


async def run_episodes(
    make_environment: Callable[[], Environment],
    specs: Sequence[EpisodeSpec],
    *,
    engine: Engine | ChatEngine,
    renderer: Renderer | RendererPool | None,
    sampling: SamplingParams,
    max_turns: int,
    concurrency: int = 1024,
    on_error: OnError = "return",
    on_end: OnEnd | None = None,
) -> list[Trajectory]:
    """Run all `specs`, at most `concurrency` at a time, each in a new environment; one trajectory per spec, in order.

    If an episode fails, or its environment cannot be made, its trajectory has the completed turns and `error`, and the
    other episodes continue. With `on_error="raise"` the first failure stops the other episodes and raises
    `EpisodesError`, which also holds one trajectory per spec.

    `sampling.seed` is replaced by the `sampling_seed` of each spec. `renderer` may be a `RendererPool`; for any other
    renderer one pool is made for the run.

    `on_end` is called with each trajectory as soon as its episode has ended, also when it failed; an exception from
    `on_end` stops the run. A cancelled run raises `CancelledError`; `on_end` receives every episode that had begun,
    the cancelled ones with their completed turns. Raises `ArgumentError` for an invalid argument, before any
    episode begins.
    """
    _check_arguments(make_environment, specs, concurrency, on_error)
    check_on_end(on_end)
    check_settings(engine, renderer, sampling, max_turns)
    semaphore = asyncio.Semaphore(concurrency)
    trajectories = [spec.new_trajectory() for spec in specs]
    failures: list[EpisodeError] = []

    async def run(spec: EpisodeSpec, trajectory: Trajectory, settings: EpisodeSettings) -> None:
        async with semaphore:
            try:
                seeded = replace(settings, sampling=replace(sampling, seed=spec.sampling_seed))
                await record_episode(make_environment, trajectory, seeded, on_end)
            except EpisodeError as failure:
                if on_error == "raise":
                    failures.append(failure)
                    raise

    with renderer_pool(renderer) as pool:
        settings = EpisodeSettings(engine, pool, sampling, EpisodeLimits(max_turns=max_turns))
        try:
            async with asyncio.TaskGroup() as group:
                for spec, trajectory in zip(specs, trajectories, strict=True):
                    group.create_task(run(spec, trajectory, settings))
        except BaseExceptionGroup as raised:
            others = [error for error in raised.exceptions if not isinstance(error, EpisodeError)]
            if others:
                raise others[0] from None
    if failures:
        for trajectory in trajectories:
            if not trajectory.finished:
                trajectory.error = "did not begin: another episode of the run failed first"
                trajectory.finish()
        raise EpisodesError(failures, trajectories) from failures[0]
    return trajectories


def _check_arguments(
    make_environment: Callable[[], Environment], specs: Sequence[EpisodeSpec], concurrency: int, on_error: str
) -> None:
    reason = call_error(make_environment, []) if callable(make_environment) else "it cannot be called"
    if reason is not None:
        rule = "pass a class or a function without arguments; `Runner` is for environments of tasks"
        raise ArgumentError("make_environment", make_environment, f"{reason}; {rule}")
    ids = Counter(spec.episode_id for spec in specs if spec.episode_id is not None)
    if ids and (most := ids.most_common(1)[0])[1] > 1:
        rule = f"{most[1]} specs have it: give each its own, or None for a random one, and the same group_id to a group"
        raise ArgumentError("episode_id", most[0], rule)
    check_integer("concurrency", concurrency)
    check_choice("on_error", on_error, OnError)
