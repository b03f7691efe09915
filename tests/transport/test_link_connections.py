"""Which peer a connection of the server belongs to, message by message and without any socket."""

from __future__ import annotations

import pytest

from renderers.media.source import MediaSource
from transport import DecodeLimits, MalformedError
from transport.link.application_types import PeerChange
from transport.link.io_thread import IoThread
from transport.link.limits import Credit, LinkLimits
from transport.link.message_streams import Payload
from transport.link.messages import NO_SESSION, Ack, Data, Greeting, Hello, LinkMessage, Refused, Signal, from_frames
from transport.link.peer import Peer
from transport.link.server_connections import ServerConnections
from transport.link.shared_state import SharedState
from transport.wire.wire_format import Buffer

pytest.importorskip("zmq", reason="links need the extra `zmq`")

from transport.link.zmq_sockets import ReceivedFrames, Sent

OLD, NEW = b"o" * 16, b"n" * 16


class Server:
    """A server's books, with the I/O thread played by the test."""

    def __init__(self, **limits: int) -> None:
        self.state = SharedState("tcp://127.0.0.1:1", LinkLimits(**limits), 0.1, 1.0, wake=lambda: None)
        self.connections = ServerConnections(self.state, {})

    def arrive(self, route: bytes, message: LinkMessage) -> None:
        arrival = ReceivedFrames(route, "", [])
        if self.connections.should_ignore(arrival):
            return
        peer = self.connections.handle(arrival, message)
        if peer is not None and isinstance(message, Data | Ack):
            peer.receive(message)
            self.state.mark_ready(peer)

    def greet(self, route: bytes, session: bytes, name: str = "worker", first: int = 1) -> Peer:
        greeting = Greeting(session, first, NO_SESSION, 0, 0, Credit(10, 1 << 20), 1 << 30)
        self.arrive(route, Hello(greeting, name))
        peer = self.state.peers[name]
        self.answer(peer)
        return peer

    def answer(self, peer: Peer) -> list[LinkMessage]:
        said = []
        while (due := peer.next_to_send()) is not None:
            said.append(due)
            peer.mark_sent(due)
        return said

    def handed_out(self) -> list[bytes]:
        got = []
        while (taken := self.state.next_incoming()) is not None:
            peer, incoming = taken
            peer.inbox.acknowledge(incoming.session, incoming.sequence)
            got.append(bytes(incoming.frames[0]))
        return got


def data(sequence: int, content: bytes) -> Data:
    return Data(sequence, (), [content])


@pytest.mark.parametrize("noticed", [True, False], ids=["it vanished in between", "nobody noticed"])
def test_what_a_dead_connection_still_brings_is_not_taken_for_the_next_ones(noticed: bool) -> None:
    server = Server()
    peer = server.greet(b"first", OLD)
    server.arrive(b"first", data(1, b"old 1"))
    if noticed:
        server.connections.handle_lost_connection(peer)
    server.greet(b"second", NEW)
    server.arrive(b"first", data(1, b"stale"))  # read late: ZeroMQ reads its connections in turn
    server.arrive(b"first", data(7, b"stale"))
    server.arrive(b"second", data(1, b"new 1"))
    assert server.handed_out() == [b"old 1", b"new 1"]
    assert server.state.peers["worker"].connected
    assert server.state.stats.refused == 0


def test_connections_that_vanish_leave_nothing_behind_once_the_peer_is_back() -> None:
    server = Server()
    for number in range(100):
        server.connections.handle_lost_connection(server.greet(b"%d" % number, OLD))
    assert set(server.connections._routes) == {b"99"}  # what it brought may still have to be read
    assert len(server.state.peers) == 1


def test_acknowledgements_that_a_connection_brought_before_it_vanished_are_taken() -> None:
    """To send fails as soon as a connection is broken; what it brought before is read in its turn."""
    server = Server()
    peer = server.greet(b"first", OLD)
    peer.put(Payload.of([b"job"], ()))
    server.answer(peer)
    server.connections.handle_lost_connection(peer)
    assert peer.outbox.unacknowledged == (1,)
    server.arrive(b"first", Ack(peer.session, 1, Credit(10, 1 << 20)))
    assert peer.outbox.unacknowledged == ()
    server.arrive(b"first", Signal.BYE)
    assert peer.state is PeerChange.LEFT
    assert not server.connections._routes


