"""The multi-turn loop."""

from __future__ import annotations

import hashlib
import inspect
import logging
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from renderers import Message, RenderedTokens, Renderer, RendererError, RendererPool
from rollouts.engine_call import expecting_request, known_vocab_size, sampled_completion
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.environment import Environment, made_environment, reset_environment, step_environment, tools_of
from rollouts.episode_errors import EpisodeError
from rollouts.episode_renderer import EpisodeRenderer, renderer_pool
from rollouts.error_texts import described, is_unicode, text_of
from rollouts.errors import EpisodeArgumentError, RolloutsError
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory
from rollouts.user_code.numbers import whole_number

log = logging.getLogger("rollouts")

_OURS = (RolloutsError, RendererError)

#: Called with a trajectory when its episode has ended, however it ended.
OnEnd = Callable[[Trajectory], object]


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
    """Play one episode of an environment against an engine.

    The first prompt is rendered; every later one extends prompt + completion through the renderer's bridge, images
    carried forward. Where the bridge is refused, the conversation is rendered anew and the trajectory forks. The
    renderer works on threads: on those of a `RendererPool`, or of a pool that is made for this episode.

    `seed` goes to the environment; `sampling.seed`, if given, seeds turn t with (seed, t). `sampling.n` is 1. An
    episode that is not done after `max_turns` ends `truncated`.

    Raises `EpisodeError` with the completed turns, whatever engine, renderer or environment return or raise; and
    `EpisodeArgumentError` for a seed, id or `on_end` that is not one. `on_end` is called once, with the finished
    trajectory, however the episode ends. A cancelled episode (`task.cancel()`, `asyncio.wait_for`) raises
    `CancelledError`, as every coroutine does; only `on_end` gets its turns.
    """
    trajectory = new_trajectory(seed=seed, group_id=group_id, episode_id=episode_id)
    check_on_end(on_end)
    with renderer_pool(renderer) as pool:
        setting = EpisodeSetting(engine, pool, sampling, max_turns)
        return await play_episode(lambda: environment, trajectory, setting, on_end)


@dataclass(frozen=True, slots=True)
class EpisodeSetting:
    """What the episodes of a run have in common."""

    engine: Engine
    renderer: RendererPool
    sampling: SamplingParams
    max_turns: int

    def check(self) -> None:
        """Raises `EpisodeArgumentError`."""
        if not isinstance(self.sampling, SamplingParams):
            raise EpisodeArgumentError("sampling", self.sampling, "pass a SamplingParams")
        if self.sampling.n != 1:
            raise EpisodeArgumentError(
                "sampling.n", self.sampling.n, "an episode goes on from one completion; pass n=1 and play it n times"
            )
        if (whole_number(self.max_turns) or 0) < 1:
            raise EpisodeArgumentError("max_turns", self.max_turns, "pass an integer from 1")


def new_trajectory(*, seed: int, group_id: str, episode_id: str | None) -> Trajectory:
    """An empty trajectory. Raises `EpisodeArgumentError`."""
    number = whole_number(seed)
    if number is None:
        raise EpisodeArgumentError("seed", seed, "pass an integer")
    for name, value in (("group_id", group_id), ("episode_id", "" if episode_id is None else episode_id)):
        if not isinstance(value, str) or not is_unicode(value):
            raise EpisodeArgumentError(name, value, "pass text that UTF-8 can hold")
    return Trajectory(episode_id or uuid.uuid4().hex, seed=number, group_id=group_id)


def check_on_end(on_end: OnEnd | None) -> None:
    """Raises `EpisodeArgumentError`."""
    if on_end is not None and (not callable(on_end) or inspect.iscoroutinefunction(on_end)):
        raise EpisodeArgumentError("on_end", on_end, "pass a function that is not async, or None")


async def play_episode(
    make_environment: Callable[[], Environment], trajectory: Trajectory, setting: EpisodeSetting, on_end: OnEnd | None
) -> Trajectory:
    """Play one episode into an empty trajectory, finish it, and hand it to `on_end`. Raises `EpisodeError`."""
    trajectory.started_at, started = time.time(), time.monotonic()
    failure: BaseException | None = None
    try:
        await _play(trajectory, make_environment, setting)
    except Exception as error:  # noqa: BLE001  whichever part it came from, it must not take the turns with it
        trajectory.error = described(error)
        failure = EpisodeError(text_of(error) if isinstance(error, _OURS) else described(error), trajectory)
        failure.__cause__ = error
    except BaseException as error:  # noqa: BLE001  raised again below, when `on_end` has the turns
        trajectory.error = described(error)
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


async def _play(trajectory: Trajectory, make_environment: Callable[[], Environment], setting: EpisodeSetting) -> None:
    setting.check()
    engine, sampling, max_turns = setting.engine, setting.sampling, setting.max_turns
    renderer = EpisodeRenderer(setting.renderer)
    trajectory.provenance = Provenance.of(setting.renderer, engine)
    vocab_size = known_vocab_size(engine, setting.renderer)
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=renderer.stop_token_ids())
    environment = made_environment(make_environment)
    messages = await reset_environment(environment, trajectory.seed)
    tools = tools_of(environment)
    with expecting_request(engine):
        prompt = await renderer.render(messages, tools)
    shown: Sequence[Message] = messages  # those that the message indices of `prompt` count
    sampled = _sampled_runs(prompt)

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
        asked = time.monotonic()
        completion = await sampled_completion(engine, request, vocab_size)
        seconds = time.monotonic() - asked
        completion_ids = completion.token_ids.tolist()
        with expecting_request(engine):
            assistant = await renderer.parse(completion_ids, tools, prompt)
        trajectory.add_turn(prompt, completion, assistant, messages=shown, seconds=seconds)

        step = await step_environment(environment, assistant)
        trajectory.record_reward(step.reward, step.info)
        if step.done:
            trajectory.done = True
            return
        if turn + 1 < max_turns:
            conversation = [*messages, assistant, *step.messages]
            with expecting_request(engine):
                bridged = await renderer.bridge(prompt, completion_ids, step.messages, tools, messages)
                if bridged is None:
                    prompt, shown = await renderer.render(conversation, tools), conversation
                    sampled = _sampled_runs(prompt)
                else:
                    sampled = [*sampled, (len(prompt), len(prompt) + len(completion_ids))]
                    prompt, shown = bridged, step.messages
            messages = conversation
    trajectory.truncated = True


def _sampled_runs(prompt: RenderedTokens) -> list[tuple[int, int]]:
    """Where a prompt, rendered whole, prints turns of the assistant as the model would have sampled them."""
    return [(span.start, span.end) for span in prompt.spans if span.sampled]


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for what `path` names, unrelated to those of other paths and of neighbouring seeds."""
    name = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
