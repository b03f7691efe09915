"""http(s) URL -> bytes, as far as the policy allows."""

from __future__ import annotations

import logging
import re
import sys
import time
from urllib.parse import urljoin

from renderers.errors import BlockingFetchError, MediaError, MediaFetchError, MediaPolicyError, MediaTimeoutError
from renderers.media.addresses import public_addresses
from renderers.media.deadline import Deadline
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import check_type
from renderers.media.urls import Target, allowed_target

_log = logging.getLogger("renderers")
_MEDIA_TYPE = re.compile(r"[\w.+-]{1,40}/[\w.+-]{1,80}")


def fetch(url: str, policy: MediaPolicy) -> bytes:
    """Fetch an image or a video: the body of a 200, complete, uncompressed, of at most `max_bytes`.

    Scheme and host must be allowed, and every address that the host resolves to must be public (or in
    `allowed_networks`); the connection goes to one of the addresses that were checked, and each redirect is checked
    like the first URL. One deadline of `policy.timeout` seconds covers all of it. Each fetch makes a connection of its
    own, which costs one more round trip than a kept one, two or three with TLS. Blocks; may be called from any thread
    except that of a running event loop.

    Errors and logs show URLs without credentials, query and fragment. Raises `MediaPolicyError` (`MediaAddressError`
    for addresses), `BlockingFetchError`, `MediaTimeoutError`, `MediaLimitError`, `MediaTypeError` for what is neither
    image nor video, and `MediaFetchError` for the rest.
    """
    try:
        return _fetch(url, policy)
    except MediaError as error:
        # `from None` hides the earlier error from tracebacks, but not from debuggers and error reports, and its text
        # may quote what the server sent.
        error.__context__ = None
        raise


def _fetch(url: str, policy: MediaPolicy) -> bytes:
    target = allowed_target(url, policy)
    if on_event_loop():
        raise BlockingFetchError(
            f"{target.redacted_url} would be fetched on the thread of a running event loop, which would stand still "
            "meanwhile; await asyncio.to_thread(...), use a RendererPool, or call renderer.prefetch(messages) before"
        )
    started = time.monotonic()
    try:
        body = _fetch_with_redirects(url, target, policy, Deadline(policy.timeout))
    except TimeoutError:
        raise MediaTimeoutError(
            f"{target.redacted_url}: not fetched within timeout={policy.timeout:g} s of the media policy, redirects "
            "included"
        ) from None
    _log.debug("fetched %s: %d bytes in %.3f s", target.redacted_url, len(body), time.monotonic() - started)
    return body


def _fetch_with_redirects(url: str, target: Target, policy: MediaPolicy, deadline: Deadline) -> bytes:
    from renderers.media.pinned_http import get  # loads httpcore

    first = target.redacted_url
    for _ in range(policy.max_redirects + 1):
        addresses = public_addresses(
            target.host,
            target.port,
            allowed_networks=policy.allowed_networks,
            deadline=deadline,
            url=first if target.redacted_url == first else f"{target.redacted_url} (redirected from {first})",
        )
        response = get(target, addresses, max_bytes=policy.max_bytes, deadline=deadline)
        if response.location is None:
            declared = _MEDIA_TYPE.match(response.content_type)
            check_type(response.body, name=target.redacted_url, declared=declared.group() if declared else None)
            return response.body
        url, target = _redirect_target(url, target, response.location, policy)
    raise MediaFetchError(f"{first} redirects more often than max_redirects={policy.max_redirects} of the policy")


def _redirect_target(url: str, target: Target, location: str, policy: MediaPolicy) -> tuple[str, Target]:
    try:
        next_url = urljoin(url, location)
    except ValueError:
        raise MediaFetchError(f"{target.redacted_url} redirects to a URL that cannot be read") from None
    try:
        next_target = allowed_target(next_url, policy)
    except MediaPolicyError as error:
        raise MediaPolicyError(f"{target.redacted_url} redirects: {error.reason}") from None
    if target.scheme == "https" and next_target.scheme == "http":
        raise MediaPolicyError(
            f"{target.redacted_url} redirects from https to {next_target.redacted_url}, which is not encrypted"
        )
    return next_url, next_target


def on_event_loop() -> bool:
    """Whether an event loop runs on this thread, which then must not wait for a network."""
    asyncio = sys.modules.get("asyncio")  # a program without asyncio does not pay for importing it
    return asyncio is not None and asyncio._get_running_loop() is not None
