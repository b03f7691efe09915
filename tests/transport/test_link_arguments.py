"""Arguments of links: addresses, times, limits, names and keys that are refused; imports without pyzmq."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from link_processes import PATIENCE

from transport import MissingExtraError
from transport.link import (
    LinkAddressError,
    LinkClient,
    LinkLimits,
    LinkServer,
    ServerKeys,
    generate_keypair,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:*", "other machines"),
        ("tcp://*:5555", "other machines"),
        ("tcp://10.0.0.1:*", "other machines"),
        ("tcp://eth0:5555", "other machines"),
        ("udp://127.0.0.1:1", "neither"),
        ("127.0.0.1:5555", "neither"),
        ("ipc:///no/such/folder/link", "cannot be bound"),
        ("tcp://127.0.0.1:65536", "port larger than 65535"),
        ("tcp://127.0.0.1:" + "9" * 5000, "port larger than 65535"),
        (5555, "neither"),
    ],
)
def test_a_server_refuses_addresses_of_other_machines_and_invalid_addresses(address: str, reason: str) -> None:
    with pytest.raises(LinkAddressError, match=reason):
        LinkServer(address)


@pytest.mark.parametrize("address", ["udp://127.0.0.1:1", "127.0.0.1:5555", "tcp://127.0.0.1:99999", "ipc://", 5555])
def test_a_client_refuses_an_invalid_address(address: str) -> None:
    with pytest.raises(LinkAddressError, match=r"neither|port larger"):
        LinkClient(address)


def test_a_server_for_other_machines_needs_keys() -> None:
    with pytest.raises(LinkAddressError, match="keys=ServerKeys"):
        LinkServer("tcp://0.0.0.0:*", allow_remote=True)
    public, secret = generate_keypair()
    LinkServer("tcp://0.0.0.0:*", allow_remote=True, keys=ServerKeys(public, secret, [])).close()


def test_an_ipc_socket_is_accessible_to_its_owner_only(tmp_path: Path) -> None:
    with LinkServer(f"ipc://{tmp_path}/link"):
        assert (tmp_path / "link").stat().st_mode & 0o077 == 0


def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for make in (LinkServer, lambda: LinkClient("tcp://127.0.0.1:1"), generate_keypair):
        with pytest.raises(MissingExtraError, match=r"mmrollouts\[zmq\]"):
            make()


def test_importing_links_loads_no_zmq() -> None:
    code = "import sys, transport.link; assert 'zmq' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("times", [(0, 10), (-1, 10), (6, 10)])
def test_a_peer_timeout_below_twice_the_heartbeat_is_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="at least twice"):
        LinkServer(heartbeat=times[0], peer_timeout=times[1])


def test_invalid_limits_names_and_keys_are_refused() -> None:
    with pytest.raises(ValueError, match="send_bytes is 0"):
        LinkLimits(send_bytes=0)
    with pytest.raises(ValueError, match="receive_messages is 4294967296"):
        LinkLimits(receive_messages=1 << 32)
    for name in ("", "x" * 201, "two\nlines"):
        with pytest.raises(ValueError, match="link name"):
            LinkClient("tcp://127.0.0.1:1", name=name)
    with pytest.raises(ValueError, match="40 characters"):
        ServerKeys("short", "short", [])
    secret = "no Z85 knows this ~ but it has 40 signs."
    with pytest.raises(ValueError, match="Z85") as caught:
        ServerKeys(generate_keypair()[0], secret, [])
    assert secret not in str(caught.value)
