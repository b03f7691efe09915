"""The address of a server, and texts without the credentials in it."""

from __future__ import annotations

import base64
import re
from collections.abc import Callable
from functools import partial

from yarl import URL

# The user:password@ of a URL; the value of an Authorization header.
_CREDENTIALS = re.compile(r"(?i)(?<=//)[^/\s'\"]*@|\b(bearer|basic)\s+[\w.~+/=-]{4,}")
_SHORTEST_KEY = 6


def parse_address(base_url: str, *, api_key: str | None) -> tuple[str, str | None]:
    """The URL of a server's root without credentials or trailing slash, and the Authorization header's value.

    `user:password@` becomes a Basic Authorization header, `api_key` a Bearer one. Raises `ValueError`, whose text
    contains no credentials.
    """
    redacted_url = redacted(re.split(r"[?#]", base_url)[0])
    try:
        url = URL(base_url.strip())
    except ValueError as error:
        raise ValueError(f"base_url {redacted_url!r} is not a URL: {redacted(str(error))}") from None
    if url.scheme not in ("http", "https") or not url.host:
        raise ValueError(f"base_url {redacted_url!r} must look like http://host:8000 or https://host")
    if url.raw_query_string or url.raw_fragment:
        raise ValueError(f"base_url {redacted_url!r} has a query or a fragment; give the server's root only")
    if url.path.rstrip("/").endswith("/v1"):
        raise ValueError(f"base_url {redacted_url!r} ends in /v1; give the server's root, one level above")
    if not re.fullmatch(r"[\x21-\x7e]+", base_url.strip().rpartition("@")[2]):
        raise ValueError(f"base_url {redacted_url!r} must be ASCII without spaces; encode it (punycode, %20) first")
    if api_key and not re.fullmatch(r"[\x21-\x7e]+", api_key):
        raise ValueError("api_key has spaces, line ends or other characters that no HTTP header can carry; strip it")
    authorization = f"Bearer {api_key}" if api_key else None
    if url.user is not None or url.password is not None:
        if authorization is not None:
            raise ValueError(f"base_url {redacted_url!r} has credentials and api_key is given too; give one of them")
        credentials = f"{url.user or ''}:{url.password or ''}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    return str(url.with_user(None)).rstrip("/"), authorization


def server_identity(base_url: str) -> str:
    """A text that is equal for addresses that name one server, as far as the addresses tell: `localhost` by any name,
    and the default port whether it is written or not.
    """
    url = URL(base_url)
    host = "127.0.0.1" if url.host in ("localhost", "::1", "0.0.0.0") else url.host  # noqa: S104  nothing is bound
    return f"{url.scheme}://{host}:{url.port}{url.path.rstrip('/')}"


def redacted(text: str) -> str:
    """The text without credentials of URLs and values of Authorization headers."""
    return _CREDENTIALS.sub(lambda match: f"{match[1]} ..." if match[1] else "", text)


def key_remover(*keys: str) -> Callable[[str], str]:
    """What replaces keys in a text by "...": these, also with their ends cut off, and OpenAI's with stars in them.

    A text of fewer than 6 characters is no secret key, and stands in words.
    """
    patterns = [r"\bsk-[\w*.-]{4,}"]
    for key in keys:
        if len(key) >= _SHORTEST_KEY:
            patterns += [re.escape(key), rf"{re.escape(key[: max(_SHORTEST_KEY, len(key) // 2)])}[\w.~+/=-]*"]
    return partial(re.compile("|".join(patterns)).sub, "...")
