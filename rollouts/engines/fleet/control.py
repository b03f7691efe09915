"""Control calls to all members of a fleet at once, with a result for each."""

import asyncio
import logging
import os
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from rollouts.calls import gathered
from rollouts.engines.fleet.member import Member, MemberState
from rollouts.engines.fleet.membership import Membership
from rollouts.engines.http.control import MemoryTag
from rollouts.engines.lora import adapter_exists_error
from rollouts.engines.protocol import InFlight, SendTensors, check_adapter_name, check_update_arguments
from rollouts.engines.vllm.metrics import ServerMetrics
from rollouts.errors import (
    CapabilityError,
    EngineError,
    FleetControlError,
    ServerUnreachableError,
    UnknownAdapterError,
    WeightUpdateError,
)

log = logging.getLogger("rollouts.engines.fleet")


class FleetControl:
    """The control calls of `ServerControl`, made at every member that serves.

    Each call returns what the members returned, by their names. If it fails anywhere it raises
    `FleetControlError` with the errors and the results of each; a pause and a sleep are then taken back where
    they succeeded, so that no part of the fleet stands still.
    """

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self._updating = False

    async def pause(self, mode: InFlight = "abort", *, clear_cache: bool | None = None) -> dict[str, None]:
        """Stop generating everywhere, or nowhere."""
        return await self._all_or_none(
            "pause",
            lambda member: _control(member, "pause").pause(mode, clear_cache=clear_cache),
            lambda member: _control(member, "pause").resume(),
        )

    async def resume(self) -> dict[str, None]:
        """Continue after `pause`."""
        return await self._each("resume", lambda control: control.resume())

    async def sleep(self, level: int = 1) -> dict[str, None]:
        """Free memory everywhere, or nowhere. After level 2 the members have no weights, and nothing is taken back."""
        if level == 2:
            return await self._each("sleep", lambda control: control.sleep(level))
        return await self._all_or_none(
            "sleep",
            lambda member: _control(member, "sleep").sleep(level),
            lambda member: _control(member, "sleep").wake_up(),
        )

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> dict[str, None]:
        """Allocate memory again: all of it, or that of `tags`."""
        return await self._each("wake_up", lambda control: control.wake_up(tags))

    async def metrics(self) -> dict[str, ServerMetrics]:
        """The counters and gauges of each member."""
        return await self._each("metrics", lambda control: control.metrics())

    async def update_weights(
        self, weights: Any, version: str, *, in_flight: InFlight = "abort"
    ) -> Mapping[str, Exception | None]:
        """Load other weights into every member; None, or its error, for each.

        A member that fails is ejected, and the others serve `version`. It is admitted again once it serves
        `version` too; where `weights` is a directory the fleet loads them itself into a member that comes
        back with others. `SendTensors` is called once, and all members receive together what it sends, or
        none does. Raises `WeightUpdateError` if all fail: then nobody is ejected, and the error says which
        weights each serves; `EngineError` while another update runs.
        """
        check_update_arguments(version, in_flight)
        if self._updating:
            raise EngineError("update_weights", "another update runs; wait for it")

        self._updating = True
        try:
            with self._membership.updating():
                members = self._serving("update_weights")
                shared = _SharedSend(weights, len(members)) if callable(weights) else None

                async def update(member: Member) -> None:
                    given = weights if shared is None else shared.send
                    await member.engine.update_weights(given, version, in_flight=in_flight)

                on_error = None if shared is None else shared.end
                outcomes = await self._outcomes(members, update, "update_weights", on_error)
                failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, Exception)}
                if len(failed) == len(members):
                    listed = "; ".join(f"{name}: {error}" for name, error in failed.items())
                    text = f"no member of the fleet has taken the weights {version!r} ({listed})"
                    raise WeightUpdateError(text).concern_servers_of(failed.values())
                directory = weights if isinstance(weights, str | os.PathLike) else None
                self._membership.record_update(version, directory, failed, asked=outcomes)
        finally:
            self._updating = False
        return {name: failed.get(name) for name in outcomes}

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> dict[str, None]:
        """Load a LoRA adapter into every member, or into none: where one fails it is unloaded at the others again.

        A member that comes back or is added gets the adapters of the fleet before it serves.
        """
        check_adapter_name(name)
        if name in self._membership.adapters:
            raise adapter_exists_error("the fleet has", name, self._membership.adapters[name])
        loaded = await self._all_or_none(
            "load_adapter",
            lambda member: member.engine.load_adapter(name, directory),
            lambda member: member.engine.unload_adapter(name),
        )
        self._membership.adapters[name] = directory
        return loaded

    async def unload_adapter(self, name: str) -> dict[str, None]:
        """Unload a LoRA adapter from every member, at each after its requests with it have ended.

        A member that does not have it, since it was restarted, counts as done. Raises `UnknownAdapterError`
        for an adapter that the fleet does not have.
        """
        if self._membership.adapters.pop(name, None) is None:
            raise UnknownAdapterError("unload_adapter", name, self._membership.adapters)

        async def unload(member: Member) -> None:
            with suppress(UnknownAdapterError):
                await member.engine.unload_adapter(name)

        return await self._everywhere("unload_adapter", unload)

    # Calls.

    async def _all_or_none(
        self, name: str, call: Callable[[Member], Awaitable[None]], undo: Callable[[Member], Awaitable[None]]
    ) -> dict[str, None]:
        """Call every member that serves; where one fails, the call is taken back at the others."""
        try:
            return await self._everywhere(name, call)
        except FleetControlError as failure:
            members = [member for member in self._membership.members.values() if member.name in failure.results]
            taken_back = await self._outcomes(members, undo, name)
            undone = [member for member, outcome in taken_back.items() if not isinstance(outcome, Exception)]
            raise FleetControlError(name, failure.errors, failure.results, undone) from failure

    async def _each(self, name: str, call: Callable[[Any], Awaitable[Any]]) -> dict[str, Any]:
        return await self._everywhere(name, lambda member: call(_control(member, name)))

    async def _everywhere(self, name: str, call: Callable[[Member], Awaitable[Any]]) -> dict[str, Any]:
        """What a call returned at each member. Raises `FleetControlError` where it failed at one."""
        outcomes = await self._outcomes(self._serving(name), call, name)
        errors = {member: outcome for member, outcome in outcomes.items() if isinstance(outcome, Exception)}
        results = {member: outcome for member, outcome in outcomes.items() if member not in errors}
        if errors:
            raise FleetControlError(name, errors, results) from next(iter(errors.values()))
        return results

    async def _outcomes(
        self,
        members: Sequence[Member],
        call: Callable[[Member], Awaitable[Any]],
        name: str,
        on_error: Callable[[Exception], None] | None = None,
    ) -> dict[str, Any]:
        """What a call returned or raised at each member. `on_error` is called with each error at once."""

        async def outcome(member: Member) -> Any:
            try:
                return await _until_given_up(member, name, call(member))
            except (EngineError, WeightUpdateError) as error:
                if on_error is not None:
                    on_error(error)
                return error

        outcomes = await gathered(map(outcome, members))
        return {member.name: found for member, found in zip(members, outcomes, strict=True)}

    def _serving(self, name: str) -> list[Member]:
        self._membership.enter(name)
        members = [member for member in self._membership.members.values() if member.state is not MemberState.EJECTED]
        if not members:
            raise CapabilityError(name, "no member of the fleet serves; call check() or add one")
        return members


