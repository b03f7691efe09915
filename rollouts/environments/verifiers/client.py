"""A verifiers client that renders with a renderer of this project and samples from an `Engine`."""

from __future__ import annotations

import base64
import json
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Self, cast
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

from renderers import Message, MultiModalData, RenderedTokens, Renderer, RendererError, RendererPool, is_multimodal
from rollouts.engines.protocol import Completion, Engine, FinishReason, GenerateRequest, SamplingParams
from rollouts.episodes.calls import RendererCalls, renderer_pool
from rollouts.episodes.turns import derived_seed, expecting_request, generate_completion, known_vocab_size
from rollouts.errors import ArgumentError, InvalidRequestError, RolloutsError
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.traces import record_outcome
from rollouts.trajectory.tree import Trajectory

_SAMPLING_FIELDS = ("max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids")
# An engine always reports log-probabilities, and separates what other weights computed. verifiers refuses n > 1.
_NOT_NEEDED = ("logprobs", "cache_salt", "n")
_TEMPLATE_OPTIONS = ("chat_template_kwargs", "reasoning_effort")


class EngineClientConfig(TrainClientConfig):  # type: ignore[misc]  # verifiers has no types without the extra
    """The client configuration that stands for an open `EngineClient` of this process; made by the client."""

    engine_client: str
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
    `ModelContext`, an `AgentConfig` or an `EvalConfig`. A prompt that continues a sampled message of its rollout
    extends the exact sampled tokens through the renderer's bridge, with their images; any other prompt, and one for
    which the bridge is refused, is rendered. The sampling options of the `ModelContext` replace those of `sampling`;
    what a harness itself asks for is not used, as with verifiers' `TrainClient`. Each call of a rollout has its own
    seed, derived from verifiers' `seed` if there is one.

    The trajectory of a rollout is kept until `pop_trajectory` takes it. The end of the block leaves the engine open.
    Raises `ArgumentError` for `sampling.n` other than 1.
    """

    _open: ClassVar[WeakValueDictionary[str, EngineClient]] = WeakValueDictionary()

    def __init__(
        self, engine: Engine, renderer: Renderer | RendererPool, *, sampling: SamplingParams | None = None
    ) -> None:
        self.engine = engine
        self.sampling = SamplingParams() if sampling is None else sampling
        if self.sampling.n != 1:
            raise ArgumentError("sampling.n", self.sampling.n, "verifiers takes one completion for each call")
        self.config = EngineClientConfig(engine_client=uuid.uuid4().hex)
        self._rollouts: dict[str, _Rollout] = {}
        self._given_renderer = renderer
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        self._pool = cast(RendererPool, self._stack.enter_context(renderer_pool(self._given_renderer)))
        self._renderer = RendererCalls(self._pool)
        self._vocab_size = known_vocab_size(self.engine, self._pool)
        self._provenance = Provenance.of(self._pool, self.engine)
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
        """Sample the next message of a rollout. Raises verifiers' `ProviderError`: status 400 for what cannot work."""
        if not isinstance(dialect, ChatDialect):
            raise ProviderError(
                f"EngineClient answers chat completions, not {type(dialect).__name__}; use a harness that sends them",
                status_code=400,
            )
        try:
            return await self._respond(dialect, body, sampling, session_id or uuid.uuid4().hex, turn)
        except (RendererError, InvalidRequestError) as error:
            raise ProviderError(str(error), status_code=400) from error
        except RolloutsError as error:
            raise ProviderError(str(error), status_code=503) from error

    async def _respond(
        self,
        dialect: ChatDialect,
        body: Mapping[str, Any],
        sampling: SamplingConfig,
        session_id: str,
        turn: PendingTurn | None,
    ) -> Response:
        request = dialect.parse_request(body) if turn is None else turn
        messages: list[Message] = [
            message_to_wire(each) for each in (request.messages if turn is None else request.prompt)
        ]
        tools = [tool_to_wire(tool) for tool in request.tools] if request.tools else None
        rollout = self._rollouts.get(session_id)
        if rollout is None:
            rollout = self._rollouts[session_id] = _Rollout(Trajectory(session_id, provenance=self._provenance))
        call, rollout.calls = rollout.calls, rollout.calls + 1

        with expecting_request(self.engine):
            prepared = await self._prepare(rollout, turn, messages, tools)
        prompt = prepared.prompt
        generate = GenerateRequest(
            prompt_ids=prompt.token_ids,
            sampling=self._sampling_params(sampling, call),
            multi_modal_data=prompt.multi_modal_data,
            session_id=session_id,
            request_id=f"{session_id}-{call}",
            placeholder_token_ids=prompt.placeholder_token_ids,
            sampled=prepared.sampled,
        )
        sent_at = time.monotonic()
        completion = await generate_completion(self.engine, generate, self._vocab_size)
        seconds = time.monotonic() - sent_at
        with expecting_request(self.engine):
            message, _ = await self._renderer.parse(completion.token_ids.tolist(), tools, prompt)
        node = rollout.trajectory.add_turn(prompt, completion, message, messages=prepared.messages, seconds=seconds)

        response = _response(message, completion, generate.request_id, body["model"], prepared)
        if is_multimodal(self._pool):
            response.tokens.mm_token_type_id_map = dict(self._pool.mm_token_type_id_map)
        sampled = [*prepared.sampled, (len(prompt), len(prompt) + len(completion.token_ids))]
        rollout.turns.append(_SampledTurn(response.message, node, prompt.multi_modal_data, sampled))
        return response

    async def _prepare(
        self, rollout: _Rollout, turn: PendingTurn | None, messages: Sequence[Message], tools: Any
    ) -> _Prepared:
        """The next prompt: bridged where verifiers found that it continues a message sampled here, else rendered."""
        previous = None if turn is None else _continued_turn(turn, rollout.turns)
        if turn is not None and previous is not None:
            ids = rollout.trajectory.token_ids(previous.node).tolist()
            start = len(ids) - len(rollout.trajectory.nodes[previous.node])
            before = RenderedTokens(ids[:start], multi_modal_data=previous.media)
            history, new = messages[: turn.tail_start - 1], messages[turn.tail_start :]
            bridged = await self._renderer.bridge(before, ids[start:], new, tools, history)
            if bridged is not None:
                return _Prepared(bridged, new, previous.sampled, turn.tail_start)
        prompt = await self._renderer.render(messages, tools)
        return _Prepared(prompt, messages, [(span.start, span.end) for span in prompt.spans if span.sampled], 0)

    def _sampling_params(self, config: SamplingConfig, call: int) -> SamplingParams:
        given = config.model_dump(exclude_none=True)
        template_options = {name: given.pop(name) for name in _TEMPLATE_OPTIONS if given.get(name)}
        if template_options:
            raise InvalidRequestError(
                "sampling", f"{template_options} are options of the chat template; load the renderer with them"
            )
        named = {name: given.pop(name) for name in _SAMPLING_FIELDS if name in given}
        for name in (*_NOT_NEEDED, *_TEMPLATE_OPTIONS):
            given.pop(name, None)
        if named.get("top_k") == -1:  # "off" in vLLM's API
            named["top_k"] = 0
        seed = named.pop("seed", None)
        named["seed"] = None if seed is None else derived_seed(seed, call)
        params = replace(self.sampling, **named, extra={**self.sampling.extra, **given})
        return params if params.stop_token_ids else replace(params, stop_token_ids=self._renderer.stop_token_ids())

    def pop_trajectory(self, trace: Trace) -> Trajectory:
        """The exact tree of a rollout with the rewards and metrics of its trace, finished; the client forgets it.

        `trace.reward` is recorded on the last turn, whose info has each reward with its weight, the stop condition,
        the agent and the task; `metrics` are the trace's. Without a call of the model the tree is empty.
        """
        trajectory = self.forget(trace.id)
        record_outcome(trajectory, trace)
        trajectory.finish()
        return trajectory

    def forget(self, session_id: str) -> Trajectory:
        """The growing tree of a rollout, which the client no longer keeps; an empty one of a rollout without a call."""
        rollout = self._rollouts.pop(session_id, None)
        return Trajectory(session_id, provenance=self._provenance) if rollout is None else rollout.trajectory

    async def close(self) -> None:
        """Do nothing: verifiers closes a client with each of its servers, and other servers may use this one."""


