"""An SGLang server as an engine: token ids and images in, sampled ids with log-probabilities out."""

import asyncio
import logging
import os
from dataclasses import replace
from functools import partial

from renderers import RendererError
from rollouts.calls import gathered, parse_body
from rollouts.engines.continuation import single_samples, with_index
from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.http.engine import POLL_SECONDS, ServerEngine
from rollouts.engines.http.responses import response_error
from rollouts.engines.protocol import (
    Completion,
    GenerateRequest,
    GenerateResult,
    InFlight,
    SendTensors,
    TokenListener,
)
from rollouts.engines.sglang.capabilities import SGLangCapabilities, probe, server_info
from rollouts.engines.sglang.control import SGLangControl
from rollouts.engines.sglang.generate import Generation, Parts, request_body
from rollouts.engines.sglang.request_checks import check_request
from rollouts.errors import InvalidRequestError, ServerError

log = logging.getLogger("rollouts.engines.sglang")

_GENERATE = "/generate"

#: Waits before a request is sent again whose id the server still has. It notices a connection that broke
#: within 4 s.
_WAITS_FOR_ID = (0.25, 0.5, 1.0, 2.0, 2.0, 2.0)


class SGLangEngine(ServerEngine[SGLangCapabilities]):
    """`Engine` over `/generate` of one SGLang server (0.5.23 was tried).

        async with SGLangEngine("http://127.0.0.1:30000") as engine:
            result = await engine.generate(GenerateRequest(prompt_ids, SamplingParams(max_tokens=64)))

    The first request probes the server. Every request is checked before it is sent: ids outside of the
    vocabulary, for one, end an SGLang server. Images go as source files (PNG of the pixels as decoded here;
    JPEG files unchanged with `jpeg_as_file`), with every request that shows them: SGLang has no name for an
    image that it has seen. The server returns the ids of a prompt with images as it ran it, and a prompt that
    it tokenised again is a `MalformedResultError`. Videos and sounds are refused, because SGLang tokenises
    their prompts again.

    n samples are n requests, because SGLang gives the samples of one request ids of its own, by which none
    could be aborted. A completion that a pause of the server cuts off is continued from its tokens (the
    server holds the rest back until it runs again). Cancelling a call aborts its request on the server.

    A server takes seeds only with --enable-deterministic-inference; without it they are left out, and a
    warning says so once.

    Log-probabilities are those of the model before temperature: another temperature than 0 or 1 needs a
    server with SGLANG_RETURN_ORIGINAL_LOGPROB=1. `routed_experts` is the number of layers with experts and of
    experts per token, for a server with --enable-return-routed-experts, whose response does not say them.
    """

    control: SGLangControl

    _reports_raw = True

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: HttpLimits | None = None,
        jpeg_as_file: bool = False,
        routed_experts: tuple[int, int] | None = None,
    ) -> None:
        super().__init__(base_url, api_key=api_key, limits=limits)
        self._jpeg_as_file = jpeg_as_file
        self._experts = routed_experts
        self._held = False  # whether new requests wait for an update of the weights
        self._seeds_reported = False  # whether it was logged that the server takes no seeds
        self.control = SGLangControl(self._connection, on_weight_version=self._set_weight_version)

    @property
    def vocab_size(self) -> int | None:
        """The size that the server reported; None before the first request."""
        return getattr(self._capabilities.known, "vocab_size", None)

    # One request.

    async def _check(self, request: GenerateRequest) -> None:
        """Refuse what the server would, or would end of; log once that seeds have no effect (none is sent then)."""
        capabilities = await self._capabilities.get()
        check_request(request, capabilities)
        if request.sampling.seed is not None and not capabilities.deterministic and not self._seeds_reported:
            self._seeds_reported = True
            log.warning(
                "%s takes no seeds: completions cannot be repeated. Start it with "
                "--enable-deterministic-inference where they have to be",
                self.base_url,
            )

    async def _wait_for_update(self) -> None:
        while self._held:  # noqa: ASYNC110
            await asyncio.sleep(POLL_SECONDS)

    async def _sample(self, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
        singles = [request] if request.sampling.n == 1 else single_samples(request)
        sampled = await gathered(
            self._sample_one(single, request.request_id, with_index(listen, index))
            for index, single in enumerate(singles)
        )
        completions = [replace(each, index=index) for index, (each, _) in enumerate(sampled)]
        result, scored = GenerateResult(request.request_id, completions), sampled[0][1]
        if scored is None or not request.scores_prompt:
            return result
        vocab_size = (await self._capabilities.get()).vocab_size
        return replace(
            result,
            prompt_logprobs=scored.prompt_logprobs(vocab_size) if request.prompt_logprobs else None,
            prompt_top_logprobs=scored.prompt_top_logprobs(),
        )

    async def _sample_one(
        self, request: GenerateRequest, root_id: str, listen: TokenListener | None
    ) -> tuple[Completion, Generation | None]:
        """One sample, continued where pauses cut it off (`root_id`: the caller's request), and its start."""
        first: list[Generation] = []

        async def send(part: GenerateRequest) -> Completion:
            if part is not request:  # what was sampled so far may be what the server does not take
                check_request(part, await self._capabilities.get())
            generation = await self._exchange(part, root_id, listen)
            if generation is None:
                return Completion.aborted(0)
            completion = generation.completion(self._experts)
            if len(completion.token_ids) and not first:
                first.append(generation)
            return completion

        completion = await self._completed(request, await send(request), root_id, send)
        return completion, first[0] if first else None

    async def _exchange(
        self, request: GenerateRequest, root_id: str, listen: TokenListener | None
    ) -> Generation | None:
        """Send one request, and abort it on the server if the caller is cancelled; None where `abort` ended
        it before any token arrived."""
        if self._requests.is_aborted(root_id):
            return None
        parts = None if listen is None else Parts(request, listen)
        sending = self._send_under_free_id(request, parts)
        generation = await self._until_aborted(root_id, request.request_id, sending)
        return parts.generation() if generation is None and parts is not None else generation

    async def _send_under_free_id(self, request: GenerateRequest, parts: Parts | None) -> Generation:
        """Send one request, also where an attempt whose connection broke still runs under its id on the server."""
        for seconds in _WAITS_FOR_ID:
            try:
                return await self._send(request, parts)
            except ServerError as error:
                if error.status != 400 or "Duplicate request ID" not in error.body:
                    raise
            await asyncio.sleep(seconds)
        return await self._send(request, parts)

    async def _send(self, request: GenerateRequest, parts: Parts | None) -> Generation:
        """Send one request, whose response is streamed if `parts` are to collect it."""
        capabilities = await self._capabilities.get()
        try:
            encode = partial(
                request_body,
                request,
                capabilities,
                experts=self._experts is not None,
                jpeg_as_file=self._jpeg_as_file,
                stream=parts is not None,
            )
            # Encoding images takes milliseconds; in a thread it does not delay other requests.
            body = await asyncio.to_thread(encode) if request.media else encode()
        except RendererError as error:
            raise InvalidRequestError(request.request_id, str(error)) from error
        if parts is not None:
            async with self._connection.stream(_GENERATE, name=request.request_id, body=body) as events:
                async for event in events:
                    parts.add(event)
            return parts.finished()
        response = await self._connection.request("POST", _GENERATE, name=request.request_id, body=body)
        if response.status != 200:
            raise response_error(request.request_id, response, f"generating at {self.base_url}")
        generation = Generation(request, await parse_body(len(response.body), response.json))
        generation.check_prompt()
        return generation

    # The state of the server.

    async def update_weights(
        self, weights: str | os.PathLike[str] | SendTensors, version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Load the checkpoint directory `weights`, as `control.update_weights` does.

        With "wait", new requests of this engine wait until the running ones have ended; those of other
        clients stay on the server and continue with the new weights.
        """
        if in_flight != "wait":
            await super().update_weights(weights, version, in_flight=in_flight)
            return
        self._held = True
        try:
            while self._requests.ids():  # noqa: ASYNC110  an event would be a second record of the requests
                await asyncio.sleep(POLL_SECONDS)
            # No request of this engine runs, and those of other clients are not ended.
            await super().update_weights(weights, version, in_flight="keep")
        finally:
            self._held = False

    async def _probe(self) -> SGLangCapabilities:
        return await probe(self._connection)

    async def _process(self) -> float | None:
        """The seed that the server drew when it started."""
        seed = (await server_info(self._connection)).get("random_seed")
        return float(seed) if isinstance(seed, int) else None