class _SharedSend:
    """Lets all members of a fleet receive what one call of a trainer's function sends.

    Each member is given `send` as its weights. Where one fails, also before it can receive, the others do not
    wait for it: a transport moves tensors to all of its members or to none.
    """

    def __init__(self, send: SendTensors, members: int) -> None:
        self._send = send
        self._members = members
        self._receivers: list[Callable[[Mapping[str, Any]], Awaitable[None]]] = []
        self._ended = asyncio.Event()
        self._error: Exception | None = None

    async def send(self, receive: Callable[[Mapping[str, Any]], Awaitable[None]]) -> None:
        """Return when all members have everything. Raises the error of the first that failed."""
        self._receivers.append(receive)
        if len(self._receivers) == self._members:
            try:
                await self._send(self._receive)
            except Exception as error:  # noqa: BLE001  of the trainer, whatever it is
                self.end(error)
            self._ended.set()
        await self._ended.wait()
        if self._error is not None:
            raise self._error

    def end(self, error: Exception) -> None:
        """A member has failed with this error."""
        self._error = self._error or error
        self._ended.set()

    async def _receive(self, update_info: Mapping[str, Any]) -> None:
        calls = (receive(update_info) for receive in self._receivers)
        # All of them: a server must not be asked to end a transfer while it receives.
        outcomes = await asyncio.gather(*calls, return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error


async def _until_given_up(member: Member, name: str, call: Awaitable[Any]) -> Any:
    """The result of a call; `ServerUnreachableError` if the member is ejected, and the call cancelled."""
    calling = asyncio.ensure_future(call)
    ejected = asyncio.ensure_future(member.ejected.wait())
    try:
        await asyncio.wait([calling, ejected], return_when=asyncio.FIRST_COMPLETED)
    except asyncio.CancelledError:
        calling.cancel()
        await asyncio.wait([calling])
        raise
    finally:
        ejected.cancel()
    if calling.done():
        return await calling
    calling.cancel()
    calling.add_done_callback(partial(_log_late_end, member.name, name))
    raise ServerUnreachableError(name, f"{member.name} was given up meanwhile: {member.reason}")


def _log_late_end(member: str, name: str, call: asyncio.Future[Any]) -> None:
    if not call.cancelled() and (error := call.exception()) is not None:
        log.warning("%s at %s ended after it was given up: %s", name, member, error)


def _control(member: Member, call: str) -> Any:
    """The control calls of a member. Raises `CapabilityError` for the call `call` where it has none."""
    if member.engine.control is None:
        raise CapabilityError(call, f"{member.name} is a {type(member.engine).__name__}, which has no control calls")
    return member.engine.control
