"""A vLLM server as an engine: token ids and media in, sampled ids with log-probabilities out."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from dataclasses import replace
from types import TracebackType
from typing import Self

from renderers import RendererError
from rollouts.engines.limits import EngineLimits
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, GenerateResult, check_result
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities, probe
from rollouts.engines.vllm.checks.request_checks import check_request
from rollouts.engines.vllm.control.server_control import ServerControl
from rollouts.engines.vllm.error_context import error_context
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.exchange import Body
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.engines.vllm.http.response import response_error
from rollouts.engines.vllm.media.media_payload import MediaMode, MediaPayload, media_payload
from rollouts.engines.vllm.media.server_media_cache import DEFAULT_MEDIA_CACHE_BYTES, MediaReservation, ServerMediaCache
from rollouts.engines.vllm.resuming import ResumePolicy, continuation, joined, out_of_room, restarts
from rollouts.engines.vllm.single_flight import SingleFlight
from rollouts.engines.vllm.wire.generate_response import Generation, TokenDelta
from rollouts.engines.vllm.wire.request_body import Chunks, request_body
from rollouts.errors import (
    CapabilityError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

log = logging.getLogger("rollouts.engines.vllm")

_GENERATE = "/inference/v1/generate"

#: A caller that is cancelled waits this long for the server to hear of it.
_ABORT_SECONDS = 5.0

#: A server ends what it runs in less; what is left then, it does not run.
_ABORTED_SECONDS = 1.0

#: How often a request is sent again whose media the server has dropped or whose answer broke off.
_RESENDS = 3

#: So many sessions keep the cache salt that they began with.
_REMEMBERED_SESSIONS = 65_536

#: Less than a server takes to start. Whoever talks to it all the time meets its closed connections; after a silence
#: of this length it may be another one.
_QUIET_SECONDS = 5.0

#: Parsing more than this is left to a thread, for the event loop has other requests to serve.
_LARGE_ANSWER = 256 * 2**10


Listener = Callable[[TokenDelta], None]


class VLLMEngine:
    """`Engine` over `/inference/v1/generate` of one vLLM server (0.20 and later).

    On first use the server is asked once what it is and what pixels it wants; `expected` overrides what it says, and a
    contradiction is an error. Every request is checked before it leaves. Each image's data travels once, afterwards
    its hash; a server that has dropped it gets it again. `media` chooses what travels: processed "features", source
    files as "content_parts", or "auto": for each request features where they serve every item of it, else files. Where
    a mode cannot take an item, the error says why, and advises the other mode only where that one can.

    A completion that a pause of the server cuts off waits until it runs again and goes on from its tokens (`resume`).
    Cancelling a call aborts its request on the server. `vocab_size`, where given, refuses ids past it before sending;
    the server does so too. `request_limits` bounds what one request may ask for. `cache_salt` keeps what was computed
    with other weights out of the prefix cache: a salt of model and weight version, the same for all turns of a session.
    """

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        media: MediaMode = "auto",
        vocab_size: int | None = None,
        expected: ExpectedCapabilities | None = None,
        limits: HttpLimits | None = None,
        request_limits: EngineLimits | None = None,
        resume: ResumePolicy | None = None,
        media_cache_bytes: int = DEFAULT_MEDIA_CACHE_BYTES,
        cache_salt: bool = True,
    ) -> None:
        self._media_cache = ServerMediaCache(media_cache_bytes)
        self._connection = ServerConnection(
            base_url, api_key=api_key, limits=limits or HttpLimits(), on_lost=self._may_have_restarted
        )
        self._request_limits = request_limits or EngineLimits()
        self._model = model
        self._media: MediaMode = media
        self._vocab_size = vocab_size
        self._expected = expected or ExpectedCapabilities()
        self._resume = resume or ResumePolicy()
        self._salted = cache_salt
        self._lock = threading.Lock()
        self._capabilities: ServerCapabilities | None = None
        self._looking: SingleFlight[None] = SingleFlight()
        self._server_started: float | None = None  # as the server tells; None where it does not
        self._exchanges = 0
        self._last_heard = 0.0
        self._salts: OrderedDict[str, str] = OrderedDict()
        self._weight_version = "default"  # what vLLM calls the weights that it was started with
        # Request id -> the ids under which the server runs it (its own, or those of the continuations of its samples),
        # and who waits for the answer.
        self._running: dict[str, dict[str, asyncio.Future[Generation]]] = {}
        self._abandoned: set[str] = set()
        self._closed = False
        self.control = ServerControl(
            self._connection,
            self.capabilities,
            forget_media=self._media_cache.clear,
            on_weight_version=self._set_weight_version,
        )

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @property
    def vocab_size(self) -> int | None:
        """As it was given; None: not known."""
        return self._vocab_size

    @property
    def weight_version(self) -> str:
        """The label of the server's weights, as last set through `control` or read off an answer."""
        return self._weight_version

    async def capabilities(self) -> ServerCapabilities:
        """What the server can and wants, asked once; again after a restart of which there is any sign.

        Raises `CapabilityError` and what `ServerConnection.request` raises.
        """
        known = None if self._is_quiet() else self._capabilities
        with error_context(self.base_url, "probe"):
            while known is None:
                await self._looking.run("what the server is", self._look)
                known = self._capabilities
        return known

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample `n` completions.

        Raises `InvalidRequestError`, `OverlongPromptError`, `CapabilityError` before anything is sent;
        `ServerUnreachableError`, `ServerTimeoutError`, `ServerError`, `MissingLogProbsError`, `MalformedResultError`
        and `EngineClosedError` after.
        """
        return await self._generate(request, None)

    async def stream(self, request: GenerateRequest) -> AsyncIterator[TokenDelta]:
        """Yield tokens as they are sampled, over pauses too; raises as `generate` does. Leaving the loop aborts."""
        if request.prompt_logprobs:
            raise InvalidRequestError(request.request_id, "a stream has no place for prompt_logprobs; use generate")
        deltas: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        # What may be drawn anew as a whole is not handed out before it has ended.
        whole = restarts(request)
        sampling = asyncio.ensure_future(self._generate(request, None if whole else deltas.put_nowait))
        sampling.add_done_callback(lambda _: deltas.put_nowait(None))
        try:
            while (delta := await deltas.get()) is not None:
                yield delta
            for completion in (await sampling).completions if whole else ():
                yield TokenDelta(completion.index, completion.token_ids, completion.logprobs)
            await sampling
        finally:
            sampling.cancel()
            await asyncio.wait([sampling])

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests of this engine: their `generate` returns what they have, with `FinishReason.ABORT`.

        A request that the server does not end, for it has not got there yet, ends here.
        """
        with self._lock:
            named = [request_id for request_id in request_ids if request_id in self._running]
            self._abandoned.update(named)
        if not (left := self._abandoned_exchanges(named)):
            return
        await self._abort_on_server(left)
        ends = time.monotonic() + _ABORTED_SECONDS
        while (left := self._abandoned_exchanges(named)) and time.monotonic() < ends:  # noqa: ASYNC110 other loops' too
            await asyncio.sleep(_ABORTED_SECONDS / 50)
        for answering in left.values():
            if not answering.get_loop().is_closed():
                answering.get_loop().call_soon_threadsafe(answering.cancel)

    async def abort_all(self) -> None:
        """End every request of this engine; those of other clients go on."""
        with self._lock:
            named = list(self._running)
        await self.abort(named)

    async def close(self) -> None:
        """Refuse further requests and close the connections."""
        self._closed = True
        await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _abandoned_exchanges(self, named: Iterable[str]) -> dict[str, asyncio.Future[Generation]]:
        with self._lock:
            return {
                name: answering
                for request_id in named
                if request_id in self._abandoned
                for name, answering in self._running[request_id].items()
            }

    # One request.

    async def _generate(self, request: GenerateRequest, listen: Listener | None) -> GenerateResult:
        with error_context(self.base_url, request.request_id):
            return await self._result(request, listen)

    async def _result(self, request: GenerateRequest, listen: Listener | None) -> GenerateResult:
        if self._closed:
            raise EngineClosedError(request.request_id, "the engine is closed")
        self._request_limits.check(request)
        capabilities = await self.capabilities()
        check_request(request, capabilities, vocab_size=self._vocab_size, media=self._media)
        with self._lock:
            if request.request_id in self._running:
                raise EngineError(request.request_id, "a request of this id is running already; give each its own")
            self._running[request.request_id] = {}
        known = self._weight_version
        try:
            answer = await self._exchange(request, request.request_id, listen)
            answers = [answer]
            completions = answer.completions(len(request.prompt_ids), self._weight_version)
            if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
                async with asyncio.TaskGroup() as group:
                    tasks = [group.create_task(self._completed(request, cut, listen, answers)) for cut in completions]
                completions = [task.result() for task in tasks]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        finally:
            with self._lock:
                del self._running[request.request_id]
                self._abandoned.discard(request.request_id)
        prompt_logprobs = None
        if request.prompt_logprobs and any(each.finish_reason is not FinishReason.ABORT for each in completions):
            told = next((each for each in answers if each.has_prompt_logprobs(len(request.prompt_ids))), answer)
            prompt_logprobs = told.prompt_logprobs(request.prompt_ids)
        result = GenerateResult(request.request_id, completions, prompt_logprobs)
        check_result(request, result)
        self._see_versions(completions, known)
        return result

    async def _completed(
        self, request: GenerateRequest, cut: Completion, listen: Listener | None, answers: list[Generation]
    ) -> Completion:
        """A completion, continued for as long as pauses cut it off. Adds what it hears to `answers`."""
        round_ = 0
        while cut.finish_reason is FinishReason.ABORT and request.request_id not in self._abandoned:
            round_ += 1
            if round_ > self._resume.rounds:
                raise EngineError(
                    request.request_id,
                    f"completion {cut.index} was aborted {self._resume.rounds} times without an end; "
                    "pause the server less often, or raise ResumePolicy.rounds",
                )
            await self._until_resumed(request.request_id)
            if request.request_id in self._abandoned:
                return cut
            rest = continuation(request, cut, round_, (await self.capabilities()).max_model_len)
            if rest is None:
                return out_of_room(cut)
            log.info("request %s: cut off after %d tokens, goes on", request.request_id, len(cut.token_ids))
            answer = await self._exchange(rest, request.request_id, _relabelled(listen, cut.index))
            answers.append(answer)
            (drawn,) = answer.completions(len(rest.prompt_ids), self._weight_version)
            cut = replace(drawn, index=cut.index) if restarts(request) else joined(cut, drawn)
        return cut

    async def _until_resumed(self, name: str) -> None:
        """Return once the server is not paused, as far as it tells (in development mode), or `name` is aborted."""
        if not (await self.capabilities()).control:
            return
        pause = self._resume.first_poll_seconds
        try:
            async with asyncio.timeout(self._resume.wait_seconds):
                while name not in self._abandoned and await self.control.is_paused():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, self._resume.longest_poll_seconds)
        except TimeoutError as error:
            waited = self._resume.wait_seconds
            raise ServerTimeoutError(
                name,
                f"{self.base_url} is paused for more than {waited:g} s; resume it, or raise ResumePolicy.wait_seconds",
            ) from error

    async def _exchange(self, request: GenerateRequest, owner: str, listen: Listener | None) -> Generation:
        """Send one request until it is answered: again with data where the server has dropped media."""
        answering = asyncio.ensure_future(self._answered(request, owner, listen))
        with self._lock:
            self._running[owner][request.request_id] = answering
            self._exchanges += 1
        try:
            return await answering
        except (asyncio.CancelledError, ServerTimeoutError) as error:
            await self._abort_on_server([request.request_id])
            task = asyncio.current_task()
            ended_here = isinstance(error, asyncio.CancelledError) and task is not None and not task.cancelling()
            if owner in self._abandoned and ended_here:
                return Generation.aborted(request.request_id, request.sampling.n)
            raise
        finally:
            with self._lock:
                del self._running[owner][request.request_id]
                self._exchanges -= 1
                self._last_heard = time.monotonic()

    async def _answered(self, request: GenerateRequest, owner: str, listen: Listener | None) -> Generation:
        resends = 0
        while True:
            capabilities = await self.capabilities()
            payload = media_payload(request, self._media, capabilities)
            # A server that drops media at once (a small or disabled cache, another client that clears it) would let a
            # request that waits for others to carry them miss them for ever.
            reservation = await self._media_cache.reserve(payload.names, include_all=resends >= _RESENDS - 1)
            answer = Generation(request.request_id, request.sampling.n)
            if owner in self._abandoned:
                self._media_cache.release(reservation)
                return Generation.aborted(request.request_id, request.sampling.n)
            try:
                await self._send(request, payload, reservation, capabilities, answer, listen)
            except ServerUnreachableError:
                # Broken off after its first token, where the connection does not try again; a listener has that token.
                if listen is not None or not answer.has_tokens or resends == _RESENDS:
                    raise
                resends += 1
            except ServerError as error:
                if answer.has_tokens:  # the server had the media, and was running
                    raise
                if error.status == 503 and capabilities.control and await self.control.is_paused():
                    await self._until_resumed(owner)
                    continue
                missing = reservation.omitted and payload.is_cache_miss(error.status, error.body)
                if resends == _RESENDS or not missing:
                    raise
                resends += 1
                log.info("request %s: the server has dropped media; sent again", request.request_id)
                self._media_cache.evict(reservation)
            else:
                payload.check(answer)
                # A connection that broke was tried again with the same body; the server behind it may be another.
                moved = self._capabilities is not capabilities and await self.capabilities() != capabilities
                if not moved or not payload.names or listen is not None or resends == _RESENDS:
                    return answer
                resends += 1

    async def _send(
        self,
        request: GenerateRequest,
        payload: MediaPayload,
        reservation: MediaReservation,
        capabilities: ServerCapabilities,
        answer: Generation,
        listen: Listener | None,
    ) -> None:
        # What others wait for is streamed: its first token tells that the server has it. A streamed answer has no
        # place for the log-probabilities of a prompt.
        first: Chunks = "first" if reservation.included and not request.prompt_logprobs else None
        chunks: Chunks = first if listen is None else "each"
        try:
            # Encoding images takes milliseconds, which other requests of this loop need not wait for.
            try:
                if reservation.included:
                    media = await asyncio.to_thread(payload.body_field, reservation.included)
                else:
                    media = payload.body_field(())
            except RendererError as error:
                raise InvalidRequestError(request.request_id, str(error)) from error
            body = request_body(
                request,
                payload.prompt_ids,
                media,
                model=capabilities.model,
                cache_salt=self._salt(capabilities.model, request.session_id) if self._salted else None,
                chunks=chunks,
                return_prompt=payload.returns_prompt,
            )
            if chunks is None:
                await self._receive(request, body, answer)
            else:
                await self._receive_chunks(request, body, answer, lambda: self._media_cache.commit(reservation), listen)
            if answer.has_tokens:
                self._media_cache.commit(reservation)
        finally:
            self._media_cache.release(reservation)  # of what has not arrived

    async def _receive(self, request: GenerateRequest, body: Body, answer: Generation) -> None:
        reply = await self._connection.request(
            "POST", _GENERATE, name=request.request_id, body=body, headers=_headers(request)
        )
        if reply.status != 200:
            raise response_error(request.request_id, reply, f"generating at {self.base_url}")
        if len(reply.body) > _LARGE_ANSWER:
            await asyncio.to_thread(answer.add_response, reply.body)
        else:
            answer.add_response(reply.body)

    async def _receive_chunks(
        self,
        request: GenerateRequest,
        body: Body,
        answer: Generation,
        commit_media: Callable[[], None],
        listen: Listener | None,
    ) -> None:
        async with self._connection.stream(
            _GENERATE, name=request.request_id, body=body, headers=_headers(request)
        ) as events:
            async for data in events:
                deltas = answer.add_response(data)
                if answer.has_tokens:  # an answer cut off in the queue says nothing of its media
                    commit_media()
                if listen is not None:
                    for delta in deltas:
                        listen(delta)

    async def _abort_on_server(self, served: Iterable[str]) -> None:
        """Tell the server to stop; that it cannot be told is logged, for the caller is ending for another reason."""
        try:
            async with asyncio.timeout(_ABORT_SECONDS):
                await self.control.abort(served)
        except (EngineError, TimeoutError) as error:
            log.warning("could not abort %s on the server: %r", served, error)

    # What is known of the server.

    def _is_quiet(self) -> bool:
        """Whether the server could have restarted since it was last heard of, without a connection to notice it."""
        return self._exchanges == 0 and time.monotonic() - self._last_heard > _QUIET_SECONDS

    async def _look(self) -> None:
        """Ask what the server is, unless it is the process that was asked before."""
        started = await self._start_of_server()
        if self._capabilities is None or started is None or started != self._server_started:
            self._may_have_restarted()
            self._capabilities = await probe(self._connection, model=self._model, expected=self._expected)
        self._server_started = started
        self._last_heard = time.monotonic()

    async def _start_of_server(self) -> float | None:
        """When its process began, in seconds since 1970; None where it does not tell."""
        try:
            return (await self.control.metrics()).process_start_time
        except (CapabilityError, ServerError):
            return None

    def _may_have_restarted(self) -> None:
        """A connection broke, or the server is another process: empty caches, and perhaps other flags."""
        self._media_cache.clear()
        self._capabilities = None

    def _salt(self, model: str, session_id: str | None) -> str:
        salt = _salt_of(model, self._weight_version)
        if session_id is None:
            return salt
        with self._lock:
            salt = self._salts.setdefault(session_id, salt)
            self._salts.move_to_end(session_id)
            if len(self._salts) > _REMEMBERED_SESSIONS:
                self._salts.popitem(last=False)
        return salt

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def _see_versions(self, completions: Iterable[Completion], known: str) -> None:
        """Adopt the label of the last tokens, unless another was set since the request began (`known`)."""
        for completion in completions:
            if completion.weight_spans and self._weight_version == known != completion.weight_spans[-1].version:
                self._set_weight_version(completion.weight_spans[-1].version)


@functools.lru_cache(maxsize=64)
def _salt_of(model: str, weight_version: str) -> str:
    return hashlib.blake2b(f"{model}\0{weight_version}".encode(), digest_size=16).hexdigest()


def _headers(request: GenerateRequest) -> Mapping[str, str]:
    return {} if request.session_id is None else {"X-Session-ID": request.session_id}


def _relabelled(listen: Listener | None, index: int) -> Listener | None:
    """A continuation has one sample, which is sample `index` of the whole."""
    return None if listen is None else lambda delta: listen(replace(delta, index=index))
