"""A verifiers client that renders with a renderer of this project and samples from an `Engine`."""

from __future__ import annotations

import base64
import json
import logging
import time
import uuid
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self
from weakref import WeakValueDictionary

import numpy as np
from verifiers.v1.clients import Client
from verifiers.v1.clients.train import serialize_completion, tool_to_wire
from verifiers.v1.configs.client import TrainClientConfig
from verifiers.v1.dialects import ChatDialect, Dialect
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.errors import ProviderError
from verifiers.v1.graph import PendingTurn
from verifiers.v1.interception import server as interception_server
from verifiers.v1.trace import Trace
from verifiers.v1.types import AssistantMessage, Response, SamplingConfig, SamplingMask, ToolCall, TurnTokens, Usage

from renderers import Message, Renderer, RendererError, RendererPool, is_multimodal
from rollouts.engines.protocol import ChatEngine, Completion, Engine, FinishReason, SamplingParams, check_engine
from rollouts.environments.verifiers.outcome import record_outcome
from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.calls import renderer_pool
from rollouts.episodes.chat_turns import ChatRecorder
from rollouts.episodes.deadlines import EpisodeDeadlines, UpdatePauses
from rollouts.episodes.episode import check_renderer
from rollouts.episodes.errors import EpisodeLimitError
from rollouts.episodes.limits import OVERLONG_ERRORS, EpisodeLimits, overlong_limit
from rollouts.episodes.turns import EpisodeRecorder, EpisodeSettings, Prompt, SampledTurn, TurnRecorder
from rollouts.errors import ArgumentError, InvalidRequestError, RolloutsError
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory

_TEMPLATE_OPTIONS = ("chat_template_kwargs", "reasoning_effort")
#: Where the messages of a prompt come from, in errors.
_ORIGIN = "the harness"


class _LimitReachedError(ProviderError):  # type: ignore[misc]
    """A limit of the rollout refuses the call. It is no failure, of which verifiers logs a warning."""


class EngineClientConfig(TrainClientConfig):  # type: ignore[misc]  # verifiers has no types without the extra
    """The client configuration that stands for an open `EngineClient` of this process; made by the client."""

    engine_client: str
    # verifiers requires a URL and a key; nothing connects to it, and names in `.invalid` never resolve.
    base_url: str = "http://engine.invalid"
    api_key_var: str = "NO_API_KEY"


