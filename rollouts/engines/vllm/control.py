"""Everything that a trainer does with a vLLM server except generating, in the orders that do not kill it.

What the calls do to the caches of a server, measured with vLLM 0.32.0 (media: pixels by hash; encoder: the
outputs of the vision tower; prefix: the KV cache of prompts):

    call                                         media     encoder    prefix
    pause("abort"), pause("wait")                cleared   cleared    cleared
    pause("keep"), any with clear_cache=False    kept      kept       kept
    sleep(0)                                     kept      kept       kept
    sleep(1), sleep(2)                           cleared   cleared    cleared
    vLLM's reload_weights by itself              kept      half       kept
    reset_mm_cache                               cleared   kept       kept
    reset_encoder_cache                          kept      cleared    kept
    reset_prefix_cache                           kept      kept       cleared, unless requests hold blocks of it
    update_weight_version, abort, abort_all      kept      kept       kept

"Half": the workers drop entries that the scheduler still counts on, and the next request with a known image
kills the engine.

A request whose image lies in the part of its prompt that the prefix cache holds reaches the workers without
pixels (vLLM's `strip_covered_mm_data`). If the caches are cleared while the server still has that request
(running, frozen by "keep", or put back into the queue), the image has to be encoded again, without pixels,
and the engine dies. (Model runner V1 of vLLM 0.32 does this: on CPUs, and elsewhere where it is selected; a
client cannot see which one runs.) Therefore the caches of a server that takes media are emptied only after
all its requests have ended.

vLLM's own reload leaves caches of the old weights, and one that fails leaves weights without storage: the
server then reports that it is healthy and dies with the next request. A server is therefore resumed only with
weights that loaded. Tensors that a trainer sends (vLLM's weight transfer) take four calls:

    init_weight_transfer_engine     once: the workers join the trainer's transport
    start_weight_update             the parameters of the model lose their storage
    update_weights                  once for each bucket of tensors
    finish_weight_update            the parameters are complete; the version label is set
"""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from rollouts.engines.http.address import redacted
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.control import HttpControl, MemoryTag, call_name, check_tags
from rollouts.engines.http.error_context import name_errors_after_methods
from rollouts.engines.http.responses import HttpResponse, excerpt, response_error
from rollouts.engines.protocol import InFlight, SendTensors, check_update_arguments, check_version
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.checkpoint_files import ExpectedTensors, check_checkpoint, check_tied_head
from rollouts.engines.vllm.metrics import ServerMetrics
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.engines.weight_deltas import ABOUT, ChangedLayers, WeightDelta, delta_chain, deltas_after
from rollouts.errors import (
    CapabilityError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    RolloutsError,
    ServerError,
    ServerUnreachableError,
    WeightUpdateError,
    describe_exception,
)
from rollouts.values import check_choice

log = logging.getLogger("rollouts.engines.vllm")


#: What the server puts before the id of a request. An abort without it gets status 200 and does nothing.
REQUEST_ID_PREFIX = "generate-tokens-"


@dataclass(slots=True)
class _State:
    """The state of a server as the calls of this process left it. Another process of the server has another one.

    `loaded_directory` holds the weights that were loaded last, unless a trainer has sent others since
    (`was_transferred`), and `layers` those of them that weight deltas have changed; `unusable_weights` is the
    reason why the server must not run with the weights that it has, None where it may. `paused_by_update`: an
    update has paused the server, and the next one that succeeds resumes it. `sleep_level` is that of the last
    call; since then, the weights have memory again, and were loaded.
    """

    loaded_directory: str | None = None
    layers: ChangedLayers | None = None
    was_transferred: bool = False
    unusable_weights: str | None = None
    paused_by_update: bool = False
    sleep_level: int = 0
    weights_have_memory: bool = False
    weights_loaded: bool = False


