"""Fetching of http(s) URLs: bodies, redirects and TLS, against a real server that may be hostile."""

import asyncio
import socket
import ssl
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fetched_media import PNG, SECRET, policy
from hostile_server import (
    HostileServer,
    answer,
    redirect,
    serving,
)

from renderers.errors import MediaFetchError, MediaPolicyError
from renderers.media import fetching as pinned_http
from renderers.media.fetching import fetch
from renderers.media.reference import source_of_part


def test_the_request_carries_the_query_and_nothing_of_the_environment(
    server: HostileServer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login me password mine\n")
    monkeypatch.setenv("NETRC", str(tmp_path / ".netrc"))
    for name in ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.2:9")  # would fail
    server.on("/a", answer(PNG, "Set-Cookie: id=1; Path=/"))
    for _ in range(2):
        assert fetch(server.url("/a?x=1&y=ä b#fragment"), policy()) == PNG
    for exchange in server.seen:
        assert exchange.path == "/a?x=1&y=%C3%A4%20b"
        assert exchange.headers["accept-encoding"] == "identity"
        assert exchange.headers["host"] == f"127.0.0.1:{server.port}"
        assert not {"cookie", "authorization", "proxy-authorization", "referer"} & set(exchange.headers)


def test_a_redirect_within_the_policy_is_followed(server: HostileServer) -> None:
    server.on("/end", answer(PNG))
    for status in ("301 Moved", "302 Found", "303 See Other", "307 Temporary", "308 Permanent"):
        for location in ("end", "/end", server.url("/end"), "//127.0.0.1:" + str(server.port) + "/end"):
            assert fetch(server.on("/start", redirect(location, status)), policy()) == PNG


# Redirects.


def test_a_name_is_resolved_and_checked_again_at_each_redirect(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    names("rebind.test", ["127.0.0.1"], ["127.0.0.2"])
    server.on("/a", redirect("/b"))
    with serving("127.0.0.2", server.port) as private:
        with pytest.raises(MediaPolicyError, match="which is not public"):
            fetch(server.url("/a", host="rebind.test"), policy())
        assert private.connections == 0


@pytest.mark.parametrize(
    ("location", "word"),
    [
        ("file:///etc/passwd", "file URL"),
        ("ftp://127.0.0.1/a", "ftp URL"),
        ("gopher://127.0.0.1:6379/_FLUSHALL", "gopher URL"),
        ("data:image/png;base64,AAAA", "data URL"),
        ("http://elsewhere.test/a", "allowed_hosts"),
        (f"http://user:{SECRET}@127.0.0.1/", "credentials"),
    ],
)
def test_a_redirect_that_the_policy_would_refuse_as_a_url_is_refused(
    server: HostileServer, location: str, word: str
) -> None:
    with pytest.raises(MediaPolicyError, match=word) as caught:
        fetch(server.on("/a", redirect(location)), policy(allowed_hosts=("127.0.0.1",)))
    assert "redirects" in str(caught.value)
    assert SECRET not in str(caught.value)


def test_redirects_are_bounded_by_the_policy(server: HostileServer) -> None:
    url = server.on("/loop", redirect("/loop"))
    with pytest.raises(MediaFetchError, match="max_redirects=3"):
        fetch(url, policy())
    assert len(server.seen) == 4
    with pytest.raises(MediaFetchError, match="max_redirects=0"):
        fetch(url, policy(max_redirects=0))
    assert len(server.seen) == 5


# Event loops.


async def test_a_fetch_on_the_thread_of_an_event_loop_names_the_cure(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG))
    with pytest.raises(MediaFetchError, match=r"asyncio\.to_thread"):
        fetch(url, policy())
    with pytest.raises(MediaFetchError, match="on the thread of a running event loop"):
        source_of_part({"type": "image", "image": url}, policy())
    assert server.connections == 0
    assert await asyncio.to_thread(fetch, url, policy()) == PNG


# TLS.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A certificate for good.test, with its key, that signs itself."""
    path = tmp_path_factory.mktemp("tls") / "both.pem"
    command = (
        "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=good.test -addext subjectAltName=DNS:good.test"
    )
    result = subprocess.run([*command.split(), "-keyout", "-", "-out", "-"], capture_output=True, check=True)
    path.write_bytes(result.stdout)
    return path


@pytest.fixture
def tls_server(certificate: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HostileServer]:
    """A server that the client trusts as good.test."""
    serving_side = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    serving_side.load_cert_chain(certificate)
    trusting = ssl.create_default_context(cafile=certificate)
    monkeypatch.setattr(pinned_http, "tls_context", lambda: trusting)
    with serving(tls=serving_side) as running:
        yield running


@pytest.mark.slow
def test_the_certificate_is_checked_against_the_name_while_the_address_is_pinned(
    tls_server: HostileServer, names: Callable[..., list[str]]
) -> None:
    tls_server.on("/", answer(PNG))
    asked = names("good.test", ["127.0.0.1"], ["127.0.0.2"])
    assert fetch(tls_server.url("/", host="good.test"), policy()) == PNG
    assert asked == ["good.test"]
    names("other.test", ["127.0.0.1"])
    for host in ("other.test", "127.0.0.1"):
        with pytest.raises(MediaFetchError, match="certificate"):
            fetch(tls_server.url("/", host=host), policy())


@pytest.mark.slow
def test_a_certificate_of_an_unknown_authority_is_refused(
    tls_server: HostileServer, names: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    names("good.test", ["127.0.0.1"])
    pinned_http.tls_context.cache_clear()
    real = socket.getaddrinfo
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, *args, **options: real("127.0.0.1", *args, **options))
    with pytest.raises(MediaFetchError, match="certificate"):
        fetch(tls_server.url("/", host="good.test"), policy())


def test_a_redirect_from_https_to_http_is_refused(
    tls_server: HostileServer, server: HostileServer, names: Callable[..., list[str]]
) -> None:
    names("good.test", ["127.0.0.1"])
    tls_server.on("/", redirect(server.url(f"/?{SECRET}")))
    with pytest.raises(MediaPolicyError, match="not encrypted") as caught:
        fetch(tls_server.url("/", host="good.test"), policy())
    assert SECRET not in str(caught.value)
    assert server.connections == 0
