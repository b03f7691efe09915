"""Keys of a link: which clients are accepted, which key owns a name, and that no secret key is printed."""

from __future__ import annotations

import pytest
from link_images import IMAGE
from link_processes import PATIENCE

from transport.link import (
    ClientKeys,
    Delivery,
    LinkClient,
    LinkRefusedError,
    LinkServer,
    PeerConnected,
    PeerLostError,
    ServerKeys,
    generate_keypair,
)


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
