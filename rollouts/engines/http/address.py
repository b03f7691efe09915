"""The address of a server, and texts without the credentials in it."""

import base64
import re
from collections.abc import Callable
from functools import partial

from yarl import URL

from rollouts.errors import ArgumentError

# The user:password@ of a URL; the value of an Authorization header.
_CREDENTIALS = re.compile(r"(?i)(?<=//)[^/\s'\"]*@|\b(bearer|basic)\s+[\w.~+/=-]{4,}")
_SHORTEST_KEY = 6


def parse_address(base_url: str, *, api_key: str | None, is_root: bool = True) -> tuple[str, str | None]:
    """A URL without credentials or trailing slash, and the value of the Authorization header.

    `user:password@` becomes a Basic Authorization header, `api_key` a Bearer one. `is_root`: the URL is the
    root of a server, else the part of an address before `/chat/completions`. Raises `ArgumentError`, whose
    text contains no credentials.
    """
    # A query may hold a key, too.
    shown = redacted(re.split(r"[?#]", base_url)[0])
    try:
        url = URL(base_url.strip())
        has_host = url.scheme in ("http", "https") and bool(url.host)
    except ValueError:  # the port, or brackets
        url, has_host = URL(), False
    has_credentials = url.user is not None or url.password is not None
    path = url.path.rstrip("/")
    for is_wrong, rule in (
        (not has_host, "pass an address such as http://host:8000 or https://host"),
        (url.raw_query_string or url.raw_fragment, "it has a query or a fragment; leave them out"),
        (is_root and path.endswith("/v1"), "it ends in /v1; give the server's root, one level above"),
        (path.endswith("/chat/completions"), "pass the part of the address before /chat/completions"),
        (
            not re.fullmatch(r"[\x21-\x7e]+", base_url.strip().rpartition("@")[2]),
            "it must be ASCII without spaces; encode it (punycode, %20) first",
        ),
        (has_credentials and api_key, "it has credentials and api_key is given too; give one of them"),
    ):
        if is_wrong:
            raise ArgumentError("base_url", shown, rule)
    if not re.fullmatch(r"[\x21-\x7e]*", api_key or ""):
        rule = "the key has spaces, line ends or other characters that no HTTP header can carry; strip it"
        raise ArgumentError("api_key", "...", rule)
    authorization = f"Bearer {api_key}" if api_key else None
    if has_credentials:
        credentials = f"{url.user or ''}:{url.password or ''}"
        authorization = "Basic " + base64.b64encode(credentials.encode()).decode()
    return str(url.with_user(None)).rstrip("/"), authorization


def server_identity(base_url: str) -> str:
    """A text that is equal for addresses that name one server, as far as the addresses tell: `localhost` by
    any name, and the default port whether it is written or not.
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
