"""Which schemes, hosts and addresses a policy allows to connect to."""

import ipaddress
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fetched_media import NOISE, PNG, png, policy
from hostile_server import (
    HostileServer,
    answer,
    serving,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from renderers import MediaPolicy
from renderers.errors import ConfigError, MediaPolicyError
from renderers.media.fetching import fetch
from renderers.media.urls import is_public_address


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
    known = ("example.org", "xn--bcher-kva.example", "www.example.org", "a.b.example.org", "anything.test")
    asked = [names(name, ["127.0.0.1"]) for name in known]
    server.on("/", answer(PNG))
    if allowed:
        assert fetch(server.url("/", host=host), policy(allowed_hosts=(pattern,))) == PNG
    else:
        with pytest.raises(MediaPolicyError, match="allowed_hosts"):
            fetch(server.url("/", host=host), policy(allowed_hosts=(pattern,)))
        assert (server.connections, any(asked)) == (0, False)


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
def test_an_impossible_policy_is_refused(options: dict[str, Any]) -> None:
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


@pytest.mark.parametrize("address", PRIVATE)
def test_an_address_that_is_not_public_is_refused(address: str, names: Callable[..., list[str]]) -> None:
    assert not is_public_address(address)
    names("trusted.test", [address])
    with pytest.raises(MediaPolicyError) as caught:
        fetch("http://trusted.test:1/a", policy())
    assert str(ipaddress.ip_address(address)) in str(caught.value)
    assert "allowed_networks" in str(caught.value)


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
def test_an_ipv6_address_outside_global_unicast_is_public_only_by_its_ipv4_address(address: Any) -> None:
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
def test_unusual_notations_of_an_address_are_read_as_the_resolver_reads_them(server: HostileServer, host: str) -> None:
    with serving("127.0.0.2", server.port) as private:
        with pytest.raises(MediaPolicyError, match="which is not public"):
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
        with pytest.raises(MediaPolicyError, match=r"mixed\.test"):
            fetch(server.url("/", host="mixed.test"), policy())
    assert server.connections == 1


def test_no_connection_goes_to_an_address_that_dns_returns_after_the_check(
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


def test_the_next_address_is_tried_when_one_does_not_answer(
    server: HostileServer, names: Callable[..., list[str]]
) -> None:
    server.on("/", answer(PNG))
    names("two.test", ["127.0.0.3", "127.0.0.1"])
    assert fetch(server.url("/", host="two.test"), policy(allowed_networks=("127.0.0.1/32", "127.0.0.3/32"))) == PNG
