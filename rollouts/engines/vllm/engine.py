"""A vLLM server as an engine: token ids and media in, sampled ids with log-probabilities out."""

import asyncio
import itertools
import logging
from collections.abc import Iterable
from dataclasses import replace

from renderers import RendererError
from rollouts.calls import gathered, parse_body
from rollouts.engines.continuation import single_samples, with_index
from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.http.engine import ServerEngine
from rollouts.engines.http.responses import response_error
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, GenerateResult, TokenListener
from rollouts.engines.vllm.capabilities import ServerCapabilities, probe
from rollouts.engines.vllm.control import ServerControl
from rollouts.engines.vllm.generate import Chunks, Generation, request_body
from rollouts.engines.vllm.media_mode import MediaMode
from rollouts.engines.vllm.media_payload import MediaPayload, media_payload
from rollouts.engines.vllm.request_checks import CacheSalts, check_request
from rollouts.engines.vllm.server_media_cache import MediaCacheCounts, MediaReservation, ServerMediaCache
from rollouts.errors import InvalidRequestError, ServerError, ServerTimeoutError, ServerUnreachableError

log = logging.getLogger("rollouts.engines.vllm")

_GENERATE = "/inference/v1/generate"

#: How often a request is sent again after the server evicted its media or its response broke off.
_MAX_RESENDS = 3

#: Seconds between two looks whether a paused server runs again: after each, twice as long.
_FIRST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0
#: For how long a request waits for a paused server.
_WAIT_SECONDS = 3600.0


