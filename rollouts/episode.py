"""The multi-turn loop."""

from __future__ import annotations

import hashlib
import time
import uuid
from collections.abc import Sequence
from dataclasses import replace

from renderers import Message, MultimodalRenderer, RenderedTokens, RendererError
from rollouts.engines.protocol import Completion, Engine, FinishReason, GenerateRequest, SamplingParams, check_result
from rollouts.environment import Environment, reset_environment, step_environment
from rollouts.errors import EngineError, EpisodeError, RolloutsError
from rollouts.provenance import Provenance
from rollouts.trajectory import Trajectory


async def run_episode(
    environment: Environment,
    *,
    engine: Engine,
    renderer: MultimodalRenderer,
    sampling: SamplingParams,
    max_turns: int,
    seed: int = 0,
    group_id: str = "",
    episode_id: str | None = None,
) -> Trajectory:
    """Play one episode of an environment against an engine.

    The first prompt is rendered; every later one extends prompt + completion through the renderer's bridge, pictures
    carried forward. Where the bridge is refused, the conversation is rendered anew and the trajectory forks.
    `seed` goes to the environment; `sampling.seed`, if given, seeds turn t with (seed, t). An episode that is not done
    after `max_turns` ends `truncated`. Raises `EpisodeError` with the completed turns if engine, renderer or
    environment fail.
    """
    trajectory = Trajectory(
        episode_id or uuid.uuid4().hex,
        seed=seed,
        group_id=group_id,
        started_at=time.time(),
        provenance=Provenance.of(renderer, engine),
    )
    started = time.monotonic()
    try:
        await _play(trajectory, environment, engine, renderer, sampling, max_turns)
    except (RolloutsError, RendererError) as error:
        trajectory.error = f"{type(error).__name__}: {error}"
        raise EpisodeError(str(error), trajectory) from error
    finally:
        trajectory.seconds = time.monotonic() - started
        trajectory.finish()
    return trajectory


async def _play(
    trajectory: Trajectory,
    environment: Environment,
    engine: Engine,
    renderer: MultimodalRenderer,
    sampling: SamplingParams,
    max_turns: int,
) -> None:
    tools = getattr(environment, "tools", None)
    if not sampling.stop_token_ids:
        sampling = replace(sampling, stop_token_ids=tuple(renderer.get_stop_token_ids()))
    seed = sampling.seed
    messages = await reset_environment(environment, trajectory.seed)
    prompt = renderer.render(messages, tools=tools, add_generation_prompt=True)
    shown: Sequence[Message] = messages  # those that the message indices of `prompt` count
    sampled = _sampled_runs(prompt)

    for turn in range(max_turns):
        request = GenerateRequest(
            prompt_ids=prompt.token_ids,
            sampling=sampling if seed is None else replace(sampling, seed=derived_seed(seed, turn)),
            multi_modal_data=prompt.multi_modal_data,
            session_id=trajectory.episode_id,
            request_id=f"{trajectory.episode_id}-{turn}",
            marker_ids=prompt.marker_ids,
            sampled=sampled,
        )
        asked = time.monotonic()
        completion = await _complete(engine, request)
        seconds = time.monotonic() - asked
        completion_ids = completion.token_ids.tolist()
        assistant = renderer.parse_response(completion_ids, tools=tools, prompt_ids=prompt.token_ids).to_message()
        trajectory.add_turn(prompt, completion, assistant, messages=shown, seconds=seconds)

        step = await step_environment(environment, assistant)
        trajectory.pay(step.reward, dict(step.info))
        if step.done:
            trajectory.done = True
            return
        if turn + 1 < max_turns:
            conversation = [*messages, assistant, *step.messages]
            bridged = renderer.bridge_to_next_turn(
                prompt.token_ids,
                completion_ids,
                step.messages,
                tools=tools,
                previous_messages=messages,
                previous_multi_modal_data=prompt.multi_modal_data,
            )
            if bridged is None:
                prompt, shown = renderer.render(conversation, tools=tools, add_generation_prompt=True), conversation
                sampled = _sampled_runs(prompt)
            else:
                sampled = [*sampled, (len(prompt), len(prompt) + len(completion_ids))]
                prompt, shown = bridged, step.messages
            messages = conversation
    trajectory.truncated = True


def _sampled_runs(prompt: RenderedTokens) -> list[tuple[int, int]]:
    """Where a prompt, rendered whole, prints turns of the assistant as the model would have sampled them."""
    return [(span.start, span.end) for span in prompt.spans if span.sampled]


async def _complete(engine: Engine, request: GenerateRequest) -> Completion:
    result = await engine.generate(request)
    check_result(request, result)
    completion = result.completions[0]
    if completion.finish_reason in (FinishReason.ABORT, FinishReason.ERROR):
        raise EngineError(request.request_id, f"generation ended with {completion.finish_reason.value!r}")
    return completion


def derived_seed(seed: int, *path: str | int) -> int:
    """A seed below 2**63 for what `path` names, unrelated to those of other paths and of neighbouring seeds."""
    name = "/".join(map(str, (seed, *path)))
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1
