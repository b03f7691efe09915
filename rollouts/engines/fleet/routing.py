"""Which member of a fleet a session goes to."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping

from rollouts.engines.fleet.limits import FleetLimits

# Rendezvous hashing: which member a session belongs to, without a table that members share.
#
# Every pair of session and member has a score; the session belongs to the member with the highest one. A
# member that leaves therefore moves its own sessions only, and a new one takes over only the sessions for
# which it scores highest: on average 1/N of them. Source: D. Thaler and C. Ravishankar, "Using name-based
# mappings to increase hit rates", IEEE/ACM Transactions on Networking 6(1), 1998.


def ranked_members(session: str, members: Iterable[str]) -> list[str]:
    """The members in the order in which the session prefers them. The same in every process and on every machine."""
    return sorted(members, key=lambda member: (_score(session, member), member), reverse=True)


def _score(session: str, member: str) -> bytes:
    # The length keeps the pairs ("ab", "c") and ("a", "bc") apart.
    key = f"{len(member)}:{member}{session}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(key, digest_size=8).digest()


class SessionTable:
    """Chooses a member for each new session and remembers it."""

    def __init__(self, limits: FleetLimits) -> None:
        self._limits = limits
        self._members: OrderedDict[str, str] = OrderedDict()  # session -> member, the least recently used first

    def last_member(self, session: str | None) -> str:
        """The member that a session is with, available or not; empty for a new session, and for None."""
        if session is None or session not in self._members:
            return ""
        self._members.move_to_end(session)
        return self._members[session]

    def member_of(self, session: str | None, request_id: str, loads: Mapping[str, int]) -> str:
        """The member for the next request of a session; `loads` has the requests in flight at each available member.

        A session stays with its member as long as that one is available. A new session, or one whose member
        is not available, goes to the first in its rendezvous order that is not overloaded, and stays there. A
        request without a session is placed by its own id.
        """
        if session is None:
            return self._first_with_room(request_id, loads)
        member = self._members.get(session)
        if member is None or member not in loads:
            member = self._first_with_room(session, loads)
            self._members[session] = member
            if len(self._members) > self._limits.sessions:
                self._members.popitem(last=False)
        self._members.move_to_end(session)
        return member

    def _first_with_room(self, key: str, loads: Mapping[str, int]) -> str:
        """Consistent hashing with bounded loads. Source: V. Mirrokni, M. Thorup and M. Zadimoghaddam, SODA 2018."""
        if len(loads) == 1:
            return next(iter(loads))
        order = ranked_members(key, loads)
        bound = max(self._limits.spill_requests, self._limits.spill_ratio * sum(loads.values()) / len(loads))
        # The mean is below the bound, so that one member always has room.
        return next(member for member in order if loads[member] <= bound)
