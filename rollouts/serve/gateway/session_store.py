"""The sessions of a gateway: found by id or by conversation, bounded, evicted when idle."""

import asyncio
import logging
import re
import tempfile
import time
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from starlette.requests import ClientDisconnect

from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.turns import EpisodeSettings, TurnRecorder
from rollouts.errors import short_repr
from rollouts.serve.errors import (
    ANSWERED,
    RequestError,
    SessionNotDeliveredError,
    invalid_field,
    request_error,
    session_gone,
)
from rollouts.serve.gateway.history import History
from rollouts.serve.gateway.limits import GatewayLimits, kept_bytes
from rollouts.serve.gateway.session import Session, StoredResponse
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory
from transport import RecordWriter


def snapshot(trajectory: Trajectory) -> Trajectory:
    """The trajectory as it is now; the original may grow meanwhile."""
    nodes, turns = tuple(trajectory.nodes), tuple(trajectory.turns)
    return replace(trajectory, nodes=nodes, turns=turns, metrics=dict(trajectory.metrics))


def record_file(trajectory: Trajectory) -> bytes:
    """The bytes of a record file with the trajectory, as `RecordWriter` writes it and `read_records` reads it."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "trajectory.mmr"
        with RecordWriter(path) as out:
            out.append(trajectory)
        return path.read_bytes()


def session_object(session: Session) -> dict[str, Any]:
    """What a session is now."""
    trajectory = session.trajectory
    return {
        "session_id": session.id,
        "group_id": trajectory.group_id,
        "seed": trajectory.seed,
        "turns": trajectory.num_turns,
        "branches": len(trajectory.leaves()),
        "forks": trajectory.forks,
        "metrics": trajectory.metrics,
        "reward": trajectory.reward,
        "ended": trajectory.finished,
        "delivered": session.is_delivered,
        "requests_in_flight": session.in_flight,
        "idle_seconds": time.monotonic() - session.last_used,
        "estimated_bytes": session.nbytes,
    }


_log = logging.getLogger("rollouts")
#: Clients and proxies remove "." and ".." from paths.
_SESSION_ID: Final = re.compile(r"(?!\.\.?$)[A-Za-z0-9._:@-]{1,128}")

#: Called with the trajectory of every session that ends, is deleted or is evicted; again after it has raised.
OnSessionEnd = Callable[[Trajectory], object]


class SessionStore:
    """Holds the sessions of one event loop."""

    def __init__(
        self, settings: EpisodeSettings, limits: GatewayLimits, on_session_end: OnSessionEnd | None = None
    ) -> None:
        self._settings = settings
        self._limits = limits
        self._on_session_end = on_session_end
        self._provenance = Provenance.of(settings.renderer, settings.engine)
        self._sessions: OrderedDict[str, Session] = OrderedDict()  # the one that was used last is the last
        self._gone: OrderedDict[str, str] = OrderedDict()
        # From the digest of a conversation to the sessions that recorded it, the last one last.
        self._anonymous: dict[bytes, dict[str, Session]] = {}
        self._anonymous_calls: dict[str, str] = {}  # from the id of a tool call to the session that made it
        self._responses: dict[str, Session] = {}  # of the Responses API, by id
        self._nbytes = 0

    def __iter__(self) -> Iterator[Session]:
        return iter(list(self._sessions.values()))

    # Finding.

    def get(self, session_id: str) -> Session:
        """Raises `RequestError` for one that is gone or unknown."""
        session = self.find(session_id)
        if session is None:
            message = f"there is no session {session_id!r}; a request for a completion with this id begins it"
            raise RequestError(404, message, code="session_not_found")
        return session

    def find(self, session_id: str | None, history: History | None = None) -> Session | None:
        """The session with the id; without one, that which recorded the conversation that the history continues."""
        self._evict_idle()
        if session_id is None:
            return None if history is None else self._continued(history)
        if session_id in self._gone:
            raise session_gone(session_id, self._gone[session_id])
        return self._sessions.get(session_id)

    def for_request(self, session_id: str | None, history: History) -> Session:
        """The session of a completion, which begins one if `find` knows none. Raises `RequestError`.

        So each conversation of a client that knows only a base URL is a session.
        """
        session = self.find(session_id, history)
        if session is None:
            return self.begin(session_id)
        if session.trajectory.finished:
            message = f"the session {session.id!r} has ended; begin another one, with another id"
            raise RequestError(409, message, code="session_ended")
        self.check_room()
        return session

    def check_room(self, *, for_another: bool = False) -> None:
        """Remove sessions that `on_session_end` has, until there is room. Raises `RequestError` without room."""
        limits, keeps = self._limits, self._on_session_end is None
        while self._nbytes > limits.max_bytes or (for_another and len(self._sessions) >= limits.max_sessions):
            session = next((one for one in self if one.is_delivered and not keeps), None)
            if session is None:
                raise RequestError(
                    503,
                    f"{len(self._sessions)} sessions of about {self._nbytes} bytes are kept, of max_sessions="
                    f"{limits.max_sessions} and max_bytes={limits.max_bytes}. End or delete sessions",
                    code="gateway_full",
                )
            self._remove(session, "it had ended and was handed over, and another session needed its room")

    def begin(self, session_id: str | None, *, group_id: str = "", seed: int | None = None) -> Session:
        """A new session, anonymous without an id. Raises `RequestError`, `TrajectoryError`."""
        if session_id is not None and not _SESSION_ID.fullmatch(session_id):
            reason = "is not 1 to 128 of A-Z a-z 0-9 . _ : @ -, or is . or .."
            raise invalid_field(f"the session id {short_repr(session_id)} {reason}", "session_id")
        if self.find(session_id) is not None:
            message = f"there is a session {session_id!r} already; use another id"
            raise RequestError(409, message, code="session_exists")
        self.check_room(for_another=True)
        trajectory = Trajectory(session_id or uuid.uuid4().hex, seed=seed or 0, group_id=group_id)
        trajectory.started_at = time.time()
        trajectory.provenance = self._provenance
        recorder = TurnRecorder(trajectory, self._settings, EpisodeActivity())
        session = Session(recorder, seed=seed, is_anonymous=session_id is None, on_count=self._count)
        self._sessions[session.id] = session
        return session

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes

    def _continued(self, history: History) -> Session | None:
        # Conversations that are equal in every message differ in the ids of their tool calls.
        for end in history.turn_ends:
            for call in history.messages[end - 1].get("tool_calls") or ():
                if (call_id := call.get("id")) in self._anonymous_calls:
                    maker = self._sessions[self._anonymous_calls[call_id]]
                    return maker if maker.find(history) is not None else None
        for end in history.turn_ends:
            ended = None
            for session in reversed(self._anonymous.get(history.digests[end], {}).values()):
                if session.find(history) is None:
                    continue
                if not session.trajectory.finished:
                    return session
                ended = ended or session
            if ended is not None:
                return ended
        return None

    # Using.

    @contextmanager
    def request(self, session: Session) -> Iterator[None]:
        """A request of a session, during which it is not evicted. Raises `RequestError`."""
        if session.id not in self._sessions:  # deleted since the session was found
            raise session_gone(session.id, self._gone.get(session.id, "it was deleted"))
        session.in_flight += 1
        self._touch(session)
        try:
            with self.counting_refusals(session.id):
                yield
        finally:
            session.in_flight -= 1
            if session.is_anonymous and not session.in_flight and not session.trajectory.num_turns:
                self._remove(session, None)  # nobody knows its id
            elif session.id in self._sessions:
                self._touch(session)

    @contextmanager
    def counting_refusals(self, session_id: str | None) -> Iterator[None]:
        """Log the error of a request, and count it in the metrics of its session, if there is one.

        Errors of engines are logged where they are answered.
        """
        try:
            yield
        except (*ANSWERED, asyncio.CancelledError) as error:
            refusal = request_error(error if isinstance(error, Exception) else ClientDisconnect())
            if refusal.status < 499:
                name = "a request" if session_id is None else f"a request of the session {short_repr(session_id)}"
                _log.warning("%s is refused with HTTP %d: %s", name, refusal.status, refusal.message)
            session = self._sessions.get(session_id or "")
            if session is not None:
                session.increment("refused_requests/" + " ".join(filter(None, (str(refusal.status), refusal.code))))
            raise

    def recorded(self, session: Session, digests: list[bytes], call_ids: list[str]) -> None:
        """A turn of the session is recorded: the digests that find it, and the ids of its tool calls."""
        if session.id in self._sessions and session.is_anonymous:
            for digest in digests:
                recorded = self._anonymous.setdefault(digest, {})
                recorded.pop(session.id, None)
                recorded[session.id] = session
            self._anonymous_calls.update(dict.fromkeys(call_ids, session.id))

    def keep_response(self, session: Session, kept: StoredResponse) -> None:
        """Keep a response, which is found until it is deleted, or its session is gone."""
        if session.id in self._sessions:
            session.count(kept_bytes(kept.response))
            session.responses[kept.response["id"]] = kept
            self._responses[kept.response["id"]] = session

    def response(self, response_id: str, param: str | None = None) -> tuple[Session, StoredResponse]:
        """A response and its session. Raises `RequestError`; `param` is the field of a request that names it."""
        session = self._responses.get(response_id)
        if session is None:
            message = (
                f"there is no response {short_repr(response_id)}: its request had store false, it or its session is "
                "deleted, or the gateway was restarted; send the whole conversation as input"
            )
            code = "response_not_found" if param is None else "previous_response_not_found"
            raise RequestError(404 if param is None else 400, message, param, code=code)
        return session, session.responses[response_id]

    def delete_response(self, response_id: str) -> None:
        """Raises `RequestError`."""
        session, _ = self.response(response_id)
        session.count(-kept_bytes(session.responses.pop(response_id).response))
        del self._responses[response_id]

    def _touch(self, session: Session) -> None:
        session.last_used = time.monotonic()
        self._sessions.move_to_end(session.id)

    # Ending.

    async def end(self, session: Session) -> None:
        """Deliver a session unless it was; it stays readable. Raises `SessionNotDeliveredError`."""
        await session.recorder.close()
        self._deliver(session)

    async def delete(self, session: Session) -> None:
        """End a session and forget its trajectory. One that cannot be delivered stays; raises as `end`."""
        await self.end(session)
        self._remove(session, "it was deleted")

    async def close(self) -> None:
        """End and deliver all sessions, then raise `SessionNotDeliveredError` for those that failed."""
        failures: dict[str, BaseException] = {}
        for session in self:
            try:
                await self.end(session)
            except SessionNotDeliveredError as error:
                _log_undelivered(session, error)
                failures[session.id] = error.__cause__ or error
        if failures:
            first = next(iter(failures.values()))
            raise SessionNotDeliveredError(list(failures), first) from first

    def _deliver(self, session: Session) -> None:
        """Finish the trajectory of a session, and hand it over unless that is done. Raises as `end`.

        Synchronous, so that calls at the same time cannot hand it over twice.
        """
        if not session.trajectory.finished:
            session.trajectory.seconds = time.monotonic() - session.began
            session.trajectory.finish()
        if not session.is_delivered and self._on_session_end is not None:
            try:
                self._on_session_end(session.trajectory)
            except Exception as error:  # it is the code of a user
                raise SessionNotDeliveredError([session.id], error) from error
        session.is_delivered = True

    def _evict_idle(self) -> None:
        """Remove sessions idle for `idle_seconds`; one that cannot be delivered stays as long again."""
        before = time.monotonic() - self._limits.idle_seconds
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_used > before:
                return
            if session.in_flight:
                self._touch(session)
                continue
            reason = f"it had no request for {self._limits.idle_seconds:g} s and was evicted"
            if not session.trajectory.finished:
                _log.warning("session %s: %s, with %d turns", session.id, reason, session.trajectory.num_turns)
                session.trajectory.truncated = True
                session.trajectory.truncation_reason = reason
            try:
                self._deliver(session)
            except SessionNotDeliveredError as error:
                _log_undelivered(session, error)
                self._touch(session)
            else:
                self._remove(session, reason)

    def _remove(self, session: Session, reason: str | None) -> None:
        """Forget a session. Later requests that name it get the reason, if there is one."""
        if self._sessions.pop(session.id, None) is None:
            return
        self._nbytes -= session.nbytes
        session.on_count = lambda nbytes: None  # a request of it may still run
        for response_id in session.responses:
            del self._responses[response_id]
        if session.is_anonymous:
            for digest in session.turns:
                recorded = self._anonymous[digest]
                del recorded[session.id]
                if not recorded:
                    del self._anonymous[digest]
            for call_id in session.internal_ids:
                self._anonymous_calls.pop(call_id, None)
        if reason is not None:
            self._gone[session.id] = reason
        if len(self._gone) > 65536:  # ids that are remembered, so that a late request gets the reason
            self._gone.popitem(last=False)


def _log_undelivered(session: Session, error: SessionNotDeliveredError) -> None:
    """Log that a session stays, where no client receives the error."""
    _log.error(
        "session %s: on_session_end failed, its trajectory was not delivered", session.id, exc_info=error.__cause__
    )
