"""Stopping, emptying and re-weighting a vLLM server, without the calls that would take it down.

What the calls do to a server's caches, measured with vLLM 0.32.0 (media: pixels by hash; encoder: what the vision tower
made of them; prefix: the KV cache of prompts):

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

"Half": the workers forget what the scheduler still counts on, and the next request that shows a known image kills the
engine. A reload that fails leaves weights without storage; the server then reports that it is well and dies with the
next request. An abort of an empty list aborts everything. All of this is kept from happening here.

So is this: a request whose image lies in its prefix-cache hit reaches the workers without pixels
(`strip_covered_mm_data`). If the caches are cleared while the server still has the request (running, frozen by "keep",
or put back into the queue), the image has to be encoded again, without pixels, and the engine dies. (So does model
runner V1 of vLLM 0.32: on CPUs, and elsewhere where it is chosen; a client cannot see which one runs.) Therefore the
caches of a server that takes media are emptied only after all requests that it has were ended.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, NoReturn, get_args

from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.control.checkpoint_files import check_checkpoint
from rollouts.engines.vllm.control.metrics import ServerMetrics
from rollouts.engines.vllm.control.routes import ControlRoutes, flag_of, member_of, object_of
from rollouts.engines.vllm.error_context import name_errors_after_method
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.errors import (
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    UnsafeControlError,
    WeightUpdateError,
)

log = logging.getLogger("rollouts.engines.vllm")

PauseMode = Literal["abort", "wait", "keep"]
MemoryTag = Literal["weights", "kv_cache"]

_HEALTH_SECONDS = 10.0

#: The server's own name for a request; an abort under any other is answered with 200 and does nothing.
SERVER_PREFIX = "generate-tokens-"


class ServerControl:
    """Everything but generating. Most of it needs a server with VLLM_SERVER_DEV_MODE=1 in its environment.

    `forget_media` is called before and after every call that makes the server drop pixels: before, so that nothing is
    sent by name meanwhile, and after, for what a request that ran beside the call may have recorded.
    `on_weight_version` gets each new label. All calls raise `CapabilityError` where the server lacks the route,
    `ServerError` where it refuses, `UnsafeControlError` where it must not be asked, and what
    `ServerConnection.request` raises.
    """

    def __init__(
        self,
        connection: ServerConnection,
        capabilities: Callable[[], Awaitable[ServerCapabilities]],
        *,
        forget_media: Callable[[], None] = lambda: None,
        on_weight_version: Callable[[str], None] = lambda version: None,
    ) -> None:
        self._connection = connection
        self._capabilities = capabilities
        self._routes = ControlRoutes(connection, capabilities)
        self._forget_media = forget_media
        self._on_weight_version = on_weight_version
        self._lock = threading.Lock()
        self._under_way: str | None = None
        self._directory: str | None = None  # of the weights that were last loaded through this control
        self._broken: str | None = None  # why the server must not run with the weights that it has
        self._slept = 0  # the level that it was last sent to sleep with from here
        self._weights_are_back = False  # since then: their memory, and what is in it
        self._weights_are_new = False
        self._started: float | None = None  # when the server's process did, as far as it is known

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    # Pausing.

    @name_errors_after_method
    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool | None = None) -> None:
        """Stop generating; returns once nothing runs.

        Requests in flight end with what they have and finish reason "abort" (abort), are finished first (wait; this
        call takes as long), or stay and go on after `resume` (keep). New ones wait for `resume`, or are answered with
        503 (vLLM 0.33).

        `clear_cache` empties the caches; by default "abort" and "wait" do and "keep" does not. On a server that takes
        media nothing may be left while that happens: "wait" then ends what the server holds back in its queue, as
        "abort" does (a `VLLMEngine` goes on with all that was ended, after `resume`), and "keep" with
        `clear_cache=True` is refused with `UnsafeControlError`. Where a server takes text alone, what "keep" freezes is
        computed again after `resume`.
        """
        _check_mode("pause", mode)
        clears = mode != "keep" if clear_cache is None else clear_cache
        leaves_some = clears and mode != "abort" and await self._takes_media()
        if leaves_some and mode == "keep":
            raise UnsafeControlError(
                "pause",
                'mode "keep" with clear_cache=True: a frozen request that shows an image has to encode it again '
                "then, of which vLLM dies. Leave clear_cache out (the caches are still those of the weights), or use "
                'mode "abort", after which every VLLMEngine goes on with its completions',
            )
        with self._clearing(clears):
            if leaves_some:
                await self._pause("wait", clear_cache=False)
                await self._pause("abort", clear_cache=True)  # of what was preempted, or came meanwhile
            else:
                await self._pause(mode, clear_cache=clears)

    @name_errors_after_method
    async def resume(self) -> None:
        """Go on after `pause`. Refused while the server sleeps or holds weights that would kill it."""
        self._refuse_meanwhile("resume")
        await self._refuse_broken("resume")
        if (level := await self._sleep_level()) > 0:
            raise UnsafeControlError(
                "resume", f"the server sleeps (level {level}): it would run without its memory. Use wake_up"
            )
        await self._resume()

    @name_errors_after_method
    async def is_paused(self) -> bool:
        """Whether it generates nothing for now; so it is while it sleeps, too."""
        return flag_of(await self._routes.call("GET", "/is_paused", "asking whether it is paused"), "is_paused")

    # Sleeping.

    @name_errors_after_method
    async def sleep(self, level: int = 1) -> None:
        """Abort what runs and free memory for others. 0: none, a pause that keeps the caches; 1: weights go to the
        host's memory; 2: weights are dropped.

        Frees nothing on a CPU; elsewhere the server needs --enable-sleep-mode.
        """
        if level not in (0, 1, 2):
            raise InvalidRequestError("sleep", f"level is {level!r}, not 0, 1 or 2")
        self._refuse_meanwhile("sleep")
        if (now := await self._sleep_level()) > 0:
            raise UnsafeControlError("sleep", f"the server sleeps already (level {now}); wake it up first")
        with self._clearing(level > 0):
            await self._routes.call("POST", "/sleep", "putting it to sleep", params={"level": level})
        self._slept, self._weights_are_back, self._weights_are_new = level, False, False

    @name_errors_after_method
    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Take memory back: all of it, or that of `tags`; with the last of it, generate again.

        After `sleep(2)` there are no weights to go on with: `wake_up(["weights"])`, `reload_weights(...)`, `wake_up()`.
        Any other order is refused.
        """
        self._refuse_meanwhile("wake_up")
        await self._refuse_broken("wake_up")
        if unknown := [tag for tag in tags or () if tag not in get_args(MemoryTag)]:
            raise InvalidRequestError(
                "wake_up", f"there is no memory {unknown[0]!r}; there is {', '.join(get_args(MemoryTag))}"
            )
        weights_alone = tags is not None and set(tags) == {"weights"}
        if not weights_alone and not self._weights_are_new and await self._sleep_level() == 2:
            raise UnsafeControlError(
                "wake_up",
                "the weights were dropped (level 2), the server would answer with whatever is in their place. Use "
                'wake_up(["weights"]), then reload_weights(directory), then wake_up()',
            )
        query = "&".join(f"tags={tag}" for tag in tags or ())
        reply = await self._routes.call("POST", f"/wake_up?{query}" if query else "/wake_up", "waking it up")
        self._weights_are_back |= tags is None or "weights" in tags
        if object_of(reply).get("status", "awake") == "awake":
            self._slept = 0

    @name_errors_after_method
    async def is_sleeping(self) -> bool:
        """Whether memory is put away. False for a server that is only paused, of which vLLM's own route says True."""
        return await self._sleep_level() > 0

    # Caches.

    @name_errors_after_method
    async def reset_prefix_cache(self, *, preempt: bool = False) -> None:
        """Forget the KV cache of prompts.

        Requests that run hold blocks of it, and then vLLM resets nothing: `ServerError`. `preempt` puts them back into
        the queue, from where they are computed anew with the weights of then; on a server that takes media that could
        kill it, and is `UnsafeControlError` where anything runs.
        """
        preempts = preempt and not await self._takes_media()
        reply = await self._routes.call(
            "POST", "/reset_prefix_cache", "resetting the prefix cache", params={"reset_running_requests": preempts}
        )
        # Up to vLLM 0.31 the answer is empty; then whatever runs makes it doubtful.
        done = object_of(reply).get("success") if reply.body else preempts or (await self.metrics()).running == 0
        if done is not True and preempt:
            raise UnsafeControlError(
                "reset_prefix_cache",
                "requests run, and one that shows an image, put back into the queue, has to encode it again, of which "
                'vLLM dies. Use pause("abort"), which empties the caches too; every VLLMEngine goes on with its '
                "completions after resume()",
            )
        if done is not True:
            raise ServerError(
                "reset_prefix_cache",
                "the prefix cache was not reset, for requests hold blocks of it; pause first, or preempt=True",
                status=reply.status,
                body=reply.body[:200].decode(errors="replace"),
            )

    @name_errors_after_method
    async def reset_mm_cache(self) -> None:
        """Forget the pixels of media; each is sent again on its next use."""
        with self._clearing():
            await self._routes.call("POST", "/reset_mm_cache", "resetting the cache of media")

    @name_errors_after_method
    async def reset_encoder_cache(self) -> None:
        """Forget what the vision tower made of media. Refused unless the server is paused: a request may be in the
        middle of one, and what the server counts as running lags behind.
        """
        if not await self.is_paused():
            raise UnsafeControlError("reset_encoder_cache", "requests may need what would be dropped; pause first")
        await self._routes.call("POST", "/reset_encoder_cache", "resetting the encoder cache")

    # Ending requests.

    @name_errors_after_method
    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by the ids of their `GenerateRequest`; each answers with what it has, "abort".

        An id that the server does not run is not reported: it answers the same. Needs no development mode.
        """
        names = [f"{SERVER_PREFIX}{request_id}" for request_id in request_ids]
        if not names:  # which would end all
            return
        body = [json.dumps({"request_ids": names}).encode()]
        for path in ("/inference/v1/abort_requests", "/abort_requests"):  # the second up to vLLM 0.31
            reply = await self._connection.request("POST", path, name="abort", body=body, slot=False)
            if reply.status not in (404, 405):
                break
        self._routes.checked(reply, "/inference/v1/abort_requests", "aborting requests")

    @name_errors_after_method
    async def abort_all(self) -> int:
        """End every request of every client; how many there were."""
        reply = await self._routes.call("POST", "/abort_requests", "aborting all requests", content={})
        return int(object_of(reply).get("aborted", 0))

    # Weights.

    @name_errors_after_method
    async def reload_weights(self, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a checkpoint of the same model into a paused server, and empty every cache.

        The server reads the directory itself. `check` looks first at what it will find, which needs the same file
        system here; without it (the server is elsewhere, or loads another format) nothing stands between a wrong
        directory and a server that has to be restarted. Where it takes media, what a pause has left in it ("keep")
        ends first, as by "abort"; a `VLLMEngine` goes on with it after `resume`. Raises `WeightUpdateError`: nothing
        was changed, or the text says what was; `UnsafeControlError` if the server is not paused, or sleeps with its
        weights put away.
        """
        with self._exclusive("reload_weights"):
            await self._notice_restart()
            path = await self._checked_directory(directory, check)
            if not await self.is_paused():
                raise UnsafeControlError(
                    "reload_weights", "requests would go on with mixed weights and a stale cache; pause first"
                )
            await self._refuse_without_weights("reload_weights")
            with self._clearing():
                if await self._takes_media():
                    await self._pause("abort", clear_cache=False)
                await self._load(path)
                await self._reset_caches()

    @name_errors_after_method
    async def update_weight_version(self, version: str) -> None:
        """Label what is sampled from now on. Servers that keep no label (before vLLM 0.29): on this side only."""
        if not version:
            raise InvalidRequestError("update_weight_version", "the version is empty")
        await self._routes.require("/update_weight_version")
        reply = await self._routes.request("POST", "/update_weight_version", content={"new_version": version})
        if reply.status != 404:
            self._routes.checked(reply, "/update_weight_version", "labelling the weights")
        self._on_weight_version(version)

    @name_errors_after_method
    async def weight_version(self) -> str:
        """The label of the weights that the server has ("default" until one is set)."""
        reply = await self._routes.call("GET", "/weight_info", "asking for the weight version")
        return str(member_of(reply, "weight_version"))

    @name_errors_after_method
    async def update_weights_from_directory(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode = "abort", *, check: bool = True
    ) -> None:
        """Pause, load, empty every cache, label, resume: the whole of a weight update.

        `in_flight` says what becomes of requests that run: "abort" ends them and every `VLLMEngine` goes on with its
        own from the tokens that they have, with the new weights; "wait" finishes them with the old ones; "keep" leaves
        them in the server, which computes them again and goes on with the new weights. A server that takes media would
        die of that: there "keep" is carried out as "abort". Cached results of the old weights are never used with the
        new ones. A server that was paused before stays so.

        Raises `WeightUpdateError` where the weights are not those of `directory` afterwards; its text says which they
        are and whether the server runs. Cancelling does not stop it half-way: it is carried to its end first.
        """
        task = asyncio.ensure_future(self._update(directory, version, in_flight, check))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("an update of the weights, cancelled meanwhile, failed: %s", error)
            raise

    @name_errors_after_method
    async def world_size(self) -> int:
        """How many workers (GPUs) the model is spread over, data parallelism included."""
        return int(
            member_of(await self._routes.call("GET", "/get_world_size", "asking for the world size"), "world_size")
        )

    # Watching.

    @name_errors_after_method
    async def health(self) -> bool:
        """Whether the server answers and its engine lives. Says nothing of weights that a failed reload has broken."""
        try:
            reply = await self._connection.request(
                "GET", "/health", name="health", seconds=_HEALTH_SECONDS, retry=False, slot=False
            )
        except (ServerUnreachableError, ServerTimeoutError):
            return False
        return reply.status == 200

    @name_errors_after_method
    async def load(self) -> int:
        """Requests that the HTTP server has in hand; counted only with --enable-server-load-tracking, else 0."""
        reply = await self._routes.request("GET", "/load")
        return int(member_of(self._routes.checked(reply, "/load", "asking for the load"), "server_load"))

    @name_errors_after_method
    async def metrics(self) -> ServerMetrics:
        """Everything that the server counts."""
        reply = await self._routes.request("GET", "/metrics")
        text = self._routes.checked(reply, "/metrics", "asking for metrics").body
        return ServerMetrics.parse(text.decode("utf-8", errors="replace"))

    # The steps of an update.

    async def _update(self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode, check: bool) -> None:
        name = "update_weights_from_directory"
        _check_mode(name, in_flight)
        if not version:
            raise InvalidRequestError(name, "the version is empty")
        with self._exclusive(name):
            await self._notice_restart()
            path = await self._checked_directory(directory, check)
            await self._refuse_without_weights(name)
            stays_paused = await self.is_paused()
            if in_flight == "keep" and await self._takes_media():
                log.info("%s takes media: requests in flight are ended and gone on with, not kept", self.base_url)
                in_flight = "abort"
            with self._clearing():
                try:
                    await self.pause(in_flight, clear_cache=True)
                except ServerUnreachableError:
                    raise
                except EngineError:
                    # What a pause that did not come back has done is unknown; what runs on old weights may go on.
                    await self._resume_after_failure(stays_paused)
                    raise
                previous = self._directory or await self._first_directory()
                try:
                    await self._load(path)
                except WeightUpdateError as failure:
                    await self._put_back(previous, failure, stays_paused)
                try:
                    await self._reset_caches()
                    await self.update_weight_version(version)
                except EngineError as error:
                    raise WeightUpdateError(
                        f"{self.base_url} has loaded the weights of {path}, but may still hold what others have "
                        f"computed, or their label, and was left paused: {error}. Repeat the update"
                    ) from error
            if not stays_paused:
                await self._resume()

    async def _load(self, path: str) -> None:
        """Let the workers read a checkpoint. Raises `WeightUpdateError` with the server in doubt."""
        content = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._broken = f"a reload of {path} was begun and not seen to end"
        try:
            reply = await self._routes.call("POST", "/collective_rpc", "reloading the weights", content=content)
            results = member_of(reply, "results")
            if not isinstance(results, list) or any(result is not None for result in results):
                raise MalformedResultError("reload_weights", f"the workers answered {str(results)[:200]}")
        except ServerUnreachableError as error:
            raise WeightUpdateError(
                f"{self.base_url} could not be reached while it was to load {path}: {error}. If it has ended, start it "
                "again, with whatever weights its command line names, and repeat the update"
            ) from error
        except EngineError as error:
            self._broken = f"a reload of {path} failed and may have left weights without storage"
            raise WeightUpdateError(
                f"the weights of {path} were not loaded by {self.base_url}: {error}. What the server holds now would "
                "kill it or answer with garbage; it is left paused. Load a checkpoint that is known to be good, or "
                "restart the server"
            ) from error
        self._broken = None
        self._directory = path
        self._weights_are_new = True

    async def _put_back(self, previous: str | None, failure: WeightUpdateError, stays_paused: bool) -> NoReturn:
        """After a failed load: the weights of before, if they can be had."""
        if previous is None or isinstance(failure.__cause__, ServerUnreachableError):
            raise failure
        try:
            await self._load(previous)
            await self._reset_caches()
        except (EngineError, WeightUpdateError) as error:
            raise WeightUpdateError(
                f"{failure} (the weights of before, in {previous}, could not be loaded either: restart it)"
            ) from error
        if not stays_paused:
            await self._resume()
        raise WeightUpdateError(
            f"the weights of {self.base_url} were not updated, and those of {previous} were put back; the server "
            f"{'is paused as before' if stays_paused else 'runs'} with them. The cause: {failure.__cause__}"
        ) from failure

    async def _reset_caches(self) -> None:
        await self.reset_prefix_cache(preempt=True)
        await self.reset_mm_cache()
        await self.reset_encoder_cache()

    async def _pause(self, mode: PauseMode, *, clear_cache: bool) -> None:
        await self._routes.call("POST", "/pause", "pausing", params={"mode": mode, "clear_cache": clear_cache})

    async def _takes_media(self) -> bool:
        return (await self._capabilities()).pixel_dtype is not None

    async def _resume(self) -> None:
        await self._routes.call("POST", "/resume", "resuming")

    async def _resume_after_failure(self, stays_paused: bool) -> None:
        if stays_paused:
            return
        try:
            await self._resume()
        except EngineError as error:
            log.warning("%s may be left paused: %s", self.base_url, error)

    async def _checked_directory(self, directory: str | os.PathLike[str], check: bool) -> str:
        """The path as the server is told it."""
        if not check:
            return str(directory)
        return await asyncio.to_thread(_checked_path, directory, await self._first_directory())

    async def _first_directory(self) -> str | None:
        """The checkpoint that the server was started with, as it names it; what was loaded since may lack tensors."""
        model = (await self._capabilities()).model
        reply = await self._routes.request("GET", "/v1/models")
        cards = object_of(reply).get("data") if reply.status == 200 else None
        roots = [card.get("root") for card in cards or () if isinstance(card, dict) and card.get("id") == model]
        return roots[0] if roots and isinstance(roots[0], str) else None

    # What must not be done.

    @contextmanager
    def _exclusive(self, name: str) -> Iterator[None]:
        """One change of weights at a time, and no resuming in the middle of it."""
        with self._lock:
            if self._under_way is not None:
                raise UnsafeControlError(name, f"{self._under_way} is under way on this server; wait for it")
            self._under_way = name
        try:
            yield
        finally:
            with self._lock:
                self._under_way = None

    def _refuse_meanwhile(self, name: str) -> None:
        if self._under_way is not None:
            raise UnsafeControlError(name, f"{self._under_way} is under way on this server; wait for it")

    async def _refuse_broken(self, name: str) -> None:
        if self._broken is not None:
            await self._notice_restart()
        if self._broken is not None:
            raise UnsafeControlError(
                name,
                f"{self._broken}: the next request would kill the server or be answered with garbage. Reload a "
                "checkpoint that is known to be good, or restart the server",
            )

    async def _refuse_without_weights(self, name: str) -> None:
        if not self._weights_are_back and (level := await self._sleep_level()) > 0:
            raise UnsafeControlError(
                name, f'the server sleeps (level {level}), its weights have no memory. wake_up(["weights"]) first'
            )

    async def _notice_restart(self) -> None:
        """Forget what was known of a server that is not the same process any more."""
        await self._routes.require("/collective_rpc")
        started = next((sample.value for sample in (await self.metrics()).get("process_start_time_seconds", ())), None)
        if self._started is not None and started != self._started:
            self._directory = self._broken = None
            self._slept, self._weights_are_back, self._weights_are_new = 0, False, False
        self._started = started

    async def _sleep_level(self) -> int:
        """As the server counts it; else what it was told from here."""
        await self._routes.require("/sleep")
        level = (await self.metrics()).sleep_level
        return self._slept if level is None else level

    @contextmanager
    def _clearing(self, clears: bool = True) -> Iterator[None]:
        if clears:
            self._forget_media()
        try:
            yield
        finally:
            if clears:
                self._forget_media()


def _checked_path(directory: str | os.PathLike[str], first: str | None) -> str:
    path = Path(directory).absolute()
    check_checkpoint(path, like=None if first is None else Path(first))
    return str(path)


def _check_mode(name: str, mode: str) -> None:
    if mode not in get_args(PauseMode):
        raise InvalidRequestError(name, f"mode is {mode!r}, not one of {', '.join(get_args(PauseMode))}")
