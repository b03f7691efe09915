"""Host names and the patterns of them that a policy allows."""

from __future__ import annotations

import re
from ipaddress import IPv6Address, ip_address

_HOST = re.compile(r"(?=.{1,253}\Z)[a-z0-9_-]{1,63}(\.[a-z0-9_-]{1,63})*")


def check_host_pattern(pattern: str) -> None:
    """Raise ValueError for what no host can match: a URL, a port, a `*` elsewhere than at the start."""
    if pattern != "*":
        normal_host(pattern.removeprefix("*.").strip("[]"))


def is_address(host: str) -> bool:
    try:
        ip_address(host)
    except ValueError:
        return False
    return True


def normal_host(host: str) -> str:
    """Lower case, ASCII, without the dot at its end. Raises ValueError (UnicodeError) for what is no host."""
    if ":" in host and "%" not in host:  # an address with a zone is one of a local link
        return str(IPv6Address(host))
    ascii_host = host if host.isascii() else host[:1000].encode("idna").decode("ascii")
    normal = ascii_host.lower().removesuffix(".")
    if not _HOST.fullmatch(normal):
        raise ValueError("not a host name")
    return normal
