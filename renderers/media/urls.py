"""Parsing of URLs, the check against the policy, and redaction for errors and logs."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from urllib.parse import quote, urlsplit

from renderers.errors import MediaPolicyError
from renderers.media.policy import MediaPolicy, normal_host

_DEFAULT_PORTS = {"http": 80, "https": 443}
_CONTROL = re.compile(r"[\x00-\x1f\x7f\\]")
# Characters that a path or query may contain unquoted (RFC 3986), and % because quoted ones are quoted already.
_UNQUOTED = "%/?:@!$&'()*+,;=-._~"
_MAX_URL_LENGTH = 200


@dataclass(frozen=True, slots=True)
class Target:
    """The address and the path of an HTTP request.

    `host` is a lower-case ASCII name or an address without brackets, `authority` the Host header, `path` the path with
    its query (secret), `redacted_url` the URL for errors and logs.
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
    redacted = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"
    return quote(redacted, safe=_UNQUOTED + "[]")[:_MAX_URL_LENGTH]


def allowed_target(url: str, policy: MediaPolicy) -> Target:
    """Parse an http or https URL. Raises `MediaPolicyError` unless its scheme and host are allowed."""
    if any("\ud800" <= character <= "\udfff" for character in url):
        raise MediaPolicyError("a URL with a lone surrogate (half of a character) cannot be read")
    redacted = redact_url(url)
    try:
        parts = urlsplit(url.strip())
    except ValueError:
        raise MediaPolicyError(f"{redacted}: this URL cannot be read") from None
    if parts.scheme not in policy.allowed_schemes:
        raise MediaPolicyError(
            f"{redacted}: a {parts.scheme[:20] or 'relative'} URL is not followed under this media policy; name its "
            "scheme (http, https) and host in load_renderer(media_policy=MediaPolicy(allowed_schemes=..., "
            "allowed_hosts=...)), or pass the bytes, a PIL image or a data URL instead"
        )
    if "@" in parts.netloc:
        raise MediaPolicyError(
            f"{redacted}: credentials in a URL are not sent anywhere. Fetch the medium yourself and pass the bytes"
        )
    if _CONTROL.search(url.strip()):
        raise MediaPolicyError(f"{redacted}: a URL with control characters or backslashes is not followed")
    try:
        host, port = normal_host(parts.hostname or ""), parts.port
    except ValueError:  # UnicodeError too
        raise MediaPolicyError(f"{redacted}: host or port of this URL cannot be read") from None
    if not policy.allows_host(host):
        raise MediaPolicyError(f"{redacted}: the host {host} is not among allowed_hosts of the media policy")
    bracketed = f"[{host}]" if ":" in host else host
    default = _DEFAULT_PORTS[parts.scheme]
    return Target(
        scheme=parts.scheme,
        host=host,
        port=default if port is None else port,
        authority=bracketed if port in (None, default) else f"{bracketed}:{port}",
        path=quote((parts.path or "/") + (f"?{parts.query}" if parts.query else ""), safe=_UNQUOTED),
        redacted_url=redacted,
    )
