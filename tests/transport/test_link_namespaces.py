"""A link between two network namespaces, over a cable that is pulled and put back.

The namespaces and the veth pair between them are made by the test, and no packet leaves them. That takes root and
iproute2.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from link_processes import Process, lines, rows, until, values

from transport.link import generate_keypair

pytest.importorskip("zmq", reason="links need the extra `zmq`")

ADDRESS = "tcp://10.99.0.1:5599"


@dataclass(frozen=True)
class Cable:
    """`ends` are two namespaces, at 10.99.0.1 and 10.99.0.2."""

    ends: tuple[str, str]

    @contextlib.contextmanager
    def mark_pull_sent(self) -> Iterator[None]:
        ip("-n", self.ends[0], "link", "set", "veth", "down")
        try:
            yield
        finally:
            ip("-n", self.ends[0], "link", "set", "veth", "up")

    def inside(self, end: int) -> tuple[str, ...]:
        """The words before a command that runs it at one end."""
        return ("ip", "netns", "exec", self.ends[end])


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30)


@pytest.fixture
def cable() -> Iterator[Cable]:
    if os.geteuid() != 0:
        pytest.skip("making network namespaces takes root")
    if shutil.which("ip") is None:
        pytest.skip("iproute2 is not installed")
    ends = (f"mmrollouts-{os.getpid()}-a", f"mmrollouts-{os.getpid()}-b")
    with contextlib.ExitStack() as cleaning:
        try:
            for end in ends:
                ip("netns", "add", end)
                cleaning.callback(ip, "netns", "del", end)
            ip("link", "add", "veth", "netns", ends[0], "type", "veth", "peer", "name", "veth", "netns", ends[1])
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces cannot be made here: {error.stderr.strip()}")
        for number, end in enumerate(ends, 1):
            ip("-n", end, "addr", "add", f"10.99.0.{number}/24", "dev", "veth")
            ip("-n", end, "link", "set", "veth", "up")
        yield Cable(ends)


def test_between_two_namespaces_a_cable_that_is_pulled_and_put_back_loses_nothing_and_doubles_nothing(
    cable: Cable, tmp_path: Path
) -> None:
    (public, secret), (worker_public, worker_secret) = generate_keypair(), generate_keypair()
    at_server, at_worker = tmp_path / "server.log", tmp_path / "worker.log"
    with (
        Process(
            "converse", "server", ADDRESS, at_server, public, secret, worker_public, within=cable.inside(0)
        ) as server,
        Process(
            "converse", "worker", ADDRESS, at_worker, worker_public, worker_secret, public, within=cable.inside(1)
        ) as worker,
    ):
        assert (server.line(), worker.line()) == ("ready", "ready")

        def both_get_on() -> None:
            before = lines(at_server), lines(at_worker)
            until(lambda: lines(at_server) > before[0] + 50 and lines(at_worker) > before[1] + 50, server, worker)

        both_get_on()
        with cable.mark_pull_sent():  # for less than the peer timeout of 1 s: the connection lives through it
            time.sleep(0.3)
        both_get_on()
        with cable.mark_pull_sent():  # for longer: each side gives the other up
            time.sleep(0.2)
            quiet = lines(at_server), lines(at_worker)
            time.sleep(1.5)
            assert (lines(at_server), lines(at_worker)) == quiet, "something came over a cable that was pulled"
        both_get_on()
        sent, connections, lost = zip(*(map(int, each.ask().split()) for each in (server, worker)), strict=True)
    assert values(at_worker) == list(range(sent[0]))
    assert values(at_server) == list(range(sent[1]))
    assert all(len({session for session, _, _ in rows(log)}) == 1 for log in (at_server, at_worker))
    assert min(lost) >= 1
    assert min(connections) >= 2