class EngineClient(Client):  # type: ignore[misc]
    """A verifiers client that renders with `renderer` and samples from `engine`.

        with EngineClient(engine, renderer, sampling=SamplingParams(max_tokens=512)) as client:
            context = vf.ModelContext(model="policy", client=client.config)
            async with env.serving():
                episode = await env.run_episode(task, context)
            trajectories = [client.pop_trajectory(trace) for trace in episode.traces]

    `config` takes the place of an `EvalClientConfig` or `TrainClientConfig` anywhere in this process: in a
    `ModelContext`, an `AgentConfig` or an `EvalConfig`. A prompt that continues a sampled message of its
    rollout extends the exact sampled tokens through the renderer's bridge, with their images; any other
    prompt, and one for which the bridge is refused, is rendered. The sampling options of the `ModelContext`
    replace those of `sampling`; what a harness itself asks for is not used, as with verifiers' `TrainClient`.
    Each call of a rollout has its own seed, derived from verifiers' `seed` if there is one. A `ChatEngine`
    has no renderer (None): it receives the messages, and the trajectories have no tokens.

    The trajectory of a rollout is kept until `pop_trajectory` takes it. The end of the block leaves the
    engine open. Raises `ArgumentError`, also for `sampling.n` other than 1.
    """

    _open: ClassVar[WeakValueDictionary[str, EngineClient]] = WeakValueDictionary()

    def __init__(
        self,
        engine: Engine | ChatEngine,
        renderer: Renderer | RendererPool | None,
        *,
        sampling: SamplingParams | None = None,
    ) -> None:
        check_engine(engine)
        check_renderer(renderer, engine)
        self.engine = engine
        self.sampling = SamplingParams() if sampling is None else sampling
        if self.sampling.n != 1:
            raise ArgumentError("sampling.n", self.sampling.n, "verifiers takes one completion for each call")
        self.config = EngineClientConfig(engine_client=uuid.uuid4().hex)
        self._rollouts: dict[str, Rollout] = {}
        self._given_renderer = renderer
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        pool = self._stack.enter_context(renderer_pool(self._given_renderer))
        pauses = UpdatePauses.of(self.engine)
        self.settings = EpisodeSettings(self.engine, pool, self.sampling, EpisodeLimits(), pauses=pauses)
        self._provenance = Provenance.of(pool, self.engine)
        self._open[self.config.engine_client] = self
        _resolve_engine_clients()
        return self

    def __exit__(self, *error: object) -> None:
        self._open.pop(self.config.engine_client, None)
        self._stack.close()

    @classmethod
    def of(cls, config: EngineClientConfig) -> EngineClient:
        """The open client of a configuration. Raises `RolloutsError`."""
        client = cls._open.get(config.engine_client)
        if client is None:
            raise RolloutsError(
                "the EngineClient of this configuration is not open in this process; run the environment inside its "
                "`with` block, and in the process that has the engine"
            )
        return client

    async def get_response(
        self,
        dialect: Dialect,
        body: Mapping[str, Any],
        sampling: SamplingConfig,
        session_id: str | None = None,
        turn: PendingTurn | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Response:
        """Sample the next message of a rollout. Raises verifiers' `ProviderError`: status 400 for what cannot work.

        A limit of the rollout stops its trace, which verifiers then scores as it is.
        """
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"EngineClient answers chat completions, not {type(dialect).__name__}; use a harness that sends them",
                status_code=400,
            )
        session_id = session_id or uuid.uuid4().hex
        rollout = self._rollouts.get(session_id) or self.begin(session_id)
        try:
            response = await self._respond(dialect, body, sampling, rollout, turn)
        except EpisodeLimitError as error:
            rollout.limit = error
            if turn is not None:
                turn.trace.stop(error.limit)
            raise _LimitReachedError(str(error), status_code=400) from error
        except (RendererError, RolloutsError) as error:
            rollout.failure = error
            is_lasting = isinstance(error, RendererError | InvalidRequestError)
            raise ProviderError(str(error), status_code=400 if is_lasting else 503) from error
        rollout.failure = None
        return response

    async def _respond(
        self,
        dialect: ChatDialect,
        body: Mapping[str, Any],
        sampling: SamplingConfig,
        rollout: Rollout,
        pending: PendingTurn | None,
    ) -> Response:
        began = time.perf_counter()
        recorder = rollout.recorder
        request = dialect.parse_request(body) if pending is None else pending
        messages: list[Message] = [
            message_to_wire(each) for each in (request.messages if pending is None else request.prompt)
        ]
        tools = [tool_to_wire(tool) for tool in request.tools] if request.tools else None
        call, rollout.calls = rollout.calls, rollout.calls + 1
        params = _sampling_params(recorder.sampling, sampling)
        previous = None if pending is None else rollout.continued_turn(pending, tools)
        if pending is None or previous is None:
            prompt = await recorder.first_prompt(messages, tools, _ORIGIN)
        else:
            prompt = await recorder.next_prompt(previous, messages[pending.tail_start :], _ORIGIN)
        turn = await recorder.sample(prompt, agent="", path=(call,), sampling=params)

        response = _response(f"{recorder.trajectory.episode_id}-{call}", body["model"], rollout, turn, pending)
        rollout.turns.append((response.message, turn))
        recorder.finish_turn(turn, began - rollout.idle_since)
        recorder.activity.waits_for("environment.step", turn.index)
        recorder.deadlines.begin_turn()
        rollout.idle_since = time.perf_counter()
        return response

    def begin(
        self,
        session_id: str,
        settings: EpisodeSettings | None = None,
        *,
        activity: EpisodeActivity | None = None,
        deadlines: EpisodeDeadlines | None = None,
    ) -> Rollout:
        """Begin to record a rollout, with the client's own settings by default. Called on the rollout's event loop.

        `activity` and `deadlines` are those of its episode, which other rollouts may share.
        """
        settings, activity = settings or self.settings, activity or EpisodeActivity()
        kind = ChatRecorder if isinstance(self.engine, ChatEngine) else _TokenRecorder
        recorder = kind(Trajectory(session_id, provenance=self._provenance), settings, activity)
        if deadlines is not None:
            recorder.deadlines = deadlines
        rollout = self._rollouts[session_id] = Rollout(recorder)
        return rollout

    def pop_trajectory(self, trace: Trace) -> Trajectory:
        """The exact tree of a rollout with the rewards and metrics of its trace, finished; the client forgets it.

        `trace.reward` is recorded on the last turn, whose info has each reward with its weight, the stop
        condition, the agent and the task; `metrics` are the trace's. Without a call of the model the tree is
        empty.
        """
        rollout = self.pop(trace.id)
        rollout.record_outcome(trace)
        rollout.trajectory.finish()
        return rollout.trajectory

    def pop(self, session_id: str) -> Rollout:
        """A rollout, which the client no longer keeps; an empty one where it has recorded none."""
        if session_id not in self._rollouts:
            self.begin(session_id)
        return self._rollouts.pop(session_id)

    async def close(self) -> None:
        """Do nothing: verifiers closes a client with each of its servers, and other servers may use this one."""