@dataclass(frozen=True, slots=True)
class _SampledTurn:
    """A sampled message, as it is in verifiers' trace, and what a prompt that continues it needs."""

    message: AssistantMessage
    node: int
    media: MultiModalData | None
    sampled: list[tuple[int, int]]


@dataclass(slots=True)
class _Rollout:
    """One rollout: its tree, its sampled turns, and how many calls it has made, failed ones too."""

    trajectory: Trajectory
    turns: list[_SampledTurn] = field(default_factory=list)
    calls: int = 0


@dataclass(frozen=True, slots=True)
class _Prepared:
    """A prompt; the messages that its indices refer to, after `num_earlier` others; the ranges sampled before."""

    prompt: RenderedTokens
    messages: Sequence[Message]
    sampled: list[tuple[int, int]]
    num_earlier: int


def _resolve_engine_clients() -> None:
    """Have verifiers find the client of an `EngineClientConfig`.

    verifiers chooses a client by the type of its configuration and has no registry to add to. Its interception servers
    call `resolve_client` through their own module; there it is wrapped, once. Other configurations are not affected.
    """
    original = interception_server.resolve_client
    if getattr(original, "finds_engine_clients", False):
        return

    def resolve_client(config: Any) -> Client:
        return EngineClient.of(config) if isinstance(config, EngineClientConfig) else original(config)

    resolve_client.finds_engine_clients = True  # type: ignore[attr-defined]
    interception_server.resolve_client = resolve_client


