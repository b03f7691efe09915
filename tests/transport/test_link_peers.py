"""Peers of a link: events, a second client of one name, dropped peers, the peer limit, silent servers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from link_processes import PATIENCE

from transport.link import (
    LinkClient,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    PeerChange,
    PeerLostError,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")
QUICK = {"heartbeat": 0.1, "peer_timeout": 1.0}


def test_the_server_gets_an_event_when_a_peer_connects_and_when_it_leaves() -> None:
    with LinkServer() as server:
        with LinkClient(server.address, name="worker") as client:
            client.send(1)
            server.recv(timeout=PATIENCE)
        events = [server.next_event(PATIENCE), server.next_event(PATIENCE)]
        assert [(event.change, event.peer) for event in events] == [
            (PeerChange.CONNECTED, "worker"),
            (PeerChange.LEFT, "worker"),
        ]
        assert server.peers() == {"worker": PeerChange.LEFT}
        with pytest.raises(PeerLostError, match="has left"):
            server.send("worker", "too late")
        with pytest.raises(PeerLostError, match=r"peer 'nobody' is unknown.* No client is connected\."):
            server.send("nobody", 1)
        with LinkClient(server.address, name="other") as other:
            other.send(1)
            server.recv(timeout=PATIENCE)
            with pytest.raises(PeerLostError, match=r"peer 'nobody' is unknown.* Connected are 'other'\."):
                server.send("nobody", 1)


def test_unacknowledged_messages_go_to_the_next_client_of_the_same_name() -> None:
    with LinkServer() as server:
        first = LinkClient(server.address, name="worker")
        first.send("hello")
        server.recv(timeout=PATIENCE)
        for number in range(4):
            server.send("worker", number)
        assert first.recv(timeout=PATIENCE).obj == 0
        assert first.recv(timeout=PATIENCE, acknowledge=False).obj == 1
        while server.unacknowledged("worker") != (2, 3, 4):
            time.sleep(0.01)
        first.close()
        with LinkClient(server.address, name="worker") as second:
            assert [second.recv(timeout=PATIENCE).obj for _ in range(3)] == [1, 2, 3]
            server.flush(PATIENCE)


def test_a_second_client_of_one_name_replaces_the_first_and_the_first_raises() -> None:
    with LinkServer() as server, LinkClient(server.address, name="worker", **QUICK) as first:
        first.send(1)
        server.recv(timeout=PATIENCE)
        first.flush(PATIENCE)
        with LinkClient(server.address, name="worker") as second:
            second.send(2)
            assert server.recv(timeout=PATIENCE).obj == 2
            with pytest.raises(LinkRefusedError, match="took over this name; give each worker its own name"):
                first.recv(timeout=PATIENCE)


def test_a_dropped_peer_reconnects_and_resends_unacknowledged_messages() -> None:
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        client.send("a")
        assert server.recv(timeout=PATIENCE, acknowledge=False).obj == "a"
        server.send("worker", "never acknowledged")
        client.recv(timeout=PATIENCE, acknowledge=False)
        assert server.drop_peer("worker") == (1,)
        assert server.recv(timeout=PATIENCE).obj == "a"
        client.flush(PATIENCE)
        server.send("worker", "after")
        assert client.recv(timeout=PATIENCE).obj == "after"


def test_at_the_peer_limit_disconnected_peers_are_evicted_and_connected_ones_are_not() -> None:
    with LinkServer(limits=LinkLimits(peers=2)) as server:
        for name in ("a", "b", "c"):
            with LinkClient(server.address, name=name) as client:
                client.send(name)
                server.recv(timeout=PATIENCE)
            while server.peers()[name] is not PeerChange.LEFT:
                time.sleep(0.01)
        assert set(server.peers()) == {"b", "c"}
        with LinkClient(server.address) as first, LinkClient(server.address) as second:
            for client in (first, second):
                client.send(1)
                server.recv(timeout=PATIENCE)
                client.flush(PATIENCE)
            with LinkClient(server.address) as third, pytest.raises(LinkRefusedError, match="2 peers"):
                third.recv(timeout=PATIENCE)


def test_a_waiting_call_raises_when_the_server_is_silent_and_may_be_repeated(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/link"
    with LinkClient(address, **QUICK) as client:
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="silent for 1 s"):
            client.recv()
        assert time.monotonic() - start > 0.9
        client.send("kept")
        with LinkServer(address, **QUICK) as server:
            assert server.recv(timeout=PATIENCE).obj == "kept"
            client.flush(PATIENCE)