@name_errors_after_methods
class ServerControl(HttpControl):
    """The control calls of one server. Most of them need VLLM_SERVER_DEV_MODE=1 in the environment of the server.

    `forget_media` is called before and after every call that makes the server drop pixels;
    `on_weight_version` is called with each new label. All calls raise `CapabilityError` where the server has
    no such route, `ServerError` where it refuses, `EngineError` where the call would do damage and was not
    sent, and the errors of `ServerConnection.request`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        capabilities: Callable[[], Awaitable[ServerCapabilities]],
        *,
        forget_media: Callable[[], None] = lambda: None,
        on_weight_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        super().__init__(connection, on_weight_version=on_weight_version)
        self._capabilities = capabilities
        self._forget_media = forget_media
        self._state = _State()
        self._process_start_time: float | None = None
        self._updating = False

    # Pausing.

    async def pause(self, mode: InFlight = "abort", *, clear_cache: bool | None = None) -> None:
        """Stop generating; returns once no request runs.

        Requests in flight end with the tokens that they have and finish reason "abort" (mode "abort"), are
        finished first ("wait"; this call takes as long), or stay and continue after `resume` ("keep"). New
        requests wait for `resume`, or get status 503 (vLLM 0.33).

        `clear_cache` empties the caches; by default "abort" and "wait" do and "keep" does not. On a server
        that takes media no request may be left while that happens: "wait" then ends the requests in the
        server's queue as "abort" does (a `VLLMEngine` continues them after `resume`), and "keep" with
        `clear_cache=True` raises `EngineError`. On a server of text alone, requests frozen by "keep" are
        computed again after `resume`.
        """
        check_choice("mode", mode, InFlight)
        self._state.paused_by_update = False
        clears = mode != "keep" if clear_cache is None else clear_cache
        requests_remain = clears and mode != "abort" and await self._takes_media()
        if requests_remain and mode == "keep":
            raise EngineError(
                "pause",
                'mode "keep" with clear_cache=True: after `resume` a frozen request with an image would have to encode '
                "it again, of which vLLM dies. Leave clear_cache out (the caches still belong to these weights), or "
                'use mode "abort", after which every VLLMEngine continues its completions',
            )
        with self._media_forgotten(clears):
            if requests_remain:
                await self._send_pause("wait", clear_cache=False)
                mode = "abort"  # ends what was preempted, and what arrived in the meantime
            await self._send_pause(mode, clear_cache=clears)

    async def resume(self) -> None:
        """Continue after `pause`. Refused while the server sleeps or holds weights that would kill it."""
        self._refuse_during_update("resume")
        await self._refuse_unusable_weights("resume")
        if (level := await self._sleep_level()) > 0:
            raise EngineError(
                "resume", f"the server sleeps (level {level}): it would run without its memory. Use wake_up"
            )
        await self._send_resume()

    async def is_paused(self) -> bool:
        """Whether the server generates nothing for now. True also while it sleeps."""
        response = await self._call("GET", "/is_paused", "reading whether it is paused")
        if not isinstance(paused := _required_field(response, "is_paused"), bool):
            raise MalformedResultError(response.name, f"`is_paused` is {paused!r}, not true or false")
        return paused

    # Sleeping.

    async def sleep(self, level: int = 1) -> None:
        """Abort what runs and free memory for others. Level 0 frees none and keeps the caches; 1 moves the
        weights to the host's memory; 2 drops the weights.

        Frees nothing on a CPU; elsewhere the server needs --enable-sleep-mode.
        """
        if level not in (0, 1, 2):
            raise InvalidRequestError("sleep", f"level is {level!r}, not 0, 1 or 2")
        self._refuse_during_update("sleep")
        if (current := await self._sleep_level()) > 0:
            raise EngineError("sleep", f"the server sleeps already (level {current}); wake it up first")
        with self._media_forgotten(level > 0):
            await self._call("POST", "/sleep", "putting it to sleep", params={"level": level})
        state = self._state
        state.sleep_level, state.weights_have_memory, state.weights_loaded = level, False, False

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate memory again: all of it, or that of `tags`. Generation continues once all memory is back.

        After `sleep(2)` the server has no weights. Then only this order is allowed: `wake_up(["weights"])`,
        `update_weights(...)`, `wake_up()`.
        """
        self._refuse_during_update("wake_up")
        await self._refuse_unusable_weights("wake_up")
        check_tags(tags)
        wakes_all = tags is None or set(tags) != {"weights"}
        if wakes_all and not self._state.weights_loaded and await self._sleep_level() == 2:
            raise EngineError(
                "wake_up",
                "the weights were dropped (level 2), the server would generate with whatever is in their memory. Use "
                'wake_up(["weights"]), then update_weights(directory, version), then wake_up()',
            )
        query = "&".join(f"tags={tag}" for tag in tags or ())
        response = await self._call("POST", f"/wake_up?{query}" if query else "/wake_up", "waking it up")
        self._state.weights_have_memory |= tags is None or "weights" in tags
        if json_object(response).get("status", "awake") == "awake":
            self._state.sleep_level = 0

    async def is_sleeping(self) -> bool:
        """Whether memory is freed. False for a server that is only paused, where vLLM's own route returns true."""
        return await self._sleep_level() > 0

    # Caches.

    async def reset_prefix_cache(self, *, preempt: bool = False) -> None:
        """Empty the KV cache of prompts.

        While running requests hold blocks of it vLLM resets nothing: `ServerError`. `preempt` puts them back
        into the queue; they are computed again with the weights of that time. On a server that takes media
        that could kill it, and raises `EngineError` where any request runs.
        """
        preempts = preempt and not await self._takes_media()
        response = await self._call(
            "POST", "/reset_prefix_cache", "resetting the prefix cache", params={"reset_running_requests": preempts}
        )
        if response.body:
            done = json_object(response).get("success") is True
        else:  # up to vLLM 0.31, where running requests prevent the reset without an error
            done = preempts or (await self.metrics()).running == 0
        if not done and preempt:
            raise EngineError(
                "reset_prefix_cache",
                "requests run, and one with an image, put back into the queue, has to encode the image again, of which "
                'vLLM dies. Use pause("abort"), which empties the caches too; every VLLMEngine continues its '
                "completions after resume()",
            )
        if not done:
            raise ServerError(
                "reset_prefix_cache",
                "the prefix cache was not reset, for requests hold blocks of it; pause first, or preempt=True",
                status=response.status,
                body=response.body[:200].decode(errors="replace"),
            )

    async def reset_mm_cache(self) -> None:
        """Empty the cache of pixels; each item is sent again on its next use."""
        with self._media_forgotten():
            await self._call("POST", "/reset_mm_cache", "resetting the cache of media")

    async def reset_encoder_cache(self) -> None:
        """Empty the cache of the vision tower's outputs. Refused unless the server is paused: a running
        request may need an entry, and the server's count of running requests lags behind.
        """
        if not await self.is_paused():
            raise EngineError(
                "reset_encoder_cache", "running requests may need entries of the encoder cache; pause first"
            )
        await self._call("POST", "/reset_encoder_cache", "resetting the encoder cache")

    # Weights.

    async def update_weights(
        self,
        weights: str | os.PathLike[str] | SendTensors,
        version: str,
        in_flight: InFlight = "abort",
        *,
        check: bool = True,
    ) -> None:
        """A complete weight update: pause, load, empty every cache, label, resume.

        `weights` is a checkpoint directory of the same model, which the server reads itself, or a function
        that sends tensors (`SendTensors`) to a server that has joined the trainer's transport
        (`init_weight_transfer`). `check` first checks the files of a directory from this process, which needs
        the same file system here; without it (the server is elsewhere, or loads another format) a wrong
        directory leaves a server that has to be restarted.

        `in_flight` decides about running requests: "abort" ends them and every `VLLMEngine` continues its own
        from the tokens that they have, with the new weights; "wait" finishes them with the old ones; "keep"
        leaves them in the server, which computes them again and continues with the new weights. A server that
        takes media would die of that: there "keep" does the same as "abort". Cached results of the old
        weights are never used with the new ones. A server that was paused or asleep before stays so; asleep,
        its weights need memory.

        Raises `WeightUpdateError` where the weights are not the new ones afterwards; its text says which they
        are and whether the server runs. A cancelled call still completes the update before it raises
        `CancelledError`.
        """
        task = asyncio.ensure_future(self._update_weights(weights, version, in_flight, check))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a cancelled update of the weights failed: %s", error)
            raise

    async def update_weight_version(self, version: str) -> None:
        """Label tokens sampled from now on."""
        check_version("version", version)
        content = {"new_version": version}
        await self._call("POST", "/update_weight_version", "labelling the weights", content=content)
        self._on_weight_version(version)

    async def served_version(self) -> str:
        """The label of the weights that the server has ("default" until one is set)."""
        response = await self._call("GET", "/weight_info", "reading the weight version")
        return str(_required_field(response, "weight_version"))

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let the workers join the transport of a trainer; `init_info` is what the server's backend expects.

        Raises `CapabilityError` for a server without --weight-transfer-config.
        """
        path = "/init_weight_transfer_engine"
        try:
            await self._call("POST", path, "joining the trainer", content={"init_info": dict(init_info)})
        except ServerError as error:
            if "Weight transfer not configured" not in error.body:
                raise
            reason = (
                f"{self.base_url} takes no weights from a trainer; start it with --weight-transfer-config "
                '\'{"backend": "nccl"}\' (or "ipc", on the machine of the trainer)'
            )
            raise CapabilityError("init_weight_transfer", reason) from error

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter of a directory under a name. Raises `WeightUpdateError`."""
        response = await self._call_adapters("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if response.status != 200:
            error = response_error("load_adapter", response, f"loading the adapter {name!r} of {path}")
            raise WeightUpdateError(f"{self.base_url} has not loaded an adapter: {error.reason}") from error

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter, which no request may use."""
        response = await self._call_adapters("/v1/unload_lora_adapter", {"lora_name": name})
        if response.status != 200:
            raise response_error("unload_adapter", response, f"unloading the adapter {name!r}")

    # Ending requests.

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids of their `GenerateRequest`; each returns the tokens it has, finish reason "abort".

        The server does not report ids that it does not run. Needs no development mode, except for vLLM's Rust
        frontend: without it, only closing the connection of a request ends it there, and this raises
        `CapabilityError`.
        """
        ids = list(request_ids)
        if not ids:  # an empty list would end all requests
            return
        path = "/inference/v1/abort_requests"
        served = {"request_ids": [f"{REQUEST_ID_PREFIX}{request_id}" for request_id in ids]}
        response = await self._request("POST", path, content=served)
        if response.status in (404, 405):  # up to vLLM 0.31
            response = await self._request("POST", "/abort_requests", content=served)
        elif response.status == 501:  # the Rust frontend, which adds no prefix to ids
            response = await self._request("POST", "/abort_requests", content={"request_ids": ids})
            if response.status == 404:
                raise CapabilityError(
                    "abort",
                    f"{self.base_url}, vLLM's Rust frontend, aborts requests by id only if it was started "
                    "with VLLM_SERVER_DEV_MODE=1. A request ends when its connection is closed: cancel its "
                    "call, or use VLLMEngine.abort",
                )
        self._checked(response, path, "aborting requests")

    async def abort_all(self) -> None:
        """End every request of every client."""
        await self._call("POST", "/abort_requests", "aborting all requests", content={})

    # Monitoring.

    async def metrics(self) -> ServerMetrics:
        """Every counter and gauge of the server."""
        body = self._checked(await self._request("GET", "/metrics"), "/metrics", "reading metrics").body
        return ServerMetrics.parse(body.decode("utf-8", errors="replace"))

    # An update of the weights.

    async def _update_weights(
        self, weights: str | os.PathLike[str] | SendTensors, version: str, in_flight: InFlight, check: bool
    ) -> None:
        check_update_arguments(version, in_flight)
        self._refuse_during_update("update_weights")
        self._updating = True
        try:
            await self._forget_if_restarted()
            # Every check that needs no pause comes before the pause.
            load = await self._loader(weights, version, check)
            if not self._state.weights_have_memory and (level := await self._sleep_level()) > 0:
                raise EngineError(
                    "update_weights",
                    f'the server sleeps (level {level}), its weights have no memory. wake_up(["weights"]) first',
                )
            # A pause that a failed update has left is not the caller's: this update ends it.
            stays_paused = await self.is_paused() and not self._state.paused_by_update
            if in_flight == "keep" and await self._takes_media():
                log.info("%s takes media: requests in flight are ended and continued, not kept", self.base_url)
                in_flight = "abort"
            with self._media_forgotten():
                previous = await self._pause_for_update(in_flight, stays_paused)
                try:
                    await load()
                except WeightUpdateError as failure:
                    await self._restore(previous, failure, stays_paused)
                try:
                    await self._reset_all()
                    await self.update_weight_version(version)
                except EngineError as error:
                    raise WeightUpdateError(
                        f"{self.base_url} has the weights {version!r}, but may still hold cached results or "
                        f"the label of the weights before, and was left paused: {error}. Repeat the update"
                    ) from error
            if not stays_paused:
                await self._send_resume()
        finally:
            self._updating = False

    async def _loader(
        self, weights: str | os.PathLike[str] | SendTensors, version: str, check: bool
    ) -> Callable[[], Awaitable[None]]:
        """The call that brings the weights into a paused server, after the checks of their files."""
        if not check and not callable(weights):
            return partial(self._load, str(weights))
        initial = await self._initial_directory()  # later checkpoints may lack tensors
        if callable(weights):
            expected = await asyncio.to_thread(ExpectedTensors.of_checkpoint, initial)
            return partial(self._receive, weights, version, expected)
        path = await asyncio.to_thread(Path(weights).absolute)
        if not await asyncio.to_thread((path / ABOUT).is_file):
            await asyncio.to_thread(check_checkpoint, path, like=None if initial is None else Path(initial))
            return partial(self._load, str(path))
        await self._require_whole_weights(path)
        served = await self.served_version()
        deltas = added = await asyncio.to_thread(deltas_after, path, served)
        # Until they are loaded, the files are not those of the weights in use.
        layers, self._state.layers = self._state.layers, None
        if layers is not None and layers.newest == added[0].base_directory:
            whole = layers.whole
        else:
            layers, (whole, earlier) = None, await asyncio.to_thread(delta_chain, added[0].base_directory)
            deltas = [*earlier, *added]
        await asyncio.to_thread(check_checkpoint, whole, like=None if initial is None else Path(initial))
        for delta in added:
            await asyncio.to_thread(check_tied_head, whole, delta.shapes)
        layers = layers or ChangedLayers(whole, path.parent)
        await asyncio.to_thread(layers.apply, deltas)
        return partial(self._load, str(path), layers, added)

    async def _initial_directory(self) -> str | None:
        """The checkpoint that the server was started with, by its own path; None where it does not report it."""
        model = (await self._capabilities()).model
        response = await self._request("GET", "/v1/models")
        cards = json_object(response).get("data") if response.status == 200 else None
        roots = [card.get("root") for card in cards or () if isinstance(card, dict) and card.get("id") == model]
        return roots[0] if roots and isinstance(roots[0], str) else None

    async def _pause_for_update(self, mode: InFlight, stays_paused: bool) -> str | None:
        """Pause the server; the directory of the weights that it has, None where it is not known."""
        try:
            await self.pause(mode, clear_cache=True)
            self._state.paused_by_update = not stays_paused
        except ServerUnreachableError:
            raise
        except EngineError:
            # The pause may have taken effect. Requests with the old weights may continue.
            if not stays_paused:
                try:
                    await self._send_resume()
                except EngineError as error:
                    log.warning("%s may be left paused: %s", self.base_url, error)
            raise
        return None if self._state.was_transferred else self._state.loaded_directory or await self._initial_directory()

    async def _load(
        self,
        path: str,
        layers: ChangedLayers | None = None,
        deltas: Sequence[WeightDelta] = (),
    ) -> None:
        """Let the workers read a checkpoint, or those `layers` of it that `deltas` change.

        After a `WeightUpdateError` the server's weights are unusable.
        """
        files = path if layers is None else str(await asyncio.to_thread(layers.directory_of, deltas))
        content = {"method": "reload_weights", "kwargs": {"weights_path": files}}
        # Before the call: where its end is not seen, nobody knows which weights the server has.
        self._state.unusable_weights = f"a reload of {path} was begun and not seen to end"
        try:
            response = await self._call("POST", "/collective_rpc", "reloading the weights", content=content)
            results = _required_field(response, "results")
            if not isinstance(results, list) or any(result is not None for result in results):
                raise MalformedResultError("reload_weights", f"the workers returned {redacted(str(results))[:200]}")
        except ServerUnreachableError as error:
            raise WeightUpdateError(
                f"{self.base_url} could not be reached while it was to load {path}: {error}. If it has "
                "ended, start it again, with whatever weights its command line names, and repeat the update"
            ) from error
        except EngineError as error:
            self._state.unusable_weights = f"a reload of {path} failed and may have left weights without storage"
            raise WeightUpdateError(
                f"the weights of {path} were not loaded by {self.base_url}: {error}. With the weights that "
                "it holds now, the server would die or generate garbage; it is left paused. Load a "
                "checkpoint that is known to be good, or restart the server"
            ) from error
        state = self._state
        state.unusable_weights, state.loaded_directory, state.layers = None, path, layers
        state.was_transferred, state.weights_loaded = False, True

    async def _receive(self, send: SendTensors, version: str, expected: ExpectedTensors) -> None:
        """Let the workers receive what a trainer sends. After an error the server's parameters have no storage."""

        async def receive(update_info: Mapping[str, Any]) -> None:
            for name, shape in zip(update_info["names"], update_info["shapes"], strict=True):
                expected.check(name, tuple(shape))
            content = {"update_info": dict(update_info)}
            await self._call("POST", "/update_weights", "receiving weights", content=content)

        self._state.unusable_weights = "a transfer of weights was begun and not seen to end"
        finish = partial(self._call, "POST", "/finish_weight_update", "finishing a transfer of weights")
        try:
            await self._call("POST", "/start_weight_update", "beginning a transfer of weights")
            await send(receive)
            expected.check_complete()
            await finish(content={"weight_version": version})
        except Exception as error:  # that of the trainer, whatever it is
            try:  # else the next transfer is refused, because this one is active
                await finish()
            except EngineError as unfinished:
                log.debug("the failed transfer at %s could not be ended: %s", self.base_url, unfinished)
            raise WeightUpdateError(
                f"a transfer of weights to {self.base_url} failed: {_described(error)}. The server is left "
                "paused, with parameters that have no storage; repeat the update, load a checkpoint, or "
                "restart it"
            ) from error
        state = self._state
        state.unusable_weights = state.loaded_directory = state.layers = None
        state.was_transferred = state.weights_loaded = True

    async def _restore(self, previous: str | None, failure: WeightUpdateError, stays_paused: bool) -> NoReturn:
        """Load the weights from before a failed load again, where they are known, and raise `WeightUpdateError`."""
        if previous is None or isinstance(failure.__cause__, ServerUnreachableError):
            raise failure
        try:
            whole, deltas = await asyncio.to_thread(delta_chain, Path(previous))
            await self._load(str(whole))
            if deltas:
                layers = ChangedLayers(whole, Path(previous).parent)
                await asyncio.to_thread(layers.apply, deltas)
                await self._load(previous, layers, deltas)
            await self._reset_all()
        except (EngineError, WeightUpdateError) as error:
            raise WeightUpdateError(
                f"{failure} (the weights of before, in {previous}, could not be loaded either: restart it)"
            ) from error
        if not stays_paused:
            await self._send_resume()
        raise WeightUpdateError(
            f"the weights of {self.base_url} were not updated, and those of {previous} were loaded again; "
            f"the server {'is paused as before' if stays_paused else 'runs'} with them. The cause: "
            f"{_described(failure.__cause__)}"
        ) from failure

    async def _reset_all(self) -> None:
        await self.reset_prefix_cache(preempt=True)
        await self.reset_mm_cache()
        await self.reset_encoder_cache()

    # What is refused, and the state that decides about it.

    def _refuse_during_update(self, name: str) -> None:
        if self._updating:
            raise EngineError(name, "update_weights is under way on this server; wait for it")

    async def _refuse_unusable_weights(self, name: str) -> None:
        if self._state.unusable_weights is not None:
            await self._forget_if_restarted()
        if self._state.unusable_weights is not None:
            raise EngineError(
                name,
                f"{self._state.unusable_weights}: the next request would kill the server or get garbage. "
                "Load a checkpoint that is known to be good, or restart the server",
            )

    async def _forget_if_restarted(self) -> None:
        """Forget everything if the server is not the process that it was. Raises `CapabilityError`."""
        await self._require("/collective_rpc")
        started = (await self.metrics()).process_start_time
        if self._process_start_time is not None and started != self._process_start_time:
            self._state = _State()
        self._process_start_time = started

    async def _require_whole_weights(self, delta: Path) -> None:
        """Raise `WeightUpdateError` where the server lacks weights that a delta leaves as they are."""
        reason = self._state.unusable_weights
        if not self._state.weights_loaded and await self._sleep_level() == 2:
            reason = "it dropped its weights (level 2)"
        if reason is not None:
            rule = f"{delta} changes a part of the weights, and {self.base_url} lacks the others: {reason}"
            raise WeightUpdateError(f"{rule}; nothing was changed. Pass a whole checkpoint")

    async def _sleep_level(self) -> int:
        """The level that the server reports, else that of the last call. Raises `CapabilityError`."""
        await self._require("/sleep")
        level = (await self.metrics()).sleep_level
        return self._state.sleep_level if level is None else level

    async def _takes_media(self) -> bool:
        """Whether the server was started to take images; assumed of the Rust frontend, which does not tell."""
        capabilities = await self._capabilities()
        return capabilities.pixel_dtype is not None or capabilities.rust_frontend is not None

    @contextmanager
    def _media_forgotten(self, clears: bool = True) -> Iterator[None]:
        """Forget before and after the block which media the server holds, unless `clears` is false.

        Before, so that no media are sent by name meanwhile; after, because a request that ran beside the
        block may have recorded some.
        """
        if clears:
            self._forget_media()
        try:
            yield
        finally:
            if clears:
                self._forget_media()

    # Requests.

    async def _send_pause(self, mode: InFlight, *, clear_cache: bool) -> None:
        """Pause without the precautions of `pause`."""
        await self._call("POST", "/pause", "pausing", params={"mode": mode, "clear_cache": clear_cache})

    async def _send_resume(self) -> None:
        await self._call("POST", "/resume", "resuming")
        self._state.paused_by_update = False

    async def _call(self, method: str, path: str, action: str, **options: Any) -> HttpResponse:
        """Call a route of development mode; `action` names the call in errors."""
        await self._require(path)
        return self._checked(await self._request(method, path, **options), path, action)

    async def _call_adapters(self, path: str, content: Mapping[str, str]) -> HttpResponse:
        """Call a route of adapters. Raises `CapabilityError` where the server does not have it."""
        response = await self._request("POST", path, content=content)
        error = json_object(response).get("error") if response.status in (404, 405) else {}
        if not isinstance(error, dict):  # an unknown route: without an error of vLLM
            raise CapabilityError(
                call_name(path),
                f"{self.base_url} has no {path}: start it with `vllm serve --enable-lora` and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and let nobody but the trainer "
                "reach it",
            )
        return response

    async def _require(self, path: str) -> None:
        """Raise `CapabilityError` unless the server runs in development mode, as `path` needs."""
        if not (await self._capabilities()).control:
            name = call_name(path)
            raise CapabilityError(
                name,
                f"{self.base_url} has no /{name}: start it with VLLM_SERVER_DEV_MODE=1 in its environment, "
                "and let nobody but the trainer reach it",
            )

    def _checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        name = call_name(path)
        if response.status in (404, 405):
            raise CapabilityError(name, f"{self.base_url} has no /{name}: this vLLM is older than the route")
        if response.status == 200:
            return response
        error = response_error(name, response, action)
        if response.status == 501:  # vLLM's Rust frontend, which names the cure
            raise CapabilityError(name, error.reason)
        if b"object has no attribute" in response.body:
            raise CapabilityError(
                name,
                f"{error.reason}. The engine of this vLLM is not of the release of its Rust frontend: start "
                "both from one release, or set VLLM_USE_RUST_FRONTEND=0",
            )
        raise error


def _described(cause: BaseException | None) -> str:
    """The text of an error, with its type where it is not one of ours."""
    return str(cause) if cause is None or isinstance(cause, RolloutsError) else describe_exception(cause)


def _required_field(response: HttpResponse, key: str) -> Any:
    """One field of the JSON object of a response. Raises `MalformedResultError` where it is missing."""
    content = json_object(response)
    if key not in content:
        raise MalformedResultError(response.name, f"the response has no `{key}`: {excerpt(response.body)[:200]!r}")
    return content[key]
