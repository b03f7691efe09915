"""One episode: an environment and an engine alternate, turn by turn."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from renderers import Message, RenderedTokens, Renderer, RendererError, RendererPool
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.episodes.engine_calls import expecting_request, generate_completion, known_vocab_size
from rollouts.episodes.environment import Environment
from rollouts.episodes.environment_calls import (
    close_environment,
    environment_tools,
    make_environment,
    reset_environment,
    step_environment,
)
from rollouts.episodes.errors import EpisodeArgumentError, EpisodeError, naming_origin
from rollouts.episodes.renderer_calls import RendererCalls, renderer_pool
from rollouts.error_texts import describe_exception, exception_text, is_unicode
from rollouts.errors import RolloutsError
from rollouts.numbers import whole_number
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory

log = logging.getLogger("rollouts")

_OWN_ERRORS = (RolloutsError, RendererError)

#: Called with the trajectory of every episode that ends.
OnEnd = Callable[[Trajectory], object]


@dataclass(frozen=True, slots=True)
class EpisodeSpec:
    """One episode of a run: the seeds of environment and sampler, and the group whose rewards it is compared with.

    Seeds may be numpy integers. Raises `EpisodeArgumentError` for anything else.
    """

    seed: int
    sampling_seed: int | None = None
    group_id: str = ""
    episode_id: str | None = None

    def __post_init__(self) -> None:
        for name in ("seed", "sampling_seed"):
            value = getattr(self, name)
            if value is None and name == "sampling_seed":
                continue
            number = whole_number(value)
            if number is None:
                raise EpisodeArgumentError(name, value, "pass an integer")
            object.__setattr__(self, name, number)
        for name in ("group_id", "episode_id"):
            value = getattr(self, name)
            if (value is not None or name == "group_id") and not (isinstance(value, str) and is_unicode(value)):
                raise EpisodeArgumentError(name, value, "pass text that UTF-8 can encode")

    def new_trajectory(self) -> Trajectory:
        """An empty trajectory; an episode without an id has a random one."""
        return Trajectory(self.episode_id or uuid.uuid4().hex, seed=self.seed, group_id=self.group_id)


async def run_episode(
    environment: Environment,
    *,
    engine: Engine,
    renderer: Renderer | RendererPool,
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
    episode that is not done after `max_turns` ends `truncated`.

    Raises `EpisodeError` with the completed turns, whatever engine, renderer or environment return or raise; and
    `EpisodeArgumentError` for an invalid argument, before the episode begins. `on_end` is called once, with the
    finished trajectory, also when the episode fails or is cancelled. A cancelled episode (`task.cancel()`,
    `asyncio.wait_for`) raises `CancelledError`, as every coroutine does; only `on_end` receives its turns.
    """
    trajectory = EpisodeSpec(seed, group_id=group_id, episode_id=episode_id).new_trajectory()
    check_on_end(on_end)
    methods = (getattr(environment, name, None) for name in ("reset", "step"))
    if isinstance(environment, type) or not all(map(callable, methods)):
        rule = "pass an instance of a class that has reset and step"
        raise EpisodeArgumentError("environment", environment, rule)
    check_settings(engine, renderer, sampling, max_turns)
    with renderer_pool(renderer) as pool:
        settings = EpisodeSettings(engine, pool, sampling, max_turns)
        return await record_episode(lambda: environment, trajectory, settings, on_end)


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What the episodes of a run have in common."""

    engine: Engine
    renderer: RendererPool
    sampling: SamplingParams
    max_turns: int


def check_settings(engine: object, renderer: object, sampling: object, max_turns: object) -> None:
    """Raises `EpisodeArgumentError`."""
    if isinstance(engine, type) or not callable(getattr(engine, "generate", None)):
        raise EpisodeArgumentError("engine", engine, "pass an Engine, such as VLLMEngine(url)")
    if isinstance(renderer, type) or not callable(getattr(renderer, "get_stop_token_ids", None)):
        raise EpisodeArgumentError("renderer", renderer, "pass a renderer, such as load_renderer(directory)")
    if not isinstance(sampling, SamplingParams):
        raise EpisodeArgumentError("sampling", sampling, "pass a SamplingParams")
    if sampling.n != 1:
        raise EpisodeArgumentError(
            "sampling.n", sampling.n, "an episode continues from one completion; pass n=1 and run it n times"
        )
    if (whole_number(max_turns) or 0) < 1:
        raise EpisodeArgumentError("max_turns", max_turns, "pass an integer of at least 1")


def check_on_end(on_end: OnEnd | None) -> None:
    """Raises `EpisodeArgumentError`."""
    if on_end is not None and (not callable(on_end) or inspect.iscoroutinefunction(on_end)):
        raise EpisodeArgumentError("on_end", on_end, "pass a function that is not async, or None")


async def record_episode(
    factory: Callable[[], Environment], trajectory: Trajectory, settings: EpisodeSettings, on_end: OnEnd | None
) -> Trajectory:
    """Run one episode into an empty trajectory, finish it, and pass it to `on_end`. Raises `EpisodeError`."""
    trajectory.started_at, started = time.time(), time.monotonic()
    failure: BaseException | None = None
    try:
        async with AsyncExitStack() as at_end:
            await _run(factory, trajectory, settings, at_end)
    except Exception as error:  # noqa: BLE001  no exception of any component may lose the completed turns
        trajectory.error = describe_exception(error)
        reason = exception_text(error) if isinstance(error, _OWN_ERRORS) else describe_exception(error)
        failure = EpisodeError(reason, trajectory)
        failure.__cause__ = error
    except BaseException as error:  # noqa: BLE001  raised again below, after `on_end` has received the turns
        trajectory.error = describe_exception(error)
        failure = error
    trajectory.seconds = time.monotonic() - started
    trajectory.finish()
    if on_end is not None:
        try:
            on_end(trajectory)
        except Exception:
            if failure is None or isinstance(failure, Exception):
                raise
            log.exception("on_end failed for episode %s, which was cancelled", trajectory.episode_id)
    if failure is not None:
        raise failure
    return trajectory


async def _run(
    factory: Callable[[], Environment], trajectory: Trajectory, settings: EpisodeSettings, at_end: AsyncExitStack
) -> None:
    """Run the turns of an episode. `at_end` gets what must be called when the episode has ended."""
    engine, sampling, max_turns = settings.engine, settings.sampling, settings.max_turns
    renderer = RendererCalls(settings.renderer)
    trajectory.provenance = Provenance.of(settings.renderer, engine)
    vocab_size = known_vocab_size(engine, settings.renderer)
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=renderer.stop_token_ids())
    environment = make_environment(factory)
    at_end.push_async_callback(close_environment, environment)
    conversation: Sequence[Message] = await reset_environment(environment, trajectory.seed)
    tools = environment_tools(environment)
    name = type(environment).__name__
    with expecting_request(engine), naming_origin(f"{name}.reset"):
        prompt = await renderer.render(conversation, tools)
    prompt_messages = conversation  # the messages that the message indices of `prompt` refer to
    sampled = _sampled_ranges(prompt)

    for turn in range(max_turns):
        request = GenerateRequest(
            prompt_ids=prompt.token_ids,
            sampling=sampling if sampling.seed is None else replace(sampling, seed=derived_seed(sampling.seed, turn)),
            multi_modal_data=prompt.multi_modal_data,
            session_id=trajectory.episode_id,
            request_id=f"{trajectory.episode_id}-{turn}",
            placeholder_token_ids=prompt.placeholder_token_ids,
            sampled=sampled,
        )
        sent_at = time.monotonic()
        completion = await generate_completion(engine, request, vocab_size)
        seconds = time.monotonic() - sent_at
        completion_ids = completion.token_ids.tolist()
        with expecting_request(engine):
            assistant, parsed = await renderer.parse(completion_ids, tools, prompt)
        trajectory.add_turn(prompt, completion, assistant, messages=prompt_messages, seconds=seconds)

        step = await step_environment(environment, assistant, parsed)
        trajectory.record_reward(step.reward, step.info)
        if step.done:
            trajectory.done = True
            return
        if turn + 1 < max_turns:
            with expecting_request(engine):
                with naming_origin(f"what {name}.step returned for turn {turn}"):
                    bridged = await renderer.bridge(prompt, completion_ids, step.messages, tools, conversation)
                conversation = [*conversation, assistant, *step.messages]
                if bridged is None:
                    with naming_origin(f"the conversation after {name}.step of turn {turn}"):
                        prompt, prompt_messages = await renderer.render(conversation, tools), conversation
                    sampled = _sampled_ranges(prompt)
                else:
                    sampled = [*sampled, (len(prompt), len(prompt) + len(completion_ids))]
                    prompt, prompt_messages = bridged, step.messages
    trajectory.truncated = True


def _sampled_ranges(prompt: RenderedTokens) -> list[tuple[int, int]]:
    """The token ranges of a rendered prompt that the model would have sampled: its assistant turns."""
    return [(span.start, span.end) for span in prompt.spans if span.sampled]


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for `path`, unrelated to the seeds of other paths and of neighbouring values of `seed`."""
    name = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