def _continued_turn(turn: PendingTurn, turns: Sequence[_SampledTurn]) -> _SampledTurn | None:
    """The sampled turn at the end of the part of the prompt that verifiers has in its graph."""
    if not turn.prefix_node_ids or not turn.tail:
        return None
    message = turn.trace.nodes[turn.prefix_node_ids[-1]].message
    # The very object: a message that an interceptor of the task has rewritten is not what was sampled.
    return next((each for each in reversed(turns) if each.message is message), None)


def _response(message: Message, completion: Completion, request_id: str, model: str, prepared: _Prepared) -> Response:
    calls = [
        ToolCall(id=call["id"], name=call["function"]["name"], arguments=_json_text(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
    ]
    finish_reason = "length" if completion.finish_reason is FinishReason.LENGTH else "tool_calls" if calls else "stop"
    prompt = prepared.prompt
    # Not validated: these are lists of ints and floats, and a validation would copy them.
    tokens = TurnTokens.model_construct(
        prompt_ids=prompt.token_ids,
        bridged=prepared.num_earlier > 0,
        completion_ids=completion.token_ids.tolist(),
        completion_logprobs=completion.logprobs.tolist(),
        message_spans=[None] * prepared.num_earlier + prompt.message_token_spans(),
        is_content=prompt.is_content,
        routed_experts=None if completion.routed_experts is None else _experts(completion.routed_experts),
        sampling_mask=None
        if completion.sampling_masks is None
        else SamplingMask.from_sampling_mask([mask.tolist() for mask in completion.sampling_masks]),
    )
    response = Response(
        id=request_id,
        created=0,
        model=model,
        message=AssistantMessage(
            content=message.get("content") or None,
            reasoning_content=message.get("reasoning_content"),
            tool_calls=calls or None,
        ),
        finish_reason=finish_reason,
        usage=Usage(prompt_tokens=len(prompt), completion_tokens=len(completion.token_ids)),
        tokens=tokens,
    )
    response.raw = serialize_completion(response, model)
    return response


def _json_text(arguments: Any) -> str:
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def _experts(experts: np.ndarray) -> dict[str, Any]:
    data = base64.b64encode(experts.tobytes())
    return {"data": data, "shape": list(experts.shape), "dtype": str(experts.dtype), "start": 0}
