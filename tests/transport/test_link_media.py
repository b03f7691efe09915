"""Links between real sockets: each media source crosses a connection once, and again only after eviction."""

from __future__ import annotations

import pytest
from link_images import IMAGE, OTHER
from link_processes import PATIENCE

from transport.link import (
    LinkClient,
    LinkLimits,
    LinkServer,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")


def test_a_media_source_that_several_messages_refer_to_is_sent_once_per_connection(
    pair: tuple[LinkServer, LinkClient],
) -> None:
    server, client = pair
    for number in range(10):
        client.send([number, IMAGE, {"again": IMAGE}])
    for number in range(10):
        got = server.recv(timeout=PATIENCE).obj
        assert got[0] == number
        assert bytes(got[1].data) == bytes(IMAGE.data)
    server.send("worker", [IMAGE, OTHER])
    assert [bytes(source.data) for source in client.recv(timeout=PATIENCE).obj] == [
        bytes(IMAGE.data),
        bytes(OTHER.data),
    ]
    assert IMAGE.nbytes < client.stats().bytes_sent < IMAGE.nbytes + 5000
    assert OTHER.nbytes < server.stats().bytes_sent < OTHER.nbytes + 5000


def test_evicted_media_are_pulled_again_and_messages_keep_their_order() -> None:
    room_for_one = LinkLimits(blob_bytes=IMAGE.nbytes + 512)
    with LinkServer(limits=room_for_one) as server, LinkClient(server.address) as client:
        sent = [IMAGE, OTHER, IMAGE, OTHER, IMAGE]
        for number, source in enumerate(sent):
            client.send([number, source])
            client.send([number, None])
        for number, source in enumerate(sent):
            got = server.recv(timeout=PATIENCE).obj
            assert (got[0], got[1].digest, bytes(got[1].data)) == (number, source.digest, bytes(source.data))
            assert server.recv(timeout=PATIENCE).obj == [number, None]
        assert server.stats().blobs_pulled >= 1


def test_media_larger_than_the_whole_media_cache_still_arrive() -> None:
    with LinkServer(limits=LinkLimits(blob_bytes=1000)) as server, LinkClient(server.address) as client:
        client.send([IMAGE, OTHER])
        assert [source.digest for source in server.recv(timeout=PATIENCE).obj] == [IMAGE.digest, OTHER.digest]
