"""vLLM's weight transfer at one server: tensors come from a trainer instead of from a directory.

    init_weight_transfer_engine     once: the workers join the trainer's transport
    start_weight_update             the parameters of the model lose their storage
    update_weights                  once for each bucket of tensors
    finish_weight_update            the parameters are complete; the version label is set

A server whose transfer does not get to its end has parameters without storage: the next request would kill it. It stays
paused then, unless the weights of before come from a directory and can be loaded again.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from rollouts.engines.vllm.control.caches import PauseMode, check_pause_mode
from rollouts.engines.vllm.control.weight_updates import WeightControl
from rollouts.engines.vllm.error_context import name_errors_after_methods
from rollouts.errors import CapabilityError, EngineError, InvalidRequestError, ServerError, WeightUpdateError

log = logging.getLogger("rollouts.engines.vllm")

_NOT_CONFIGURED = "Weight transfer not configured"


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer that has begun at one server. `previous`: the directory of the weights of before, None if unknown."""

    held: ExitStack
    stays_paused: bool
    previous: str | None


@name_errors_after_methods
class TransferControl(WeightControl):
    """Receives weights from a trainer. `TransferEngine` makes these calls in their order, at all servers together."""

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let the workers join the transport of the trainer; `init_info` is what the server's backend expects.

        Raises `CapabilityError` for a server without --weight-transfer-config.
        """
        path = "/init_weight_transfer_engine"
        try:
            await self._routes.call("POST", path, "joining the trainer", content={"init_info": dict(init_info)})
        except ServerError as error:
            if _NOT_CONFIGURED not in error.body:
                raise
            reason = (
                f"{self.base_url} takes no weights from a trainer; start it with --weight-transfer-config "
                '\'{"backend": "nccl"}\' (or "ipc", on the machine of the trainer)'
            )
            raise CapabilityError("init_weight_transfer", reason) from error

    async def shutdown_weight_transfer(self) -> None:
        """Let the workers leave the transport. Refused by the server during a transfer."""
        await self._routes.call("POST", "/shutdown_weight_transfer_engine", "leaving the trainer")

    async def begin_transfer(self, in_flight: PauseMode) -> Transfer:
        """Pause the server and prepare its parameters. `finish_transfer` or `abandon_transfer` must follow.

        Raises `WeightUpdateError` and `EngineError`; the server runs with the weights of before then, unless the text
        says otherwise.
        """
        check_pause_mode("begin_transfer", in_flight)
        with ExitStack() as stack:
            stack.enter_context(self._state.exclusive_update("begin_transfer"))
            await self._state.forget_if_restarted()
            await self._state.refuse_while_weights_sleep("begin_transfer")
            stays_paused = await self.is_paused()
            if in_flight == "keep" and await self._routes.takes_media():
                log.info("%s takes media: requests in flight are ended and continued, not kept", self.base_url)
                in_flight = "abort"
            stack.enter_context(self._media_forgotten())
            await self._pause_or_resume(in_flight, stays_paused)
            previous = None
            if not self._state.was_transferred:
                previous = self._state.loaded_directory or await self.initial_directory()
            begun = Transfer(stack, stays_paused, previous)
            self._state.unusable_weights = "a transfer of weights was begun and not seen to end"
            try:
                await self._routes.call("POST", "/start_weight_update", "beginning a transfer of weights")
            except EngineError as error:
                await self._recover(begun, error)
            begun.held = stack.pop_all()
            return begun

    async def receive_weights(self, update_info: Mapping[str, Any]) -> None:
        """Receive one bucket of tensors; returns when they are in the model."""
        content = {"update_info": dict(update_info)}
        await self._routes.call("POST", "/update_weights", "receiving weights", content=content)

    async def finish_transfer(self, begun: Transfer, version: str) -> None:
        """Complete the parameters, empty every cache, label the weights, and resume. Raises `WeightUpdateError`."""
        if not version:
            raise InvalidRequestError("finish_transfer", "the version is empty")
        with begun.held:
            try:
                content = {"weight_version": version}
                await self._routes.call("POST", "/finish_weight_update", "finishing a transfer", content=content)
            except EngineError as error:
                await self._recover(begun, error)
            self._state.record_transfer()
            try:
                await self._reset_all()
                await self.update_weight_version(version)
            except EngineError as error:
                raise WeightUpdateError(
                    f"{self.base_url} has received the weights {version!r}, but may still hold cached results or the "
                    f"label of the weights before, and was left paused: {error}. Repeat the update"
                ) from error
            if not begun.stays_paused:
                await self._send_resume()

    async def abandon_transfer(self, begun: Transfer, cause: Exception) -> None:
        """Load the weights of before again, from their directory. Always raises `WeightUpdateError`, with the state."""
        with begun.held:
            await self._recover(begun, cause)

    async def _recover(self, begun: Transfer, cause: Exception) -> None:
        failure = WeightUpdateError(
            f"a transfer of weights to {self.base_url} failed: {cause}. The server is left paused, with parameters "
            "that have no storage; load a checkpoint (reload_weights), or restart it"
        )
        failure.__cause__ = cause
        try:  # else the next transfer is refused, because this one is active
            await self._routes.call("POST", "/finish_weight_update", "ending a transfer")
        except EngineError as error:
            log.debug("the failed transfer at %s could not be ended: %s", self.base_url, error)
        await self._restore(begun.previous, failure, begun.stays_paused)