class VLLMEngine(ServerEngine[ServerCapabilities]):
    """`Engine` over `/inference/v1/generate` of one vLLM server (0.31 and later).

    The first request probes what the server is and which pixels it expects. Every request is checked before
    it is sent. The data of a medium are sent once, afterwards only its hash; a server that has evicted them
    gets the data again. `media` chooses what is sent: processed "features", source files as "content_parts",
    or "auto": features for each request where they can carry all of its items, else files. Where a mode
    cannot carry an item, the error gives the reason, and advises the other mode only if that one can. Images
    are sent as PNG files of the pixels as decoded here, because decoders of JPEG differ by version;
    `jpeg_as_file` sends JPEG files unchanged (a tenth of the bytes), for a server whose Pillow and libjpeg
    are those of the trainer. vLLM's Rust frontend decodes JPEG in another way and always gets PNG.

    A completion that a pause of the server cuts off is continued from its tokens once the server runs again.
    Cancelling a call aborts its request on the server. What was computed with other weights is kept out of
    the prefix cache by a salt of the model and the weight version, which is the same for all turns of a
    session.

    A request with an `adapter` is sampled with that LoRA adapter, which `load_adapter` has loaded; the
    version of its tokens is the name of the adapter.
    """

    control: ServerControl

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        media: MediaMode = "auto",
        limits: HttpLimits | None = None,
        jpeg_as_file: bool = False,
    ) -> None:
        # Before the base class has a connection, the loss of which clears this cache.
        self._media_cache = ServerMediaCache()
        super().__init__(base_url, api_key=api_key, limits=limits)
        self._model = model
        self._media: MediaMode = media
        self._jpeg_as_file = jpeg_as_file
        self._salts = CacheSalts()
        self.control = ServerControl(
            self._connection,
            self.capabilities,
            forget_media=self._media_cache.clear,
            on_weight_version=self._set_weight_version,
        )

    @property
    def media_cache_counts(self) -> MediaCacheCounts:
        """How many media items requests carried, and how many they named only, because the server had their data."""
        return self._media_cache.counts

    # One request.

    async def _check(self, request: GenerateRequest) -> None:
        check_request(request, await self._capabilities.get())

    async def _sample(self, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
        if request.sampling.n == 1 or (await self._capabilities.get()).rust_frontend is None:
            generations = [await self._exchange(request, request.request_id, listen)]
        else:  # the Rust frontend samples one at a time
            generations = await gathered(
                self._exchange(single, request.request_id, with_index(listen, index))
                for index, single in enumerate(single_samples(request))
            )
        sampled = [each.completions(len(request.prompt_ids), self._weight_version) for each in generations]
        completions = [replace(each, index=index) for index, each in enumerate(itertools.chain(*sampled))]
        if any(completion.finish_reason is FinishReason.ABORT for completion in completions):
            completions = await gathered(self._complete(request, each, listen, generations) for each in completions)
        result = GenerateResult(request.request_id, completions)
        if request.scores_prompt and any(each.finish_reason is not FinishReason.ABORT for each in completions):
            return _with_prompt_scores(request, result, generations)
        return result

    async def _complete(
        self, request: GenerateRequest, partial: Completion, listen: TokenListener | None, generations: list[Generation]
    ) -> Completion:
        """A completion, continued as often as pauses cut it off. Appends what is sampled to `generations`."""

        async def send(rest_request: GenerateRequest) -> Completion:
            generation = await self._exchange(rest_request, request.request_id, with_index(listen, partial.index))
            generations.append(generation)
            (rest,) = generation.completions(len(rest_request.prompt_ids), self._weight_version)
            return rest

        return await self._completed(request, partial, request.request_id, send)

    async def _wait_until_resumed(self, request_id: str) -> None:
        """Wait until the server, if it reports pauses, is not paused, or the request is aborted."""
        if not (await self.capabilities()).control:
            return
        pause = _FIRST_PAUSE
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                while not self._requests.is_aborted(request_id) and await self.control.is_paused():
                    await asyncio.sleep(pause)
                    pause = min(2 * pause, _LONGEST_PAUSE)
        except TimeoutError as error:
            reason = f"{self.base_url} is paused for more than {_WAIT_SECONDS:g} s; resume it"
            raise ServerTimeoutError(request_id, reason) from error

    async def _exchange(self, request: GenerateRequest, root_id: str, listen: TokenListener | None) -> Generation:
        """Send one request of the caller's `root_id`; it is aborted if the caller is cancelled."""
        sampling = request.sampling
        generation = Generation(request.request_id, sampling.n, top=sampling.top_logprobs)
        sending = self._send_until_complete(request, root_id, listen, generation)
        if await self._until_aborted(root_id, request.request_id, sending) is None:
            generation.end_by_abort()
        return generation

    async def _send_until_complete(
        self, request: GenerateRequest, root_id: str, listen: TokenListener | None, generation: Generation
    ) -> Generation:
        """Send a request, again with media data if the server has lost them; returns `generation`."""
        resends = 0
        while True:
            capabilities = await self._capabilities.get()
            payload = media_payload(request, self._media, capabilities, jpeg_as_file=self._jpeg_as_file)
            # The last attempts carry all data: with a server that evicts media at once (a small or disabled
            # cache, another client that clears it), a request that relies on the data of others could fail
            # for ever.
            media_cache = self._media_cache
            include_all = payload.sends_all or resends >= _MAX_RESENDS - 1
            reservation = await media_cache.reserve(payload.names, include_all=include_all)
            # What an attempt that broke off has received does not count.
            generation.clear()
            # The reservation may have waited for another request, and an abort come meanwhile.
            if self._requests.is_aborted(root_id):
                media_cache.release(reservation)
                generation.end_by_abort()
                return generation
            try:
                await self._send(request, payload, media_cache, reservation, capabilities, generation, listen)
            except ServerUnreachableError:
                # A response that breaks off after its first token is not retried by the connection. It cannot
                # be retried here either where a listener has received that token.
                if listen is not None or not generation.has_tokens or resends == _MAX_RESENDS:
                    raise
                resends += 1
            except ServerError as error:
                if generation.has_tokens:  # so the server had the media and was not paused
                    raise
                if error.status == 503 and capabilities.control and await self.control.is_paused():
                    await self._wait_until_resumed(root_id)
                    continue
                asked = request.sampling.top_logprobs
                if error.status == 400 and asked and capabilities.cuts_likeliest and "logprobs" in str(error):
                    rule = (
                        f"{error.reason}. vLLM up to 0.32 has the sampled token in the place of one of the "
                        f"{asked} likeliest, so that one more is requested: ask for fewer, start the server "
                        f"with --max-logprobs {asked + 1}, or take vLLM 0.33"
                    )
                    raise InvalidRequestError(request.request_id, rule) from error
                if error.status == 404 and request.adapter is not None:
                    await self._require_adapter(root_id, request.adapter)
                missing = reservation.omitted and payload.is_cache_miss(error.status, error.body)
                if resends == _MAX_RESENDS or not missing:
                    raise
                resends += 1
                log.info("request %s: sent again, the server has evicted media", request.request_id)
                media_cache.evict(reservation)
            else:
                payload.check(generation)
                # The connection retries with the same body after it broke; by then another server may have
                # started.
                changed = self._capabilities.known is not capabilities and await self.capabilities() != capabilities
                # A listener has the tokens already: such a completion cannot be sampled again.
                if not changed or not payload.names or listen is not None or resends == _MAX_RESENDS:
                    return generation
                resends += 1

    async def _send(
        self,
        request: GenerateRequest,
        payload: MediaPayload,
        media_cache: ServerMediaCache,
        reservation: MediaReservation,
        capabilities: ServerCapabilities,
        generation: Generation,
        listen: TokenListener | None,
    ) -> None:
        # A request with data that other requests wait for is streamed, because its first token shows that the
        # server has the data. A streamed response cannot carry the log-probabilities of a prompt.
        first: Chunks = "first" if reservation.included and not request.scores_prompt else None
        # Where an abort closes the connection, what has not arrived by then is lost.
        loses_tokens = capabilities.rust_frontend is not None and not capabilities.control
        chunks: Chunks = "each" if listen or (loses_tokens and not request.scores_prompt) else first
        try:
            # Encoding images takes milliseconds; in a thread it does not delay the other requests of this
            # loop.
            try:
                if reservation.included:
                    media = await asyncio.to_thread(payload.body_field, reservation.included)
                else:
                    media = payload.body_field(())
            except RendererError as error:
                raise InvalidRequestError(request.request_id, str(error)) from error
            model = request.adapter or capabilities.model
            body = request_body(
                request,
                payload.prompt_ids,
                media,
                model=model,
                cache_salt=self._salts.salt(model, self._weight_version, request.session_id),
                chunks=chunks,
                return_prompt=payload.returns_prompt,
                cuts_likeliest=capabilities.cuts_likeliest,
            )
            headers = {} if request.session_id is None else {"X-Session-ID": request.session_id}
            if chunks is None:
                response = await self._connection.request(
                    "POST", _GENERATE, name=request.request_id, body=body, headers=headers
                )
                if response.status != 200:
                    raise response_error(request.request_id, response, f"generating at {self.base_url}")
                await parse_body(len(response.body), generation.add_response, response.body)
                if generation.has_tokens:
                    media_cache.commit(reservation)
                return
            async with self._connection.stream(
                _GENERATE, name=request.request_id, body=body, headers=headers
            ) as events:
                async for data in events:
                    deltas = generation.add_response(data)
                    if generation.has_tokens:  # a request aborted in the queue does not show that its media arrived
                        media_cache.commit(reservation)
                    if listen is not None:
                        for delta in deltas:
                            listen(delta)
        finally:
            media_cache.release(reservation)  # of what has not been committed

    # The state of the server.

    async def _probe(self) -> ServerCapabilities:
        return await probe(self._connection, model=self._model)

    async def _process(self) -> float | None:
        """When the server process started, in seconds since 1970; None where its metrics do not contain it."""
        return (await self.control.metrics()).process_start_time

    def _forget_server(self) -> None:
        super()._forget_server()
        self._media_cache.clear()


def _with_prompt_scores(
    request: GenerateRequest, result: GenerateResult, generations: Iterable[Generation]
) -> GenerateResult:
    """The result with the prompt's scores that are requested. Raises `MissingLogProbsError`."""
    first, *others = generations
    tokens, k = len(request.prompt_ids), request.prompt_top_logprobs
    source = next((each for each in (first, *others) if each.has_prompt_logprobs(tokens)), first)
    return replace(
        result,
        prompt_logprobs=source.prompt_logprobs(request.prompt_ids) if request.prompt_logprobs else None,
        prompt_top_logprobs=source.prompt_top_logprobs(tokens, k) if k else None,
    )
