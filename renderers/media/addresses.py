"""Which internet addresses may be connected to, and what a host name resolves to."""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any

from renderers.errors import MediaAddressError, MediaFetchError
from renderers.media.deadline import Deadline

# Besides what `ipaddress` calls not global, in some or all of its versions. Source: IANA's registries of addresses for
# special purposes; 168.63.129.16 answers requests for metadata inside Azure.
_NOT_PUBLIC = tuple(
    map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"))
)
_UNICAST = ip_network("2000::/3")  # the only part of IPv6 that is given out for public use
_NAT64 = ip_network("64:ff9b::/96")
# The third quarter of an ISATAP address, whose last quarter is an IPv4 address (RFC 5214).
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public_address(address: str | IPv4Address | IPv6Address, allowed_networks: Iterable[str] = ()) -> bool:
    """Whether an address is one of the public internet's, or lies in one of `allowed_networks`.

    IPv6 addresses that carry an IPv4 address are as public as that one where they are in use (mapped, NAT64), and never
    public where they are not any more (compatible, 6to4, Teredo). Raises ValueError for what is no address.
    """
    parsed = ip_address(address)
    return any(parsed in ip_network(network) for network in allowed_networks) or _is_public(parsed)


def public_addresses(
    host: str, port: int, *, allowed_networks: Iterable[str], deadline: Deadline, redacted_url: str
) -> list[str]:
    """The addresses that `host` (a name or an address in any spelling) has now, each of them public.

    Raises `MediaAddressError` if one is not, `MediaFetchError` if there is none, TimeoutError after the deadline.
    """
    addresses = _resolve(host, port, deadline, redacted_url)
    for address in addresses:
        if not is_public_address(address, allowed_networks):
            raise MediaAddressError(
                f"{redacted_url}: {host} has the address {address}, which is not public. If it is meant to be reached, name "
                "its network in allowed_networks of the media policy"
            )
    return addresses


def _is_public(address: IPv4Address | IPv6Address) -> bool:
    if isinstance(address, IPv6Address):
        low = IPv4Address(int(address) & 0xFFFFFFFF)
        if address.ipv4_mapped is not None or address in _NAT64:
            return _is_public(low)
        if address not in _UNICAST or (int(address) >> 32 & 0xFFFFFFFF in _ISATAP and not _is_public(low)):
            return False
    return (
        address.is_global
        and not (address.is_multicast or address.is_reserved)
        and not any(address in network for network in _NOT_PUBLIC)
    )


def _resolve(host: str, port: int, deadline: Deadline, redacted_url: str) -> list[str]:
    """Ask in a thread: a resolver that does not answer cannot be interrupted, only left alone."""
    answers: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def ask() -> None:
        try:
            answers.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            answers.put(error)

    threading.Thread(target=ask, name="media-dns", daemon=True).start()
    try:
        answer = answers.get(timeout=deadline.remaining())
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(answer, Exception):
        raise MediaFetchError(f"{redacted_url}: the host name {host} cannot be resolved ({answer})") from None
    return list(dict.fromkeys(str(socket_address[0]) for *_, socket_address in answer))