@pytest.mark.parametrize("forgotten", ["dropped", "to make room"])
def test_what_was_acknowledged_is_not_handed_out_again_by_a_server_that_forgot_the_peer(forgotten: str) -> None:
    """The acknowledgement never reached the client, which therefore still keeps its messages from the first on."""
    server = Server(peers=1)
    peer = server.greet(b"first", OLD)
    server.arrive(b"first", data(1, b"one"))
    server.arrive(b"first", data(2, b"two"))
    assert server.handed_out() == [b"one", b"two"]
    if forgotten == "dropped":
        server.connections.drop(peer)
    else:
        server.arrive(b"first", Signal.BYE)
        server.greet(b"other", NEW, name="other")
        server.arrive(b"other", Signal.BYE)
    assert "worker" not in server.state.peers
    again = server.greet(b"second", OLD)
    for sequence, content in enumerate((b"one", b"two", b"three"), 1):
        server.arrive(b"second", data(sequence, content))
    assert server.handed_out() == [b"three"]
    assert again.acknowledgement().acknowledged == 3


def test_peers_that_were_forgotten_with_messages_unread_leave_nothing_behind() -> None:
    server = Server()
    for number in range(100):
        peer = server.greet(b"%d" % number, OLD, name=f"worker {number}")
        server.arrive(b"%d" % number, data(1, b"x"))
        server.connections.drop(peer)
    assert not server.state._ready
    assert server.handed_out() == []


def test_a_session_replayed_under_another_name_gets_nothing_of_the_first() -> None:
    server = Server()
    victim = server.greet(b"first", OLD)
    image = MediaSource.of(b"the victim's image")
    server.state.store.keep(image)
    thief = server.greet(b"second", OLD, name="thief")
    assert thief is not victim
    assert thief.session != victim.session
    server.arrive(b"second", data(1, b"from the thief"))
    server.arrive(b"first", data(1, b"from the victim"))
    assert sorted(server.handed_out()) == [b"from the thief", b"from the victim"]


def test_a_greeting_that_claims_more_than_was_sent_is_malformed_and_costs_only_its_own_connection() -> None:
    server = Server()
    server.greet(b"honest", OLD, name="honest")
    peer = server.greet(b"first", NEW)
    lie = Greeting(NEW, 1, peer.session, 9, 9, Credit(10, 1 << 20), 1 << 30)
    with pytest.raises(MalformedError) as caught:
        server.arrive(b"second", Hello(lie, "worker"))
    server.connections.reject(ReceivedFrames(b"second", "", []), caught.value)
    assert set(server.state.peers) == {"honest"}
    server.arrive(b"second", Hello(lie._replace(received=0, acknowledged=0), "worker"))
    assert set(server.state.peers) == {"honest"}  # a refused connection is not listened to again
    assert any(isinstance(message, Refused) for _, message in server.state.final_messages)


def test_a_flood_of_refused_connections_is_remembered_within_bounds() -> None:
    server = Server()
    for number in range(5000):
        route = b"%d" % number
        server.connections.reject(ReceivedFrames(route, "", []), MalformedError("nonsense"))
        server.greet(b"again" + route, number.to_bytes(16, "big") if number else OLD, name=f"worker {number}")
        server.connections.drop(server.state.peers[f"worker {number}"])
        server.state.final_messages.clear()  # as the I/O thread does each turn
    assert len(server.connections._refused_routes) <= 4096
    assert len(server.connections._acknowledged_by_session) <= 4096
    assert not server.connections._routes


def test_events_name_what_happened_in_order() -> None:
    server = Server()
    peer = server.greet(b"first", OLD)
    server.greet(b"second", NEW)
    server.arrive(b"second", Signal.BYE)
    server.connections.drop(peer)
    assert [event.change for event in server.state.events] == [
        PeerChange.CONNECTED,
        PeerChange.REPLACED,
        PeerChange.CONNECTED,
        PeerChange.LEFT,
        PeerChange.FORGOTTEN,
    ]


class Recorder:
    """A socket that sends nothing and knows what it was given."""

    def __init__(self) -> None:
        self.said: list[tuple[bytes, LinkMessage]] = []

    def send(self, route: bytes, frames: list[Buffer]) -> Sent:
        self.said.append((route, from_frames(frames, DecodeLimits())))
        return Sent.YES


def test_the_last_words_of_a_link_are_what_it_acknowledged_and_that_it_leaves() -> None:
    """Whatever the I/O thread was doing when the application acknowledged and closed."""
    server, socket = Server(), Recorder()
    peer = server.greet(b"first", OLD)
    server.arrive(b"first", data(1, b"one"))
    assert server.handed_out() == [b"one"]
    peer.ack_needed = True
    thread = IoThread(server.state, socket, server.connections, wake=None)  # type: ignore[arg-type]
    thread._send_last_messages()
    (to, ack), last = socket.said
    assert (to, type(ack), last) == (b"first", Ack, (b"first", Signal.BYE))
    assert isinstance(ack, Ack)
    assert (ack.session, ack.acknowledged) == (OLD, 1)
