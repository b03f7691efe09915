"""What an http(s) URL may lead to, against a real server that means harm."""

from __future__ import annotations

import asyncio
import base64
import gzip
import io
import ipaddress
import logging
import socket
import ssl
import struct
import subprocess
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from hostile_server import (
    Exchange,
    HostileServer,
    answer,
    dripping,
    endless,
    head,
    head_only,
    redirect,
    serving,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.errors import (
    BlockingFetchError,
    ConfigError,
    MediaAddressError,
    MediaDecodeError,
    MediaError,
    MediaFetchError,
    MediaLimitError,
    MediaPolicyError,
    MediaTimeoutError,
    MediaTypeError,
)
from renderers.media import pinned_http
from renderers.media.addresses import is_public_address
from renderers.media.decoding import decode_image
from renderers.media.fetching import fetch
from renderers.media.reference import source_of_part
from renderers.media.urls import redact_url

NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)
SECRET = "s3cr3t"


def policy(**options: Any) -> MediaPolicy:
    """Allows http and https to any host at 127.0.0.1, and to no other address of this machine."""
    defaults: dict[str, Any] = {
        "allowed_schemes": frozenset({"http", "https"}),
        "allowed_hosts": ("*",),
        "allowed_networks": ("127.0.0.1/32",),
        "timeout": 10.0,
    }
    return MediaPolicy(**{**defaults, **options})


def png(pixels: np.ndarray = NOISE) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


PNG = png()


