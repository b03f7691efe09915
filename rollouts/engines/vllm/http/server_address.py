"""Where a server is, and text from which credentials were taken."""

from __future__ import annotations

import base64
import re
from dataclasses import dataclass, field
from urllib.parse import unquote, urlsplit

_DEFAULT_PORTS = {"http": 80, "https": 443}
# user:password@ of a URL, and what follows the words that introduce a secret.
_CREDENTIALS = re.compile(r"(?i)(?<=://)[^/\s'\"]*@|\b(bearer|basic)\s+[\w.~+/=-]{4,}")


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A server's root. `url` has no credentials and no trailing slash; `authorization` is the header they became."""

    tls: bool
    host: str
    port: int
    path: str
    url: str
    authorization: str | None = field(repr=False)

    @property
    def host_header(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return host if self.port == _DEFAULT_PORTS["https" if self.tls else "http"] else f"{host}:{self.port}"


def parse_address(base_url: str, *, api_key: str | None) -> ServerAddress:
    """Read the URL of a server's root. Raises `ValueError`, which shows no credentials.

    `user:password@` becomes a Basic Authorization header, `api_key` a Bearer one.
    """
    shown = redacted(re.split(r"[?#]", base_url)[0])
    try:
        parts = urlsplit(base_url.strip())
        port = parts.port
    except ValueError as error:
        raise ValueError(f"base_url {shown!r} is no URL: {redacted(str(error))}") from None
    host = parts.hostname or ""
    if parts.scheme not in _DEFAULT_PORTS or not host:
        raise ValueError(f"base_url {shown!r} must look like http://host:8000 or https://host")
    if parts.query or parts.fragment:
        raise ValueError(f"base_url {shown!r} has a query or a fragment; give the server's root only")
    path = parts.path.rstrip("/")
    if path.endswith("/v1"):
        raise ValueError(f"base_url {shown!r} ends in /v1; give the server's root, one level above")
    if not (host + path).isascii() or re.search(r"[\s\x00-\x1f]", host + path):
        raise ValueError(f"base_url {shown!r} must be ASCII without spaces; encode it (punycode, %20) first")
    authorization = f"Bearer {_checked_key(api_key)}" if api_key else None
    if parts.username is not None or parts.password is not None:
        if authorization is not None:
            raise ValueError(f"base_url {shown!r} holds credentials and api_key is given too; give one of them")
        pair = f"{unquote(parts.username or '')}:{unquote(parts.password or '')}"
        authorization = "Basic " + base64.b64encode(pair.encode()).decode()
    address = ServerAddress(
        parts.scheme == "https", host, port or _DEFAULT_PORTS[parts.scheme], path, "", authorization
    )
    url = f"{parts.scheme}://{address.host_header}{path}"
    return ServerAddress(address.tls, host, address.port, path, url, authorization)


def redacted(text: str) -> str:
    """The text without the credentials of URLs and of Authorization headers that it quotes."""
    return _CREDENTIALS.sub(lambda match: f"{match[1]} ..." if match[1] else "", text)


def _checked_key(api_key: str) -> str:
    if not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ValueError("api_key has spaces, line ends or other characters that no HTTP header can carry; strip it")
    return api_key
