"""Replaces the weights of an engine, one update at a time."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any

from renderers import RendererError
from rollouts.engines.protocol import (
    ChatEngine,
    Engine,
    InFlight,
    check_update_arguments,
)
from rollouts.episodes.errors import wrap_exceptions
from rollouts.errors import ArgumentError, RolloutsError, WeightUpdateError, describe_exception
from rollouts.runner.events import WeightsUpdated, WeightUpdateFailed
from rollouts.runner.reporting import Reporter
from rollouts.runner.version_history import VersionHistory

log = logging.getLogger("rollouts.runner")


class WeightUpdates:
    """The weight updates of an engine, counted and reported by `reporter`.

    `history` has the versions in use. `set_update` is called with `in_flight` when an update begins, and with
    None when it has ended. `engine` is None for a runner whose workers have all engines.
    """

    def __init__(
        self,
        engine: Engine | ChatEngine | None,
        reporter: Reporter,
        set_update: Callable[[InFlight | None], object],
    ) -> None:
        self._engine = engine
        self._reporter = reporter
        self._set_update = set_update
        self._running = ""  # the version of the update that is under way
        self.history = VersionHistory(self._reported_version(), self._reported_version)

    async def update(self, weights: Any, version: str, in_flight: InFlight) -> None:
        """Replace the weights. Returns when the engine samples from the new ones.

        Raises `ArgumentError` for a version that has been in use and for a chat endpoint; `WeightUpdateError`
        while another update is under way; and what the engine raises. After an error the weights of before
        are in use, unless the text says otherwise. A cancelled call waits for the end of the update, and then
        raises `CancelledError`; if it is cancelled again, the update of the engine is cancelled.
        """
        check_update_arguments(version, in_flight)
        engine = self._engine
        if not isinstance(engine, Engine):
            rule = "its weights cannot be replaced from here; pass the runner an Engine that takes weights"
            raise ArgumentError("engine", None if engine is None else type(engine).__name__, rule)
        if self._running:
            raise WeightUpdateError(
                f"the update to version {version!r:.80} was not begun, because that to {self._running!r:.80} "
                "is under way; await it first"
            )
        self.history.check_new(version)
        self._running = self.history.expected = version
        started = time.monotonic()
        try:
            self._set_update(in_flight)
            try:
                await self._until_ended(asyncio.ensure_future(self._update(engine, weights, version, in_flight)))
            finally:
                self._set_update(None)
        except Exception as error:
            self._reporter.emit(WeightUpdateFailed(version, describe_exception(error)))
            raise
        finally:
            self.history.adopt_reported()  # also after an error
            self._running = self.history.expected = ""
        self._reporter.emit(WeightsUpdated(version, in_flight, time.monotonic() - started))

    def _reported_version(self) -> str:
        """The version that the engine reports; empty for an engine without versions."""
        return self._engine.weight_version if isinstance(self._engine, Engine) else ""

    async def _update(self, engine: Engine, weights: Any, version: str, in_flight: InFlight) -> None:
        name = type(engine).__name__
        with wrap_exceptions(
            lambda error: WeightUpdateError(
                f"{name}.update_weights raised {describe_exception(error)}; the engine reports that it "
                f"serves version {engine.weight_version!r:.80}"
            ),
            unchanged=(RolloutsError, RendererError),
        ):
            await engine.update_weights(weights, version, in_flight=in_flight)
        if engine.weight_version != version:
            raise WeightUpdateError(
                f"{name}.update_weights returned, and its weight_version is {engine.weight_version!r:.80}, "
                f"not {version!r:.80}; let it label the weights with the version that it receives"
            )

    async def _until_ended(self, updating: asyncio.Task[None]) -> None:
        """Wait for an update that goes on when the caller is cancelled once."""
        try:
            # An update that is cut short leaves the engine with weights that no version names.
            await asyncio.shield(updating)
        except asyncio.CancelledError:
            if updating.cancelled():  # by the engine's own doing
                raise
            try:
                await asyncio.wait([updating])
            except asyncio.CancelledError:
                updating.cancel()
                await asyncio.wait([updating])
            if not updating.cancelled() and (error := updating.exception()) is not None:
                log.warning("an update of the weights, whose caller was cancelled, failed: %s", error)
            raise
