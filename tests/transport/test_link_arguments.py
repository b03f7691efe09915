"""Arguments and keys of links: what is refused, which clients are accepted, imports without pyzmq."""

from __future__ import annotations

import subprocess
import sys

import pytest
from link_images import IMAGE
from link_processes import PATIENCE

from renderers.installation import install_command
from transport.link import (
    ClientKeys,
    Delivery,
    LinkAddressError,
    LinkClient,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    PeerConnected,
    PeerLostError,
    ServerKeys,
    generate_keypair,
)


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:*", "other machines"),
        ("tcp://*:5555", "other machines"),
        ("tcp://10.0.0.1:*", "other machines"),
        ("tcp://eth0:5555", "other machines"),
        ("udp://127.0.0.1:1", "is not tcp"),
        ("ipc:///tmp/link", "is not tcp"),
        ("127.0.0.1:5555", "is not tcp"),
        ("tcp://127.0.0.1", "is not tcp"),
        ("tcp://192.0.2.1.2:1", "other machines"),
        ("tcp://127.0.0.1:65536", "port larger than 65535"),
        ("tcp://127.0.0.1:" + "9" * 5000, "port larger than 65535"),
        (5555, "is not tcp"),
    ],
)
def test_a_server_refuses_addresses_of_other_machines_and_invalid_addresses(address: str, reason: str) -> None:
    with pytest.raises(LinkAddressError, match=reason):
        LinkServer(address)


@pytest.mark.parametrize("address", ["udp://127.0.0.1:1", "127.0.0.1:5555", "tcp://127.0.0.1:99999", "ipc:///x", 5555])
def test_a_client_refuses_an_invalid_address(address: str) -> None:
    with pytest.raises(LinkAddressError, match=r"is not tcp|port larger"):
        LinkClient(address)


def test_a_server_for_other_machines_needs_keys() -> None:
    with pytest.raises(LinkAddressError, match="keys=ServerKeys"):
        LinkServer("tcp://0.0.0.0:*", allow_remote=True)
    public, secret = generate_keypair()
    LinkServer("tcp://0.0.0.0:*", allow_remote=True, keys=ServerKeys(public, secret, [])).close()


def test_a_port_in_use_is_an_address_error() -> None:
    with LinkServer() as server, pytest.raises(LinkAddressError, match="cannot be bound"):
        LinkServer(server.address)


@pytest.mark.parametrize("missing", ["zmq", "msgspec"])
def test_without_its_packages_the_import_names_the_extra_and_transport_can_be_imported(missing: str) -> None:
    code = f"""
import sys
sys.modules[{missing!r}] = None
import transport, rollouts
try:
    import transport.link
except transport.MissingExtraError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE, capture_output=True, text=True)
    assert install_command("zmq") in done.stdout


def test_importing_transport_loads_no_zmq() -> None:
    code = "import sys, transport; assert not {'zmq', 'torch', 'transport.link'} & set(sys.modules)"
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


# Keys of a link: which clients are accepted, which key owns a name, and that no secret key is printed.


@pytest.mark.slow
def test_a_server_with_keys_accepts_only_listed_clients_that_know_its_public_key() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    with (
        LinkServer(keys=ServerKeys(public, secret, [mine])) as server,
        LinkClient(server.address, name="worker", keys=ClientKeys(mine, my_secret, public)) as client,
    ):
        client.send("hello")
        assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
        assert server.recv(timeout=PATIENCE) == Delivery("worker", "hello")
        server.send("worker", IMAGE)
        assert client.recv(timeout=PATIENCE).obj == IMAGE
        unlisted = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with pytest.raises(LinkRefusedError, match="does not accept this client's key"):
            unlisted.recv(timeout=PATIENCE)
        for keys in (None, ClientKeys(mine, my_secret, theirs)):
            lost = LinkClient(server.address, keys=keys, heartbeat=0.1, peer_timeout=0.4)
            with pytest.raises(PeerLostError, match="did not answer within"):
                lost.recv(timeout=PATIENCE)
        assert server.peers() == ["worker"]


def test_a_client_with_another_key_cannot_take_over_a_name() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    my_keys, their_keys = ClientKeys(mine, my_secret, public), ClientKeys(theirs, their_secret, public)
    with (
        LinkServer(keys=ServerKeys(public, secret, [mine, theirs])) as server,
        LinkClient(server.address, name="worker", keys=my_keys) as client,
    ):
        assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
        other = LinkClient(server.address, name="worker", keys=their_keys)
        with pytest.raises(LinkRefusedError, match="used by a client with another key"):
            other.recv(timeout=PATIENCE)
        client.send(2)
        assert server.recv(timeout=PATIENCE) == Delivery("worker", 2)


def test_logs_and_errors_hold_no_secret_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    (public, secret), (mine, my_secret), (theirs, their_secret) = (generate_keypair() for _ in range(3))
    with LinkServer(keys=ServerKeys(public, secret, [mine])) as server:
        with LinkClient(server.address, keys=ClientKeys(mine, my_secret, public)) as client:
            client.send("hello")
            server.recv(timeout=PATIENCE)
        stranger = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with pytest.raises(LinkRefusedError) as caught:
            stranger.recv(timeout=PATIENCE)
    for each in (secret, my_secret, their_secret):
        assert each not in caplog.text + str(caught.value)
    assert theirs in caplog.text  # it was listening


def test_the_repr_of_keys_holds_no_secret_key() -> None:
    public, secret = generate_keypair()
    assert secret not in repr(ServerKeys(public, secret, [])) + repr(ClientKeys(public, secret, public))
