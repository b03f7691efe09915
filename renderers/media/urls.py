"""A URL taken apart and held against the policy, and how it is redacted_url."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from renderers.errors import MediaPolicyError
from renderers.media.hosts import is_address, normal_host
from renderers.media.policy import MediaPolicy

_DEFAULT_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
# What may stand in a path or query as it is (RFC 3986), and % for what is quoted already.
_KEPT = "%/?:@!$&'()*+,;=-._~"
_MAX_URL_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Target:
    """Where to connect, and what to ask for there.

    `host` is a lower-case ASCII name or an address without brackets, `authority` the Host header, `path` the path with
    its query (secret), `redacted_url` what errors and logs say.
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
        _ = parts.port  # a password with a slash leaves half of itself here, and the rest in the path
    except ValueError:
        return "<unreadable URL>"
    if not parts.scheme or not parts.netloc:
        return "<unreadable URL>"
    redacted_url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return quote(redacted_url, safe=_KEPT + "[]")[:_MAX_URL_LENGTH]


def allowed_target(url: str, policy: MediaPolicy) -> Target:
    """Take an http or https URL apart. Raises `MediaPolicyError` unless scheme and host are allowed."""
    if any("\ud800" <= character <= "\udfff" for character in url):
        raise MediaPolicyError("a URL with half a character (a lone surrogate) cannot be read")
    redacted_url = redact_url(url)
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        raise MediaPolicyError(f"{redacted_url}: this URL cannot be read") from None
    if parts.scheme not in policy.allowed_schemes:
        raise MediaPolicyError(
            f"{redacted_url}: a {parts.scheme[:20] or 'relative'} URL is not followed under this media policy; name its "
            "scheme in allowed_schemes (http, https), or pass the bytes, a PIL image or a data URL instead"
        )
    if "@" in parts.netloc:
        raise MediaPolicyError(
            f"{redacted_url}: credentials in a URL are not sent anywhere. Fetch the medium yourself and pass the bytes"
        )
    if _CONTROL.search(url.strip()):
        raise MediaPolicyError(f"{redacted_url}: a URL with control characters or backslashes is not followed")
    try:
        host, port = normal_host(parts.hostname or ""), parts.port
    except ValueError:  # UnicodeError too
        raise MediaPolicyError(f"{redacted_url}: host or port of this URL cannot be read") from None
    if not _is_allowed_host(host, policy.allowed_hosts):
        raise MediaPolicyError(f"{redacted_url}: the host {host} is not among allowed_hosts of the media policy")
    bracketed = f"[{host}]" if ":" in host else host
    default = _DEFAULT_PORTS[parts.scheme]
    return Target(
        scheme=parts.scheme,
        host=host,
        port=default if port is None else port,
        authority=bracketed if port in (None, default) else f"{bracketed}:{port}",
        path=quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_KEPT),
        redacted_url=redacted_url,
    )


def _is_allowed_host(host: str, patterns: tuple[str, ...]) -> bool:
    return any(_matches(host, pattern) for pattern in patterns)


def _matches(host: str, pattern: str) -> bool:
    if pattern == "*":
        return True
    if pattern.startswith("*."):
        return not is_address(host) and host.endswith("." + normal_host(pattern[2:]))
    return host == normal_host(pattern.strip("[]"))
