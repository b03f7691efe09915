"""Host names, and the host patterns of a policy."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


def check_host_pattern(pattern: str) -> None:
    """Raise ValueError for a pattern that no host can match: a URL, a port, a `*` elsewhere than at the start."""
    if pattern != "*":
        normal_host(pattern.removeprefix("*.").strip("[]"))


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def normal_host(host: str) -> str:
    """The host in lower case and ASCII, without a trailing dot. Raises ValueError (UnicodeError) for other texts."""
    if ":" in host and "%" not in host:  # an address with a zone is link-local
        return str(IPv6Address(host))
    ascii_host = host if host.isascii() else host[:1000].encode("idna").decode("ascii")
    normal = ascii_host.lower().removesuffix(".")
    if not _HOST.fullmatch(normal):
        raise ValueError("not a host name")
    return normal
