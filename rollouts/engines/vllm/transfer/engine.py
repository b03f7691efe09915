"""A server, or a fleet of them, whose weights are replaced by the tensors of a trainer."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from rollouts.engines.protocol import GenerateRequest, GenerateResult, InFlight, check_update_arguments
from rollouts.engines.vllm.control.server_control import ServerControl
from rollouts.engines.vllm.control.weight_transfer import Transfer
from rollouts.engines.vllm.transfer.buckets import ExpectedTensors, NamedTensor, buckets, update_info
from rollouts.engines.vllm.transfer.senders import WeightSender
from rollouts.error_texts import describe_exception
from rollouts.errors import ArgumentError, EngineError, UnsafeControlError, WeightUpdateError
from rollouts.numbers import whole_number

log = logging.getLogger("rollouts.engines.vllm")

_BUCKET_BYTES = 2**30


class TransferEngine:
    """An engine whose weights arrive as tensors of a trainer, by vLLM's weight transfer, and not as files.

        engine = TransferEngine(VLLMEngine(url), NCCLSender("10.0.0.1", 29500))
        await engine.update_weights(model.state_dict(), "step-7")

    It takes the place of the engine in `run_episode` and `Runner`. `engine` is a `VLLMEngine` or an `EngineFleet` of
    them; all servers receive each tensor together. They must run in development mode with --weight-transfer-config.
    Tensors are sent in buckets of at most `bucket_bytes`, in each of which `seconds` may pass.

    All servers take the new weights, or none: after a failure, each loads its weights of before again where they came
    from a directory; otherwise it stays paused, and the error says so. `sender` joins the servers at the first update,
    and again after a failure and after servers have come or gone.
    """

    def __init__(
        self, engine: Any, sender: WeightSender, *, bucket_bytes: int = _BUCKET_BYTES, seconds: float = 300.0
    ) -> None:
        if whole_number(bucket_bytes) is None or bucket_bytes < 1:
            raise ArgumentError("bucket_bytes", bucket_bytes, "pass a number of bytes of at least 1")
        self._engine = engine
        self._sender = sender
        self._bucket_bytes = bucket_bytes
        self._seconds = seconds
        self._joined: tuple[str, ...] = ()  # the addresses of the servers that the sender has joined
        self._updating = False

    @property
    def weight_version(self) -> str:
        """The version of the engine."""
        return str(self._engine.weight_version)

    @property
    def vocab_size(self) -> int | None:
        return getattr(self._engine, "vocab_size", None)

    @property
    def control(self) -> Any:
        """The control calls of the engine."""
        return self._engine.control

    @property
    def media_cache_counts(self) -> Any:
        """Those of the engine."""
        return self._engine.media_cache_counts

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Sample from the engine. Raises what the engine raises."""
        result: GenerateResult = await self._engine.generate(request)
        return result

    async def update_weights(
        self, weights: Mapping[str, Any] | Iterable[NamedTensor], version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Send tensors to all servers: a mapping from names to tensors, or pairs of them, which are read once.

        The names are those of the checkpoint files, and every tensor of the checkpoint must come, in its shape; of
        another dtype the servers cast it. Raises `ArgumentError`, `WeightUpdateError`, and `EngineError` where a server
        cannot be reached before the transfer; `UnsafeControlError` while another update runs.
        """
        check_update_arguments(version, in_flight)
        if isinstance(weights, str) or not isinstance(weights, Mapping | Iterable):
            raise ArgumentError("weights", weights, "pass a mapping from names to tensors, or pairs of name and tensor")
        if self._updating:
            raise UnsafeControlError("update_weights", "another update runs; wait for it")
        updating = getattr(self._engine, "updating_weights", nullcontext)
        self._updating = True
        try:
            with updating():
                await self._update(weights.items() if isinstance(weights, Mapping) else weights, version, in_flight)
        finally:
            self._updating = False

    async def close(self) -> None:
        """Leave the servers, and close the engine."""
        await self._leave()
        await self._engine.close()

    # One update.

    async def _update(self, tensors: Iterable[NamedTensor], version: str, in_flight: InFlight) -> None:
        servers = await self._servers()
        controls = list(servers.values())
        reties = all([await control.reties_output_layer() for control in controls])
        expected = ExpectedTensors.of_checkpoint(await controls[0].initial_directory(), reties=reties)
        await self._join(controls)
        begun = await self._begin(controls, in_flight)
        try:
            await self._send(controls, buckets(expected.checked(tensors), self._bucket_bytes))
        except Exception as error:
            states = await asyncio.shield(self._abandon(controls, begun, error))
            text = f"the weights {version!r} were not taken: {error}. {states}"
            raise WeightUpdateError(text).concern(*(control.base_url for control in controls)) from error
        except BaseException as error:
            reason = WeightUpdateError(f"the transfer was ended by {describe_exception(error)}")
            log.error("%s", await asyncio.shield(self._abandon(controls, begun, reason)))
            raise
        finish = [control.finish_transfer(transfer, version) for control, transfer in zip(controls, begun, strict=True)]
        outcomes = await asyncio.gather(*finish, return_exceptions=True)
        failed = {name: error for name, error in zip(servers, outcomes, strict=True) if isinstance(error, Exception)}
        record = getattr(self._engine, "record_weights", None)
        if record is not None and len(failed) < len(servers):
            record(version, failed)
        if failed:
            listed = "; ".join(map(str, failed.values()))
            text = f"{len(failed)} of {len(servers)} servers have not taken the weights {version!r}: {listed}"
            raise WeightUpdateError(text).concern_servers_of(failed.values()) from next(iter(failed.values()))

    async def _servers(self) -> dict[str, ServerControl]:
        """The control calls of the servers that are healthy, by the names of their members in a fleet."""
        engines = getattr(self._engine, "engines", None) or {self._engine.base_url: self._engine}
        controls = {name: each.control for name, each in engines.items() if isinstance(each.control, ServerControl)}
        healthy = await asyncio.gather(*(control.health() for control in controls.values()))
        serving = {name: controls[name] for name, is_healthy in zip(controls, healthy, strict=True) if is_healthy}
        if not serving:
            addresses = (control.base_url for control in controls.values())
            raise WeightUpdateError("no server is healthy; nothing was sent").concern(*addresses)
        return serving

    async def _join(self, controls: Sequence[ServerControl]) -> None:
        """Connect the sender and the workers of these servers, unless they are connected."""
        addresses = tuple(control.base_url for control in controls)
        if self._joined == addresses:
            return
        await self._leave()
        sizes = await asyncio.gather(*(control.world_size() for control in controls))
        joins = [
            control.init_weight_transfer(self._sender.init_info(sum(sizes[:index]), sum(sizes)))
            for index, control in enumerate(controls)
        ]
        try:
            await self._together([*joins, asyncio.to_thread(self._sender.open, sum(sizes))])
        except BaseException:
            self._sender.close()
            raise
        self._joined = addresses

    async def _leave(self) -> None:
        if not self._joined:
            return
        joined, self._joined = self._joined, ()
        await asyncio.to_thread(self._sender.close)
        for control in (await self._servers()).values():
            if control.base_url in joined:
                try:
                    await control.shutdown_weight_transfer()
                except EngineError as error:
                    log.warning("%s could not leave the transport of the trainer: %s", control.base_url, error)

    async def _begin(self, controls: Sequence[ServerControl], in_flight: InFlight) -> list[Transfer]:
        begin = [control.begin_transfer(in_flight) for control in controls]
        outcomes = await asyncio.gather(*begin, return_exceptions=True)
        failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
        started = {
            control: outcome
            for control, outcome in zip(controls, outcomes, strict=True)
            if isinstance(outcome, Transfer)
        }
        if failures:
            listed = "; ".join(map(str, failures))
            states = await self._abandon(list(started), list(started.values()), failures[0])
            error = WeightUpdateError(f"no weights were sent: {listed}. {states}")
            raise error.concern_servers_of(failures) from failures[0]
        return list(started.values())

    async def _send(self, controls: Sequence[ServerControl], parts: Iterable[Sequence[NamedTensor]]) -> None:
        for bucket in parts:
            info = update_info(bucket) | dict(await asyncio.to_thread(self._sender.update_info, bucket))
            receive = [control.receive_weights(info) for control in controls]
            await self._together([*receive, asyncio.to_thread(self._sender.send, bucket)])

    async def _together(self, calls: Iterable[Awaitable[Any]]) -> None:
        """Await calls that wait for each other. Raises what one raises, and `WeightUpdateError` after a time."""
        try:
            async with asyncio.timeout(self._seconds):
                await asyncio.gather(*calls)
        except TimeoutError as error:
            raise WeightUpdateError(f"servers and trainer did not meet within {self._seconds:g} s") from error

    async def _abandon(self, controls: Sequence[ServerControl], begun: Sequence[Transfer], cause: Exception) -> str:
        """Give up a transfer everywhere; what has become of each server."""
        self._sender.close()  # whoever is still in the transport waits for tensors that do not come
        self._joined = ()
        abandon = [control.abandon_transfer(each, cause) for control, each in zip(controls, begun, strict=True)]
        outcomes = await asyncio.gather(*abandon, return_exceptions=True)
        return "; ".join(str(outcome) for outcome in outcomes if isinstance(outcome, Exception))