@pytest.fixture
def server() -> Iterator[HostileServer]:
    with serving() as running:
        yield running


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Set what a name resolves to, answer after answer; returns the list of names asked for so far."""
    real, table, asked = socket.getaddrinfo, dict[str, list[list[str]]](), list[str]()

    def getaddrinfo(host: str, port: Any, *args: Any, **options: Any) -> Any:
        if host not in table:
            return real(host, port, *args, **options)
        asked.append(host)
        answers = table[host]
        addresses = answers.pop(0) if len(answers) > 1 else answers[0]
        return [found for address in addresses for found in real(address, port, type=socket.SOCK_STREAM)]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)

    def resolve(name: str, *answers: list[str]) -> list[str]:
        table[name] = list(answers)
        return asked

    return resolve


# What goes well.


def test_an_allowed_url_gives_the_bytes_of_the_body(server: HostileServer) -> None:
    url = server.on("/a.png", answer(PNG, "Content-Type: image/png"))
    assert fetch(url, policy()) == PNG
    source = source_of_part({"type": "image", "image": url}, policy())
    np.testing.assert_array_equal(np.asarray(decode_image(source, policy())), NOISE)


@pytest.mark.parametrize("part", [{"type": "image_url", "image_url": {"url": ""}}, {"type": "image", "image": ""}])
def test_urls_of_every_part_shape_are_fetched(server: HostileServer, part: dict[str, Any]) -> None:
    url = server.on("/a.png", answer(PNG))
    filled = {key: {"url": url} if isinstance(value, dict) else value or url for key, value in part.items()}
    assert source_of_part(filled, policy()).data == PNG


def test_a_given_fetch_is_asked_instead(server: HostileServer) -> None:
    asked: list[str] = []

    def own(url: str, policy: MediaPolicy) -> bytes:
        asked.append(url)
        return PNG

    assert source_of_part({"type": "image", "image": "https://example.org/x"}, MediaPolicy(), fetch=own).data == PNG
    assert asked == ["https://example.org/x"]
    assert server.connections == 0


def test_chunked_bodies_and_bodies_that_end_with_the_connection_are_read(server: HostileServer) -> None:
    chunks = b"".join(f"{len(part):x}\r\n".encode() + part + b"\r\n" for part in (PNG[:100], PNG[100:])) + b"0\r\n\r\n"
    chunked = server.on("/chunked", lambda exchange: exchange.send(head("Transfer-Encoding: chunked") + chunks))
    unsized = server.on("/unsized", lambda exchange: exchange.send(b"HTTP/1.0 200 OK\r\n\r\n" + PNG))
    early = server.on("/early", lambda exchange: exchange.send(head(status="103 Early Hints")) or answer(PNG)(exchange))
    for url in (chunked, unsized, early):
        assert fetch(url, policy()) == PNG


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


# Scheme and host.


@pytest.mark.parametrize(
    "options", [{"allowed_schemes": frozenset()}, {"allowed_schemes": frozenset({"https"})}, {"allowed_hosts": ()}]
)
def test_nothing_is_connected_to_when_scheme_or_host_is_not_allowed(
    server: HostileServer, options: dict[str, Any], names: Callable[..., list[str]]
) -> None:
    asked = names("example.test", ["127.0.0.1"])
    with pytest.raises(MediaPolicyError):
        fetch(server.url("/a.png", host="example.test"), policy(**options))
    assert (server.connections, asked) == (0, [])


@pytest.mark.parametrize(
    ("pattern", "host", "allowed"),
    [
        ("example.org", "example.org", True),
        ("example.org", "EXAMPLE.org.", True),
        ("Example.ORG.", "example.org", True),
        ("example.org", "www.example.org", False),
        ("example.org", "example.org.evil.test", False),
        ("example.org", "notexample.org", False),
        ("*.example.org", "www.example.org", True),
        ("*.example.org", "a.b.example.org", True),
        ("*.example.org", "example.org", False),
        ("*.example.org", "evilexample.org", False),
        ("bücher.example", "xn--bcher-kva.example", True),
        ("xn--bcher-kva.example", "BÜCHER.example", True),
        ("example.org", "\uff45xample.org", True),  # a full-width letter is the same name to a resolver
        ("*", "anything.test", True),
        ("*.0.1", "127.0.0.1", False),
    ],
)
def test_host_patterns_match_whole_names(
    server: HostileServer, names: Callable[..., list[str]], pattern: str, host: str, allowed: bool
) -> None:
    for name in ("example.org", "xn--bcher-kva.example", "www.example.org", "a.b.example.org", "anything.test"):
        names(name, ["127.0.0.1"])
    server.on("/", answer(PNG))
    if allowed:
        assert fetch(server.url("/", host=host), policy(allowed_hosts=(pattern,))) == PNG
    else:
        with pytest.raises(MediaPolicyError, match="allowed_hosts"):
            fetch(server.url("/", host=host), policy(allowed_hosts=(pattern,)))
        assert server.connections == 0


@pytest.mark.parametrize(
    "options",
    [
        {"allowed_schemes": "https"},
        {"allowed_schemes": {"ftp"}},
        {"allowed_hosts": "*"},
        {"allowed_hosts": ("https://example.org",)},
        {"allowed_hosts": ("example.org:80",)},
        {"allowed_hosts": ("ex*mple.org",)},
        {"allowed_hosts": ("",)},
        {"allowed_networks": ("10.0.0.1/8",)},
        {"allowed_networks": ("everything",)},
        {"allowed_directories": "/data"},
        {"allowed_directories": Path("/data")},
    ],
)
def test_a_policy_that_cannot_mean_what_it_says_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(ConfigError, match=name):
        MediaPolicy(**options)


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http:///a",
        "http://exa mple.org/a",
        "http://example.org\\@127.0.0.1/",
        "http://127.0.0.1:99999/",
        "http://127.0.0.1:x/",
        "http://[::1/",
        "http://[fe80::1%25lo]/",
        "http://a..b/",
        "http://127.0.0.1/\r\nX-Injected: 1",
        "http://" + "a" * 64 + ".org/",
        "http://" + "ä" * 5000 + "/",
    ],
)
def test_a_url_that_cannot_be_read_is_a_policy_error(url: str) -> None:
    with pytest.raises(MediaPolicyError):
        fetch(url, policy())


# Addresses.

PRIVATE = [
    "127.0.0.2",
    "10.0.0.1",
    "172.16.0.1",
    "192.168.0.1",
    "169.254.169.254",
    "100.100.100.200",
    "168.63.129.16",
    "0.0.0.0",
    "224.0.0.1",
    "240.0.0.1",
    "255.255.255.255",
    "::",
    "::1",
    "fe80::1",
    "fd00:ec2::254",
    "ff02::1",
    "fec0::1",
    "64:ff9b:1::1",
    "2001:db8::1",
]
PUBLIC = ["93.184.215.14", "8.8.8.8", "2606:4700::1111", "2a00:1450:4001::1", "64:ff9b::8.8.8.8", "::ffff:8.8.8.8"]


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str, names: Callable[..., list[str]]) -> None:
    assert not is_public_address(address)
    names("trusted.test", [address])
    with pytest.raises(MediaAddressError) as caught:
        fetch("http://trusted.test:1/a", policy())
    assert str(ipaddress.ip_address(address)) in str(caught.value)
    assert "allowed_networks" in str(caught.value)


@pytest.mark.parametrize("address", PUBLIC)
def test_an_address_of_the_internet_is_public(address: str) -> None:
    assert is_public_address(address)


# Source: RFC 6890, tables 1 to 16, and RFC 5771.
PRIVATE_RANGES = [
    "0.0.0.0/8",
    "10.0.0.0/8",
    "100.64.0.0/10",
    "127.0.0.0/8",
    "169.254.0.0/16",
    "172.16.0.0/12",
    "192.0.0.0/24",
    "192.0.2.0/24",
    "192.88.99.0/24",
    "192.168.0.0/16",
    "198.18.0.0/15",
    "198.51.100.0/24",
    "203.0.113.0/24",
    "224.0.0.0/4",
    "240.0.0.0/4",
]
WRAPPED: dict[str, Callable[[int], int]] = {
    "mapped": lambda v4: 0xFFFF << 32 | v4,
    "compatible": lambda v4: v4,
    "translated": lambda v4: 0xFFFF << 48 | v4,
    "NAT64": lambda v4: 0x64FF9B << 96 | v4,
    "local NAT64": lambda v4: 0x64FF9B0001 << 80 | v4,
    "6to4": lambda v4: 0x2002 << 112 | v4 << 80 | 1,
    "Teredo": lambda v4: 0x20010000 << 96 | 0x4136E378 << 64 | v4 ^ 0xFFFFFFFF,
    "Teredo server": lambda v4: 0x20010000 << 96 | v4 << 64 | 0x08080808 ^ 0xFFFFFFFF,
    "ISATAP": lambda v4: 0x20014860 << 96 | 0x5EFE << 32 | v4,
    "global ISATAP": lambda v4: 0x20014860 << 96 | 0x02005EFE << 32 | v4,
}


@pytest.mark.parametrize("form", WRAPPED)
@settings(max_examples=60)
@given(data=st.data())
def test_no_ipv6_form_hides_a_private_ipv4_address(form: str, data: st.DataObject) -> None:
    network = ipaddress.IPv4Network(data.draw(st.sampled_from(PRIVATE_RANGES)))
    low, high = int(network.network_address), int(network.broadcast_address)
    v4 = data.draw(st.integers(low, high))
    assert not is_public_address(ipaddress.IPv4Address(v4))
    assert not is_public_address(ipaddress.IPv6Address(WRAPPED[form](v4)))


@given(st.ip_addresses(v=6).filter(lambda address: int(address) >> 125 != 1))
def test_beyond_global_unicast_no_ipv6_address_is_public_but_by_its_ipv4_address(address: Any) -> None:
    wrapped = address.ipv4_mapped is not None or int(address) >> 32 == 0x64FF9B << 64
    assert wrapped or not is_public_address(address)


@given(st.ip_addresses(v=4), st.integers(0, 32))
def test_an_allowed_network_makes_its_addresses_public_and_no_others(address: Any, bits: int) -> None:
    network = ipaddress.ip_network((address, bits), strict=False)
    assert is_public_address(address, (str(network),))
    other = ipaddress.IPv4Address(int(address) ^ 1 << (32 - bits)) if bits else None
    if other is not None:
        assert is_public_address(other, (str(network),)) == is_public_address(other)


@pytest.mark.parametrize(
    "host", ["127.0.0.2", "127.2", "2130706434", "0x7f.2", "0x7f000002", "0177.0.0.2", "[::ffff:127.0.0.2]", "[::]"]
)
def test_odd_spellings_of_an_address_are_read_as_the_resolver_reads_them(server: HostileServer, host: str) -> None:
    with serving("127.0.0.2", server.port) as private:
        with pytest.raises(MediaAddressError):
            fetch(server.url("/", host=host), policy())
        assert private.connections == server.connections == 0


def test_one_private_address_among_public_ones_is_enough_to_refuse(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    server.on("/", answer(PNG))
    names("good.test", ["127.0.0.1"])
    assert fetch(server.url("/", host="good.test"), policy()) == PNG
    for addresses in (["127.0.0.1", "10.0.0.1"], ["10.0.0.1", "127.0.0.1"], ["93.184.215.14", "::1"]):
        names("mixed.test", addresses)
        with pytest.raises(MediaAddressError, match=r"mixed\.test"):
            fetch(server.url("/", host="mixed.test"), policy())
    assert server.connections == 1


def test_a_dns_answer_that_changes_after_the_check_is_not_connected_to(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    server.on("/", answer(PNG))
    with serving("127.0.0.2", server.port) as private:
        private.on("/", answer(png(NOISE[:5])))
        asked = names("rebind.test", ["127.0.0.1"], ["127.0.0.2"])
        assert fetch(server.url("/", host="rebind.test"), policy()) == PNG
        assert asked == ["rebind.test"]
        assert (server.connections, private.connections) == (1, 0)
        assert server.seen[0].headers["host"] == f"rebind.test:{server.port}"
        # A client that checks and then connects by name is led astray by the same two answers.
        names("rebind.test", ["127.0.0.1"], ["127.0.0.2"])
        assert socket.getaddrinfo("rebind.test", server.port)[0][4][0] == "127.0.0.1"
        assert len(httpx.get(server.url("/", host="rebind.test"), trust_env=False).content) != len(PNG)
        assert private.connections == 1


def test_the_next_address_is_tried_when_one_does_not_answer(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    server.on("/", answer(PNG))
    names("two.test", ["127.0.0.3", "127.0.0.1"])
    assert fetch(server.url("/", host="two.test"), policy(allowed_networks=("127.0.0.1/32", "127.0.0.3/32"))) == PNG


# Redirects.


@pytest.mark.parametrize(
    "location", ["http://127.0.0.2:{port}/x", "http://169.254.169.254/latest/meta-data", "http://[::1]/"]
)
def test_a_redirect_to_an_address_that_is_not_public_is_refused(server: HostileServer, location: str) -> None:
    url = server.on("/a", redirect(location.format(port=server.port)))
    with serving("127.0.0.2", server.port) as private:
        with pytest.raises(MediaAddressError, match=r"redirected from http://127\.0\.0\.1"):
            fetch(url, policy())
        assert private.connections == 0


def test_a_name_is_resolved_and_checked_again_at_each_redirect(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    names("rebind.test", ["127.0.0.1"], ["127.0.0.2"])
    server.on("/a", redirect("/b"))
    with serving("127.0.0.2", server.port) as private:
        with pytest.raises(MediaAddressError):
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


def test_a_redirect_without_a_place_to_go_is_a_fetch_error(server: HostileServer) -> None:
    with pytest.raises(MediaFetchError, match="302"):
        fetch(server.on("/a", answer(b"", status="302 Found")), policy())
    with pytest.raises(MediaFetchError, match="cannot be read"):
        fetch(server.on("/b", redirect("http://[")), policy())


# Size and time.


def test_an_endless_body_is_cut_off_at_the_byte_limit(server: HostileServer) -> None:
    with pytest.raises(MediaLimitError, match="max_bytes=1000000"):
        fetch(server.on("/a", endless), policy(max_bytes=10**6))


def test_an_announced_size_beyond_the_limit_is_refused_before_the_body(server: HostileServer) -> None:
    url = server.on("/a", head_only("Content-Length: 1000001"))
    with pytest.raises(MediaLimitError, match="1000001"):
        fetch(url, policy(max_bytes=10**6))


def test_a_body_of_exactly_the_limit_is_read(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG))
    assert fetch(url, policy(max_bytes=len(PNG))) == PNG
    with pytest.raises(MediaLimitError):
        fetch(url, policy(max_bytes=len(PNG) - 1))


def late(url: str, **options: Any) -> None:
    """The fetch ends soon after its deadline with the error that says so."""
    started = time.monotonic()
    with pytest.raises(MediaTimeoutError, match=r"timeout=0\.5 s"):
        fetch(url, policy(timeout=0.5, **options))
    assert 0.4 < time.monotonic() - started < 3


def test_a_slow_drip_is_ended_by_the_deadline(server: HostileServer) -> None:
    late(server.on("/body", dripping(head(f"Content-Length: {len(PNG)}") + PNG)))
    late(server.on("/head", dripping(b"HTTP/1.1 200 OK\r\n" + b"X-More: x\r\n" * 1000)))
    late(server.on("/hints", dripping(head(status="103 Early Hints") * 1000)))
    late(server.on("/silence", dripping(b"H", pause=20)))


def test_a_redirect_does_not_start_the_clock_again(server: HostileServer) -> None:
    def slow(exchange: Exchange) -> None:
        exchange.wait(0.2)
        redirect("/slow")(exchange)

    late(server.on("/slow", slow), max_redirects=100)


def test_a_resolver_that_does_not_answer_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **options: over.wait(20))
    try:
        late("http://example.test/a")
    finally:
        over.set()


def test_a_tls_handshake_that_hangs_is_ended_by_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:  # accepts, says nothing
        late(f"https://127.0.0.1:{listener.getsockname()[1]}/a")


# The body.


def test_a_body_shorter_than_announced_is_a_fetch_error(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG, length=len(PNG) + 1))
    with pytest.raises(MediaFetchError, match=f"after {len(PNG)} of {len(PNG) + 1} bytes"):
        fetch(url, policy())


def test_a_body_longer_than_announced_is_a_fetch_error(server: HostileServer) -> None:
    for handler in (
        answer(PNG, length=len(PNG) - 1),
        lambda exchange: exchange.send(b"HTTP/1.1 200 OK\nContent-Length: 100\n\n" + PNG),
    ):
        with pytest.raises(MediaFetchError, match="more bytes"):
            fetch(server.on("/a", handler), policy())


def test_a_chunked_body_that_is_cut_short_is_a_fetch_error(server: HostileServer) -> None:
    url = server.on("/a", lambda exchange: exchange.send(head("Transfer-Encoding: chunked") + b"5\r\nabc"))
    with pytest.raises(MediaFetchError, match="after 3 bytes"):
        fetch(url, policy())


def test_an_empty_body_is_a_fetch_error(server: HostileServer) -> None:
    with pytest.raises(MediaFetchError, match="empty"):
        fetch(server.on("/a", answer(b"")), policy())


@pytest.mark.parametrize(
    "spoken",
    [
        b"",
        b"hello\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nX: " + b"x" * 200_000,
    ],
)
def test_what_is_no_http_is_a_fetch_error(server: HostileServer, spoken: bytes) -> None:
    with pytest.raises(MediaFetchError):
        fetch(server.on("/a", lambda exchange: exchange.send(spoken)), policy())


@pytest.mark.parametrize("status", ["204 No Content", "206 Partial Content", "404 Not Found", "500 Oops", "300 Many"])
def test_any_status_but_200_is_a_fetch_error_that_names_it(server: HostileServer, status: str) -> None:
    with pytest.raises(MediaFetchError, match=status[:3]):
        fetch(server.on("/a", answer(b"" if status[0] == "2" else PNG, status=status)), policy())


def test_no_server_and_no_name_are_fetch_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as gone:
        url = gone.url("/a")
    with pytest.raises(MediaFetchError, match="no connection"):
        fetch(url, policy())

    def unknown(*args: Any, **options: Any) -> Any:
        raise socket.gaierror(-2, "Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    with pytest.raises(MediaFetchError, match="cannot be resolved"):
        fetch("http://nowhere.test/a", policy())


@pytest.mark.parametrize(
    ("body", "named"),
    [
        (b"<!DOCTYPE html><html><body>Not found</body></html>", "text/html"),
        (b"\n <html>", "text/html"),
        (b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>', "image/svg"),
        (b"<svg onload='x()'/>", "image/svg"),
        (b'{"error": "expired"}', "application/json"),
        (gzip.compress(PNG), "application/gzip"),
        (b"PK\x03\x04 archive", "application/zip"),
        (b"%PDF-1.7", "application/pdf"),
    ],
)
def test_a_body_of_another_type_is_named_whatever_it_was_announced_as(
    server: HostileServer, body: bytes, named: str
) -> None:
    url = server.on("/a.png", answer(body, "Content-Type: image/png"))
    with pytest.raises(MediaTypeError, match=named) as caught:
        fetch(url, policy())
    assert "declared as image/png" in str(caught.value)


@pytest.mark.parametrize("declared", ["image/jpeg", "text/html", "application/octet-stream", "%%%"])
def test_an_image_under_a_wrong_type_is_an_image(server: HostileServer, declared: str) -> None:
    assert fetch(server.on("/a", answer(PNG, f"Content-Type: {declared}")), policy()) == PNG


def test_a_compressed_body_is_refused_before_it_is_read(server: HostileServer) -> None:
    bomb = gzip.compress(bytes(10**7))
    for handler in (answer(bomb, "Content-Encoding: gzip"), head_only("Content-Encoding: br", "Content-Length: 9")):
        with pytest.raises(MediaFetchError, match="compressed"):
            fetch(server.on("/bomb", handler), policy())
    with pytest.raises(MediaFetchError):
        fetch(server.on("/te", answer(bomb, "Transfer-Encoding: gzip, chunked")), policy())


def test_a_decompression_bomb_that_was_fetched_is_refused_by_its_header(server: HostileServer) -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    size = struct.pack(">IIBBBBB", 9_000, 9_000, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(10**6))
    bomb = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", size) + chunk(b"IDAT", body) + chunk(b"IEND", b"")
    source = MediaSource.of(fetch(server.on("/bomb.png", answer(bomb)), policy()))
    with pytest.raises(MediaLimitError, match="max_pixels"):
        decode_image(source, policy())


def test_an_image_that_only_looks_like_one_is_left_to_the_decoder(server: HostileServer) -> None:
    source = MediaSource.of(fetch(server.on("/a", answer(PNG[:60])), policy()))
    with pytest.raises(MediaDecodeError):
        decode_image(source, policy())


# Secrets.


def hostile_exchanges(server: HostileServer) -> list[str]:
    """URLs that fail in every way there is, and one that does not."""
    away = f"http://user:{SECRET}@127.0.0.1:{server.port}/x?token={SECRET}"
    private = f"http://127.0.0.2/x?token={SECRET}#{SECRET}"
    handlers: dict[str, Callable[[Exchange], None]] = {
        "/good": answer(PNG, f"Set-Cookie: {SECRET}"),
        "/html": answer(b"<html>"),
        "/short": answer(PNG, length=10**4),
        "/status": answer(b"", f"X-Echo: {SECRET}", status=f"404 {SECRET}"),
        "/noise": lambda exchange: exchange.send(f"{exchange.path}\r\n\r\n".encode()),
        "/limit": head_only(f"Content-Length: {2**40}"),
        "/credentials": redirect(away),
        "/private": redirect(private),
        "/file": redirect(f"file:///{SECRET[:0]}?{SECRET}"),
        "/loop": lambda exchange: redirect(exchange.path)(exchange),
        "/slow": dripping(head(f"X: {SECRET}") * 100),
        "/unreadable": redirect(f"http://[{SECRET}"),
    }
    for path, handler in handlers.items():
        server.on(path, handler)
    port = server.port
    return [
        *(f"http://127.0.0.1:{port}{path}?token={SECRET}#{SECRET}" for path in handlers),
        f"http://user:{SECRET}@127.0.0.1:{port}/good",
        f"http://{SECRET}@127.0.0.1:{port}/good",
        f"http://user:{SECRET}/x@127.0.0.1:{port}/good",
        f"http://user:{SECRET}?@127.0.0.1:{port}/good",
        f"http:user:{SECRET}@127.0.0.1",
        f"http://127.0.0.2:{port}/?{SECRET}",
        f"http://127.0.0.1:1/?{SECRET}",
        f"http://127.0.0.1:{port}/\n?{SECRET}",
        f"http://nowhere.invalid/?{SECRET}",
        f"https://127.0.0.1:{port}/good?{SECRET}",
    ]


def test_no_error_and_no_log_line_shows_credentials_or_a_query(
    server: HostileServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    shown: list[str] = []
    for url in hostile_exchanges(server):
        try:
            fetch(url, policy(timeout=0.5))
        except MediaError as error:
            shown += [str(error), repr(error), "".join(traceback.format_exception(error))]
            chained: BaseException | None = error
            while chained is not None:  # what a debugger shows beyond the traceback
                shown.append(repr(chained))
                chained = chained.__cause__ or chained.__context__
    assert len(shown) > 60
    assert not [text for text in shown if SECRET in text]
    logged = [record.getMessage() for record in caplog.records]
    assert any("fetched http://127.0.0.1" in line for line in logged)
    assert not [line for line in logged if SECRET in line]
    # The same URL through a client that logs: the check above sees such lines.
    httpx.get(f"{server.url('/good')}?token={SECRET}", trust_env=False)
    assert any(SECRET in record.getMessage() for record in caplog.records)
    assert any(record.name.startswith("httpcore") for record in caplog.records)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("https://u:p@example.org:8443/a/b.png?q=1#f", "https://example.org:8443/a/b.png"),
        ("http://example.org", "http://example.org"),
        ("HTTP://[2606::1]:80/ä?x", "http://[2606::1]:80/%C3%A4"),
        ("http://u:p/p@example.org/", "<unreadable URL>"),
        ("http:u:p@example.org/", "<unreadable URL>"),
        ("http://example.org/\r\nFAKE LOG LINE", "http://example.org/FAKE%20LOG%20LINE"),
    ],
)
def test_a_url_is_shown_without_credentials_query_and_fragment(url: str, expected: str) -> None:
    assert redact_url(url) == expected


# Event loops.


async def test_a_fetch_on_the_thread_of_an_event_loop_names_the_cure(server: HostileServer) -> None:
    url = server.on("/a", answer(PNG))
    with pytest.raises(BlockingFetchError, match=r"asyncio\.to_thread"):
        fetch(url, policy())
    with pytest.raises(BlockingFetchError):
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


def test_a_data_url_needs_no_network() -> None:
    url = "data:image/png;base64," + base64.b64encode(PNG).decode()
    assert source_of_part({"type": "image", "image": url}, MediaPolicy()).data == PNG
