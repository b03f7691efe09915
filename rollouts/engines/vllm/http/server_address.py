"""The address of a server, and the removal of credentials from text."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

# The user:password@ of a URL; the value of an Authorization header.
_CREDENTIALS = re.compile(r"(?i)(?<=://)[^/\s'\"]*@|\b(bearer|basic)\s+[\w.~+/=-]{4,}")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """`url` is the server's root without credentials or trailing slash; `authorization` is the header's value."""

    url: str
    authorization: str | None = field(repr=False)


def parse_address(base_url: str, *, api_key: str | None) -> ServerAddress:
    """Parse the URL of a server's root. Raises `ValueError`, whose text contains no credentials.

    `user:password@` becomes a Basic Authorization header, `api_key` a Bearer one.
    """
    redacted_url = redacted(re.split(r"[?#]", base_url)[0])
    try:
        parts = urlsplit(base_url.strip())
        port = parts.port
    except ValueError as error:
        raise ValueError(f"base_url {redacted_url!r} is not a URL: {redacted(str(error))}") from None
    host, path = parts.hostname or "", parts.path.rstrip("/")
    if parts.scheme not in ("http", "https") or not host:
        raise ValueError(f"base_url {redacted_url!r} must look like http://host:8000 or https://host")
    if parts.query or parts.fragment:
        raise ValueError(f"base_url {redacted_url!r} has a query or a fragment; give the server's root only")
    if path.endswith("/v1"):
        raise ValueError(f"base_url {redacted_url!r} ends in /v1; give the server's root, one level above")
    if not (host + path).isascii() or re.search(r"[\s\x00-\x1f]", host + path):
        raise ValueError(f"base_url {redacted_url!r} must be ASCII without spaces; encode it (punycode, %20) first")
    if api_key and not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ValueError("api_key has spaces, line ends or other characters that no HTTP header can carry; strip it")
    authorization = f"Bearer {api_key}" if api_key else None
    if parts.username is not None or parts.password is not None:
        if authorization is not None:
            raise ValueError(f"base_url {redacted_url!r} has credentials and api_key is given too; give one of them")
        credentials = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    authority = f"[{host}]" if ":" in host else host
    if port is not None and port != {"http": 80, "https": 443}[parts.scheme]:
        authority += f":{port}"
    return ServerAddress(f"{parts.scheme}://{authority}{path}", authorization)


def redacted(text: str) -> str:
    """The text without credentials of URLs and values of Authorization headers."""
    return _CREDENTIALS.sub(lambda match: f"{match[1]} ..." if match[1] else "", text)
