"""vLLM's weight transfer at one server: tensors come from a trainer instead of from a directory.

    init_weight_transfer_engine     once: the workers join the trainer's transport
    start_weight_update             the parameters of the model lose their storage
    update_weights                  once for each bucket of tensors
    finish_weight_update            the parameters are complete; the version label is set

A server whose transfer does not get to its end has parameters without storage: the next request would kill it. It
stays paused then, unless the weights of before come from a directory and can be loaded again.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Self

from rollouts.engines.protocol import check_version
from rollouts.engines.vllm.caches import PauseMode
from rollouts.engines.vllm.checkpoint_files import HEAD, checkpoint_shapes, ties_embeddings
from rollouts.engines.vllm.weight_updates import WeightControl
from rollouts.errors import (
    CapabilityError,
    EngineError,
    ServerError,
    WeightUpdateError,
)
from rollouts.values import check_choice

log = logging.getLogger("rollouts.engines.vllm")


class ExpectedTensors:
    """The tensors that a transfer must have: those of a checkpoint of the same model, each once and in its shape.

    A server that receives others loads part of them, and generates garbage or dies. `shapes` None: nothing is known,
    and only names that come twice are refused.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]] | None, source: object) -> None:
        self._shapes = shapes
        self._source = source
        self._seen: set[str] = set()

    @classmethod
    def of_checkpoint(cls, directory: str | None) -> Self:
        """Those of the checkpoint that a server was started with, where this process can read it.

        The output layer must come also where the model ties it to its embeddings: vLLM would keep the one of
        before.
        """
        if directory is None or not any(Path(directory).glob("*.safetensors")):
            return cls(None, directory)
        shapes = dict(checkpoint_shapes(Path(directory)))
        if HEAD not in shapes and ties_embeddings(Path(directory)):
            embeddings = [name for name in shapes if name.endswith("embed_tokens.weight") and "visual" not in name]
            shapes.update((HEAD, shapes[name]) for name in embeddings[:1])
        return cls(shapes, directory)

    def check_complete(self) -> None:
        """Raise `WeightUpdateError` unless every tensor has come."""
        if missing := sorted((self._shapes or {}).keys() - self._seen):
            tied = f" ({HEAD} also where the model ties it to its embeddings)" if HEAD in missing else ""
            raise WeightUpdateError(
                f"{len(missing)} tensors of {self._source} were not sent, such as {missing[0]}; send every tensor{tied}"
            )

    def check(self, name: str, shape: tuple[int, ...]) -> None:
        """Raise `WeightUpdateError` for a tensor that the model has not, has in another shape, or that came before."""
        if name in self._seen:
            raise WeightUpdateError(f"the tensor {name} comes twice; send each once")
        self._seen.add(name)
        if self._shapes is None:
            return
        if name not in self._shapes:
            raise WeightUpdateError(
                f"{self._source} has no tensor {name}; use the names of its checkpoint files, which a model of "
                "transformers may name otherwise (`model.save_pretrained` writes them)"
            )
        if self._shapes[name] != shape:
            raise WeightUpdateError(f"{name} has shape {shape}, in {self._source} it has {self._shapes[name]}")


@dataclass(eq=False, slots=True)
class Transfer:
    """A transfer that has begun at one server. `previous`: the directory of the weights of before, None if unknown."""

    held: ExitStack
    stays_paused: bool
    previous: str | None
    expected: ExpectedTensors


class TransferControl(WeightControl):
    """Receives weights from a trainer, which sends them with vLLM's own classes (`vllm.distributed.weight_transfer`).

    The trainer makes these calls in their order, at all of its servers together.
    """

    async def init_weight_transfer(self, init_info: Mapping[str, Any]) -> None:
        """Let the workers join the transport of the trainer; `init_info` is what the server's backend expects.

        Raises `CapabilityError` for a server without --weight-transfer-config.
        """
        path = "/init_weight_transfer_engine"
        try:
            await self._routes.call("POST", path, "joining the trainer", content={"init_info": dict(init_info)})
        except ServerError as error:
            if "Weight transfer not configured" not in error.body:
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
        check_choice("in_flight", in_flight, PauseMode)
        with ExitStack() as stack:
            stack.enter_context(self._state.exclusive_update("begin_transfer"))
            await self._state.forget_if_restarted()
            await self._state.refuse_while_weights_sleep("begin_transfer")
            expected = await asyncio.to_thread(ExpectedTensors.of_checkpoint, await self.initial_directory())
            stays_paused, in_flight = await self._stays_paused(), await self._possible(in_flight)
            stack.enter_context(self._media_forgotten())
            previous = await self._pause_for_update(in_flight, stays_paused)
            begun = Transfer(stack, stays_paused, previous, expected)
            self._state.unusable_weights = "a transfer of weights was begun and not seen to end"
            try:
                await self._routes.call("POST", "/start_weight_update", "beginning a transfer of weights")
            except EngineError as error:
                await self._recover(begun, error)
            begun.held = stack.pop_all()
            return begun

    async def receive_weights(self, begun: Transfer, update_info: Mapping[str, Any]) -> None:
        """Receive one bucket of tensors; returns when they are in the model.

        `update_info` has their `names` and `shapes` in order, and what else the server's backend expects. Raises
        `WeightUpdateError` for a tensor that the checkpoint of the server has not, or has in another shape.
        """
        for name, shape in zip(update_info["names"], update_info["shapes"], strict=True):
            begun.expected.check(name, tuple(shape))
        content = {"update_info": dict(update_info)}
        await self._routes.call("POST", "/update_weights", "receiving weights", content=content)

    async def finish_transfer(self, begun: Transfer, version: str) -> None:
        """Complete the parameters, empty every cache, label the weights, and resume.

        Raises `WeightUpdateError`, also where tensors have not come: call `abandon_transfer` then.
        """
        check_version("version", version)
        begun.expected.check_complete()
        with begun.held:
            try:
                content = {"weight_version": version}
                await self._routes.call("POST", "/finish_weight_update", "finishing a transfer", content=content)
            except EngineError as error:
                await self._recover(begun, error)
            self._state.record_transfer()
            await self._complete_update(version)
            if not begun.stays_paused:
                await self._send_resume()

    async def abandon_transfer(self, begun: Transfer, cause: Exception) -> None:
        """Load the weights of before again, from their directory. Always raises `WeightUpdateError`, with the state."""
        with begun.held:
            await self._recover(begun, cause)

    async def _recover(self, begun: Transfer, cause: Exception) -> NoReturn:
        try:  # else the next transfer is refused, because this one is active
            await self._routes.call("POST", "/finish_weight_update", "ending a transfer")
        except EngineError as error:
            log.debug("the failed transfer at %s could not be ended: %s", self.base_url, error)
        failure = WeightUpdateError(
            f"a transfer of weights to {self.base_url} failed: {cause}. The server is left paused, with parameters "
            "that have no storage; repeat the update, or load a checkpoint (reload_weights), or restart it"
        )
        failure.__cause__ = cause
        await self._restore(begun.previous, failure, begun.stays_paused)
