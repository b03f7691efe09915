"""Keys of a link: which clients are accepted, which key owns a name, and that no secret key is printed."""

from __future__ import annotations

import pytest
from link_images import IMAGE
from link_processes import PATIENCE

from transport.link import (
    ClientKeys,
    LinkClient,
    LinkRefusedError,
    LinkServer,
    PeerLostError,
    ServerKeys,
    generate_keypair,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")


def test_a_server_with_keys_accepts_only_listed_clients_that_know_its_public_key() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    with LinkServer(keys=ServerKeys(public, secret, [mine])) as server:
        with LinkClient(server.address, name="worker", keys=ClientKeys(mine, my_secret, public)) as client:
            client.send("hello")
            assert server.recv(timeout=PATIENCE).obj == "hello"
            client.flush(PATIENCE)
            server.send("worker", IMAGE)
            assert client.recv(timeout=PATIENCE).obj == IMAGE
        stranger = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with stranger, pytest.raises(LinkRefusedError, match="does not accept this client's key"):
            stranger.recv(timeout=PATIENCE)
        for keys in (None, ClientKeys(mine, my_secret, theirs)):
            with (
                LinkClient(server.address, keys=keys, heartbeat=0.1, peer_timeout=0.4) as lost,
                pytest.raises(PeerLostError),
            ):
                lost.recv(timeout=PATIENCE)
        assert set(server.peers()) == {"worker"}


def test_a_name_belongs_to_the_key_that_used_it_first() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    my_keys, their_keys = ClientKeys(mine, my_secret, public), ClientKeys(theirs, their_secret, public)
    with (
        LinkServer(keys=ServerKeys(public, secret, [mine, theirs])) as server,
        LinkClient(server.address, name="worker", keys=my_keys) as client,
    ):
        client.send(1)
        server.recv(timeout=PATIENCE)
        client.flush(PATIENCE)
        thief = LinkClient(server.address, name="worker", keys=their_keys)
        with thief, pytest.raises(LinkRefusedError, match="belongs to another key"):
            thief.recv(timeout=PATIENCE)
        client.send(2)
        assert server.recv(timeout=PATIENCE).obj == 2
        client.flush(PATIENCE)


def test_logs_and_errors_hold_no_secret_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    (public, secret), (mine, my_secret), (theirs, their_secret) = (generate_keypair() for _ in range(3))
    with LinkServer(keys=ServerKeys(public, secret, [mine])) as server:
        with LinkClient(server.address, keys=ClientKeys(mine, my_secret, public)) as client:
            client.send("hello")
            server.recv(timeout=PATIENCE)
        stranger = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with stranger, pytest.raises(LinkRefusedError) as caught:
            stranger.recv(timeout=PATIENCE)
    for each in (secret, my_secret, their_secret):
        assert each not in caplog.text + str(caught.value)
    assert theirs in caplog.text  # it was listening


def test_the_repr_of_keys_holds_no_secret_key() -> None:
    public, secret = generate_keypair()
    assert secret not in repr(ServerKeys(public, secret, [])) + repr(ClientKeys(public, secret, public))
