"""The URLs and the addresses that a policy allows."""

import queue
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv6Address, ip_address, ip_network
from typing import Any
from urllib.parse import quote, urlsplit

from renderers.errors import MediaFetchError, MediaPolicyError
from renderers.media.policy import Deadline, MediaPolicy, normal_host

# Networks that are not public although some or all versions of `ipaddress` call them global. Source: IANA's
# registries of addresses for special purposes; 168.63.129.16 answers requests for metadata inside Azure.
_NOT_PUBLIC = tuple(
    map(ip_network, ("168.63.129.16/32", "192.0.0.0/24", "192.88.99.0/24", "2001::/23", "2002::/16", "3fff::/20"))
)
_UNICAST = ip_network("2000::/3")  # the only part of IPv6 that is given out for public use
_NAT64 = ip_network("64:ff9b::/96")
# The third quarter of an ISATAP address, whose last quarter is an IPv4 address (RFC 5214).
_ISATAP = (0x00005EFE, 0x02005EFE)


def is_public_address(address: str | IPv4Address | IPv6Address, allowed_networks: Iterable[str] = ()) -> bool:
    """Whether an address belongs to the public internet or to one of `allowed_networks`.

    An IPv6 address that contains an IPv4 address is public if that one is and the form is still in use
    (mapped, NAT64); obsolete forms (compatible, 6to4, Teredo) are never public. Raises ValueError for a text
    that is not an address.
    """
    parsed = ip_address(address)
    return any(parsed in ip_network(network) for network in allowed_networks) or _is_public(parsed)


def public_addresses(
    host: str, port: int, *, allowed_networks: Iterable[str], deadline: Deadline, url: str
) -> list[str]:
    """The addresses that `host` (a name, or an address in any notation) has now, each of them public.

    `url` is the redacted URL for errors. Raises `MediaPolicyError` if an address is not public,
     `MediaFetchError` if there is none, TimeoutError after the deadline.
    """
    addresses = _resolve(host, port, deadline, url)
    # All of them: a name may have a public address and a private one.
    for address in addresses:
        if not is_public_address(address, allowed_networks):
            raise MediaPolicyError(
                f"{url}: {host} has the address {address}, which is not public. If it is meant to be "
                "reached, name its network in allowed_networks of the media policy"
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


def _resolve(host: str, port: int, deadline: Deadline, url: str) -> list[str]:
    """Resolve a host name in a thread: a resolver that does not answer can only be abandoned."""
    results: queue.SimpleQueue[Any] = queue.SimpleQueue()

    def resolve() -> None:
        try:
            results.put(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))
        except (OSError, UnicodeError) as error:
            results.put(error)

    threading.Thread(target=resolve, name="media-dns", daemon=True).start()
    try:
        result = results.get(timeout=deadline.remaining())
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(result, Exception):
        raise MediaFetchError(f"{url}: the host name {host} cannot be resolved ({result})") from None
    return list(dict.fromkeys(str(socket_address[0]) for *_, socket_address in result))


_CONTROL = re.compile("[\x00-\x1f\x7f\\\\\ud800-\udfff]")  # and halves of surrogate pairs
# Characters that a path or query may contain unquoted (RFC 3986), and % because quoted ones are quoted already.
_UNQUOTED = "%/?:@!$&'()*+,;=-._~"


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the path of an HTTP request.

    `host` is a lower-case ASCII name or an address without brackets, `authority` the Host header, `path` the
    path with its query (secret), `redacted_url` the URL for errors and logs.
    """

    scheme: str
    host: str
    port: int
    authority: str
    path: str = field(repr=False)
    redacted_url: str


def redact_url(url: str) -> str:
    """scheme://host[:port]/path: without credentials, query and fragment."""
    try:
        parts = urlsplit(url.strip())
        _ = parts.port  # raises where a password with a slash leaves its first half in the place of the port
    except ValueError:
        return "<unreadable URL>"
    if not parts.scheme or not parts.netloc:
        return "<unreadable URL>"
    # From the right, because a password may contain an @.
    redacted = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return quote(redacted, safe=_UNQUOTED + "[]", errors="replace")[:200]


def allowed_target(url: str, policy: MediaPolicy) -> Target:
    """Parse an http or https URL. Raises `MediaPolicyError` unless its scheme and host are allowed."""
    redacted = redact_url(url)
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        raise MediaPolicyError(f"{redacted}: this URL cannot be read") from None
    if parts.scheme not in policy.allowed_schemes:
        raise MediaPolicyError(
            f"{redacted}: a {parts.scheme[:20] or 'relative'} URL is not followed under this media policy; "
            "name its scheme (http, https) and host in "
            "load_renderer(media_policy=MediaPolicy(allowed_schemes=..., allowed_hosts=...)), or pass the "
            "bytes or a data URL instead"
        )
    if "@" in parts.netloc:
        raise MediaPolicyError(
            f"{redacted}: credentials in a URL are not sent anywhere. Fetch the medium yourself and pass the bytes"
        )
    # `urlsplit` drops tabs and line ends: another reader of this text could see another host.
    if _CONTROL.search(url.strip()):
        raise MediaPolicyError(
            f"{redacted}: a URL with control characters, backslashes or half a character is not followed"
        )
    try:
        host, port = normal_host(parts.hostname or ""), parts.port
    except ValueError:  # UnicodeError too
        raise MediaPolicyError(f"{redacted}: host or port of this URL cannot be read") from None
    if not policy.allows_host(host):
        raise MediaPolicyError(f"{redacted}: the host {host} is not among allowed_hosts of the media policy")
    bracketed = f"[{host}]" if ":" in host else host
    default = {"http": 80, "https": 443}[parts.scheme]
    return Target(
        scheme=parts.scheme,
        host=host,
        port=default if port is None else port,
        authority=bracketed if port in (None, default) else f"{bracketed}:{port}",
        path=quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_UNQUOTED),
        redacted_url=redacted,
    )