class _TokenRecorder(TurnRecorder):
    """Keeps the completion of each turn until it is in verifiers' trace, too."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.completions: dict[int, Completion] = {}  # by the index of the turn

    async def record(self, prompt: Prompt, completion: Completion, *, agent: str, engine_seconds: float) -> SampledTurn:
        turn = await super().record(prompt, completion, agent=agent, engine_seconds=engine_seconds)
        self.completions[turn.index] = completion
        return turn


@dataclass(slots=True, eq=False)
class Rollout:
    """One rollout: its tree, its sampled turns, and how many calls it has made, failed ones too.

    Each turn stands beside its message in verifiers' trace. `limit` is the one that has stopped the rollout,
    `failure` the error of the last call, None where it succeeded.
    """

    recorder: EpisodeRecorder
    turns: list[tuple[AssistantMessage, SampledTurn]] = field(default_factory=list)
    calls: int = 0
    limit: EpisodeLimitError | None = None
    failure: RendererError | RolloutsError | None = None
    idle_since: float = field(default_factory=time.perf_counter)

    @property
    def trajectory(self) -> Trajectory:
        return self.recorder.trajectory

    def continued_turn(self, pending: PendingTurn, tools: Any) -> SampledTurn | None:
        """The sampled turn at the end of the part of a prompt that verifiers has in its graph, if `tools` are its."""
        if not pending.prefix_node_ids or not pending.tail:
            return None
        message = pending.trace.nodes[pending.prefix_node_ids[-1]].message
        # The very object: a message that an interceptor of the task has rewritten is not what was sampled.
        turn = next((turn for sampled, turn in reversed(self.turns) if sampled is message), None)
        return None if turn is None or turn.prompt.tools != tools else turn

    def record_outcome(self, trace: Trace) -> None:
        """Record rewards, metrics and the end of its trace. The limit that it reached makes it truncated."""
        trajectory = self.trajectory
        record_outcome(trajectory, trace)
        limit = self.limit
        if not trace.ok and isinstance(self.failure, OVERLONG_ERRORS):  # the harness ended with it
            limit, trajectory.error = overlong_limit(self.failure), ""
        if limit is not None and not trace.errors:
            trajectory.error = ""  # a deadline left no time for an end
        if limit is not None:
            trajectory.done, trajectory.truncated, trajectory.truncation_reason = False, True, limit.reason


def _resolve_engine_clients() -> None:
    """Have verifiers find the client of an `EngineClientConfig`.

    verifiers chooses a client by the type of its configuration and has no registry to add to. Its
    interception servers call `resolve_client` through their own module; there it is wrapped, once. Other
    configurations are not affected.
    """
    original = interception_server.resolve_client
    if getattr(original, "finds_engine_clients", False):
        return

    def resolve_client(config: Any) -> Client:
        return EngineClient.of(config) if isinstance(config, EngineClientConfig) else original(config)

    resolve_client.finds_engine_clients = True  # type: ignore[attr-defined]
    interception_server.resolve_client = resolve_client
    interception_server.logger.addFilter(_is_no_limit)


def _is_no_limit(record: logging.LogRecord) -> bool:
    return not any(isinstance(argument, _LimitReachedError) for argument in record.args or ())


def _sampling_params(base: SamplingParams, config: SamplingConfig) -> SamplingParams:
    """The options of a call: those of verifiers in place of `base`."""
    given = config.model_dump(exclude_none=True)
    template_options = {name: given.pop(name) for name in _TEMPLATE_OPTIONS if given.get(name)}
    if template_options:
        raise InvalidRequestError(
            "sampling", f"{template_options} are options of the chat template; load the renderer with them"
        )
    fields = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids")
    named = {name: given.pop(name) for name in fields if name in given}
    # An engine always reports log-probabilities, and separates what other weights computed. verifiers refuses
    # n > 1.
    for name in ("logprobs", "cache_salt", "n", *_TEMPLATE_OPTIONS):
        given.pop(name, None)
    if named.get("top_k") == -1:  # "off" in vLLM's API
        named["top_k"] = 0
    return replace(base, **named, extra={**base.extra, **given})


def _response(
    request_id: str, model: str, rollout: Rollout, turn: SampledTurn, pending: PendingTurn | None
) -> Response:
    message, recorder = turn.message, rollout.recorder
    calls = []
    for call in message.get("tool_calls") or ():
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        calls.append(ToolCall(id=call["id"], name=name, arguments=text))
    is_cut = rollout.trajectory.turns[turn.index].finish_reason is FinishReason.LENGTH
    counts = turn.counts
    response = Response(
        id=request_id,
        created=0,
        model=model,
        message=AssistantMessage(
            content=message.get("content") or None,
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
        ),
        finish_reason="length" if is_cut else "tool_calls" if calls else "stop",
        usage=Usage(prompt_tokens=counts["prompt_tokens"], completion_tokens=counts["completion_tokens"]),
        tokens=_tokens(recorder, turn, pending) if isinstance(recorder, _TokenRecorder) else None,
    )
    response.raw = serialize_completion(response, model)
    return response


def _tokens(recorder: _TokenRecorder, turn: SampledTurn, pending: PendingTurn | None) -> TurnTokens:
    prompt, completion = turn.prompt.rendered, recorder.completions.pop(turn.index)
    # The messages of a bridged prompt are those after `num_earlier` others.
    is_bridged = turn.prompt.messages is not turn.prompt.conversation
    num_earlier = pending.tail_start if is_bridged and pending is not None else 0
    # Not validated: these are lists of ints and floats, and a validation would copy them.
    tokens = TurnTokens.model_construct(
        prompt_ids=prompt.token_ids,
        bridged=is_bridged,
        completion_ids=turn.completion_ids,
        completion_logprobs=completion.logprobs.tolist(),
        message_spans=[None] * num_earlier + prompt.message_token_spans(),
        is_content=prompt.is_content,
        routed_experts=None if completion.routed_experts is None else _experts(completion.routed_experts),
        sampling_mask=None
        if completion.sampling_masks is None or not all(map(len, completion.sampling_masks))
        else SamplingMask.from_sampling_mask([mask.tolist() for mask in completion.sampling_masks]),
    )
    if is_multimodal(recorder.renderer):
        tokens.mm_token_type_id_map = dict(recorder.renderer.mm_token_type_id_map)
    return tokens


def _experts(experts: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(experts.tobytes())
    return {"data": data, "shape": list(experts.shape), "dtype": str(experts.dtype), "start": 0}
