"""What the engines of one server share: its state as far as it is known, aborts, streams, the end."""

import asyncio
import logging
import os
from abc import abstractmethod
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Generic, TypeVar

from rollouts.engines.continuation import completed, restarts_from_prompt
from rollouts.engines.http.capability_cache import CapabilityCache
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.http.error_context import error_context
from rollouts.engines.http.running_requests import RunningRequests
from rollouts.engines.kept_ids import with_kept_ids
from rollouts.engines.lora import adapter_exists_error, adapter_labels, checked_adapter_directory
from rollouts.engines.protocol import (
    Completion,
    Engine,
    GenerateRequest,
    GenerateResult,
    InFlight,
    SendTensors,
    TokenDelta,
    TokenListener,
    check_adapter_name,
)
from rollouts.engines.request_limits import check_limits, check_streamable
from rollouts.engines.result_checks import check_result
from rollouts.errors import (
    CapabilityError,
    EngineError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnknownAdapterError,
)

log = logging.getLogger("rollouts.engines.http")

#: How often it is looked whether running requests have ended.
POLL_SECONDS = 0.02

C = TypeVar("C")
T = TypeVar("T")


#: How often a completion that pauses of the server cut off is continued.
_MAX_CONTINUATIONS = 64


class ServerEngine(Engine, Generic[C]):
    """An engine of one server, whose capabilities are a `C`, on one open event loop at a time."""

    #: Whether log-probabilities are those before top-k and top-p, however the server was started.
    _reports_raw = False

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None,
        limits: HttpLimits | None,
    ) -> None:
        self._connection = ServerConnection(base_url, api_key=api_key, limits=limits, on_lost=self._forget_server)
        self._capabilities: CapabilityCache[C] = CapabilityCache(self._probe, self._process, self._forget_server)
        self._requests = RunningRequests()
        self._weight_version = "default"  # vLLM's and SGLang's label of the weights that they were started with
        self._base_versions: dict[str, str] = {}  # by adapter: the label of the base weights when it was first seen
        self._adapters_in_use: Counter[str | None] = Counter()  # by the requests that run
        self._abort_fails = False

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @property
    def weight_version(self) -> str:
        """The label of the server's weights, as last set through `control` or named in a response."""
        return self._weight_version

    @property
    def max_model_len(self) -> int | None:
        """The most tokens of a prompt and its completion together; None before the first request."""
        return getattr(self._capabilities.known, "max_model_len", None)

    @property
    def streams(self) -> bool:
        return True

    async def capabilities(self) -> C:
        """What the server supports and expects, probed once, and again after any sign of a restart.

        Raises `CapabilityError` and what `ServerConnection.request` raises.
        """
        with error_context(self._connection, "probe"):
            return await self._capabilities.get()

    async def check_health(self) -> None:
        """Raises as `control.check_health`."""
        await self.control.check_health()

    async def served_version(self) -> str | None:
        """The label of the weights, which the server is asked for; None where it does not tell."""
        try:
            return str(await self.control.served_version())
        except CapabilityError:
            return None

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample `n` completions. `listen` is called with their tokens as they are sampled, also across pauses.

        Raises `InvalidRequestError`, `ContextLengthError`, `CapabilityError` before anything is sent;
        `ServerUnreachableError`, `ServerTimeoutError`, `ServerError`, `MissingLogProbsError`, `MalformedResultError`
        and `EngineClosedError` after.
        """
        if listen is None:
            return await self._generate(request, None)
        check_streamable(request)
        if not restarts_from_prompt(request):
            return await self._generate(request, listen)
        # A completion that may be sampled again from its beginning is reported only after its end.
        result = await self._generate(request, None)
        for each in result.completions:
            listen(TokenDelta(each.index, each.token_ids, each.logprobs, each.top_logprobs))
        return result

    async def update_weights(
        self, weights: str | os.PathLike[str] | SendTensors, version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Load a checkpoint directory, or what vLLM takes else, by `control.update_weights`.

        Raises `ArgumentError`, `WeightUpdateError`, `CapabilityError` and the errors of a server that does
        not answer.
        """
        await self.control.update_weights(weights, version, in_flight)

    async def load_adapter(self, name: str, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a LoRA adapter, the directory that `save_pretrained` of peft writes, under a name of its own.

        The server reads the directory itself; `check` first looks for its files from this process. Servers
        need --enable-lora, and a vLLM VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Raises `WeightUpdateError` where
        it is not loaded, also for a name that the server has: a name stands for one set of weights. Raises
        `CapabilityError`, `ArgumentError`.

        vLLM could replace the weights behind a name (`load_inplace`), but requests that run would continue
        with the new ones without any label of it, and its prefix cache, which distinguishes adapters by name,
        would keep what the old ones computed.
        """
        with error_context(self._connection, "load_adapter"):
            check_adapter_name(name)
            if check:
                directory = await asyncio.to_thread(checked_adapter_directory, directory)
            if (present := (await self.adapters()).get(name)) is not None:
                raise adapter_exists_error(f"{self.base_url} has", name, present)
            await self.control.load_adapter(name, str(directory))
            self._base_versions[name] = self._weight_version

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter once the requests of this engine that use it have ended.

        Raises `UnknownAdapterError`, `CapabilityError`, `ServerError`.
        """
        with error_context(self._connection, "unload_adapter"):
            while self._adapters_in_use[name]:  # noqa: ASYNC110  an event would be a second record of the requests
                await asyncio.sleep(POLL_SECONDS)
            await self._require_adapter("unload_adapter", name)
            await self.control.unload_adapter(name)
            self._base_versions.pop(name, None)

    async def adapters(self) -> Mapping[str, str]:
        """The loaded adapters: the directory of each by its name."""
        with error_context(self._connection, "adapters"):
            loaded: Mapping[str, str] = await self.control.adapters()
        self._base_versions = {name: self._base_versions.get(name, self._weight_version) for name in loaded}
        return loaded

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests of this engine: their `generate` returns the tokens so far, with `FinishReason.ABORT`.

        A request that has not reached the server yet is ended on this side. Where the server cannot abort by
        id (vLLM's Rust frontend outside development mode) its connection is closed, which ends it there.
        """
        self._connection.enter("abort")
        running = self._requests.mark_aborted(request_ids)
        if server_ids := list(self._requests.aborted_waits(running)):
            received = await self._abort_on_server(server_ids)
            await self._requests.expire(running, at_once=not received)

    async def abort_all(self) -> None:
        """End every request of this engine, and none of other clients."""
        await self.abort(self._requests.ids())

    async def close(self) -> None:
        """Refuse further requests and close. Raises `EngineError` on another event loop that is open."""
        await self._connection.close()

    # What differs between servers.

    @abstractmethod
    async def _probe(self) -> C:
        """What the server supports and expects."""

    @abstractmethod
    async def _process(self) -> float | None:
        """A number that another process of the server would not have; None where the server reports none."""

    @abstractmethod
    async def _check(self, request: GenerateRequest) -> None:
        """Raise what the server would refuse, misinterpret or die of."""

    @abstractmethod
    async def _sample(self, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
        """Sample `n` completions of a checked request, and tell `listen` of their tokens as they are sampled."""

    async def _wait_for_update(self) -> None:
        """Wait while an update of the weights holds new requests back, where the server does not do that itself."""

    async def _wait_until_resumed(self, request_id: str) -> None:
        """Wait until the server is not paused or the request is aborted, where the server does not wait itself."""

    def _forget_server(self) -> None:
        """A connection broke, or the server is another process: its caches are empty, its flags may have changed."""
        self._capabilities.known = None
        self._base_versions.clear()

    # What does not.

    async def _generate(self, request: GenerateRequest, listen: TokenListener | None) -> GenerateResult:
        """Sample `n` completions, and tell `listen` of their tokens as they are sampled."""
        adapter = request.adapter
        with error_context(self._connection, request.request_id), self._using(adapter):
            check_limits(request)
            await self._check(request)
            if adapter is not None and adapter not in self._base_versions:
                await self._require_adapter(request.request_id, adapter)
            await self._wait_for_update()
            version_before = self._weight_version
            with self._requests.running(request.request_id):
                result = await self._sample(request, listen)
            check_result(request, result, vocab_size=self.vocab_size)
            kept = [with_kept_ids(each, request.sampling, raw=self._reports_raw) for each in result.completions]
            result = replace(result, completions=kept)
            self._adopt_version(result.completions, version_before)
            if adapter is None:
                return result
            labelled = adapter_labels(result.completions, adapter, self._base_versions.get(adapter))
            return replace(result, completions=labelled)

    @contextmanager
    def _using(self, adapter: str | None) -> Iterator[None]:
        """Keep an adapter from being unloaded inside the block."""
        self._adapters_in_use[adapter] += 1
        try:
            yield
        finally:
            self._adapters_in_use[adapter] -= 1

    async def _require_adapter(self, request_id: str, adapter: str) -> None:
        """Raise `UnknownAdapterError` unless the server, which is asked, has the adapter."""
        if adapter not in (loaded := await self.adapters()):
            raise UnknownAdapterError(request_id, adapter, loaded)

    async def _abort_on_server(self, request_ids: Iterable[str]) -> bool:
        """Abort requests on the server; whether it received that. A failure is only logged."""
        try:
            async with asyncio.timeout(5.0):  # the longest delay of a caller that is cancelled
                await self.control.abort(request_ids)
        # It has ended, as a rule, and its requests with it; or it has no such route.
        except (ServerUnreachableError, CapabilityError) as error:
            log.debug("could not abort %s: %r", request_ids, error)
        except (EngineError, TimeoutError) as error:
            # A warning once until an abort succeeds: where one fails, those of hundreds of requests do.
            level = logging.DEBUG if self._abort_fails else logging.WARNING
            self._abort_fails = True
            log.log(level, "could not abort %s on the server: %r", list(request_ids), error)
        else:
            self._abort_fails = False
            return True
        return False

    async def _until_aborted(self, root_id: str, request_id: str, response: Awaitable[T]) -> T | None:
        """The response to a request; None where `abort` ends the wait for it.

        `root_id` is the id of the caller's request, of which this one may be a part or a continuation. Where
        the caller is cancelled, or the server does not answer in time, the request is aborted on the server.
        """
        with self._requests.waiting(root_id, request_id) as wait:
            try:
                async with wait:
                    with self._capabilities.exchange():
                        return await response
            except (asyncio.CancelledError, ServerTimeoutError, TimeoutError) as error:
                await self._abort_on_server([request_id])
                if not isinstance(error, TimeoutError) or not wait.expired():
                    raise
                return None

    async def _completed(
        self,
        request: GenerateRequest,
        partial: Completion,
        root_id: str,
        send: Callable[[GenerateRequest], Awaitable[Completion]],
    ) -> Completion:
        """The completion `partial` of a request with what is sampled after each abort by the server.

        `root_id` is the id of the caller's request, which keeps the tokens so far where the caller ends it.
        `send` samples one completion. Raises `EngineError` after 64 aborts, and what `send` raises.
        """
        rounds = 0

        async def context_length() -> int | None:
            nonlocal rounds
            if rounds == _MAX_CONTINUATIONS:
                reason = f"completion {partial.index} was aborted {rounds} times; pause the server less often"
                raise EngineError(request.request_id, reason)
            rounds += 1
            await self._wait_until_resumed(root_id)
            if self._requests.is_aborted(root_id):
                return None
            capabilities: Any = await self._capabilities.get()
            length: int = capabilities.max_model_len
            return length

        return await completed(request, partial, context_length, send)

    def _set_weight_version(self, version: str) -> None:
        self._weight_version = version

    def _adopt_version(self, completions: Iterable[Completion], before: str) -> None:
        """Adopt the label of the last tokens, unless the label was set since the request began with `before`."""
        for completion in completions:
            if completion.weight_spans and self._weight_version == before != completion.weight_spans[-1].version:
                self._set_weight_version(completion.weight_spans[-1].version)
