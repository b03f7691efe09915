"""Rendezvous hashing: which member a session belongs to, without a table that members share.

Every pair of session and member has a score; the session belongs to the member with the highest one. A member that
leaves therefore moves its own sessions only, and a new one takes over only the sessions for which it scores highest:
on average 1/N of them. Source: D. Thaler and C. Ravishankar, "Using name-based mappings to increase hit rates",
IEEE/ACM Transactions on Networking 6(1), 1998.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable


def ranked_members(session: str, members: Iterable[str]) -> list[str]:
    """The members in the order in which the session prefers them. The same in every process and on every machine."""
    return sorted(members, key=lambda member: (_score(session, member), member), reverse=True)


def _score(session: str, member: str) -> bytes:
    # The length keeps the pairs ("ab", "c") and ("a", "bc") apart.
    key = f"{len(member)}:{member}{session}".encode("utf-8", "surrogatepass")
    return hashlib.blake2b(key, digest_size=8).digest()
