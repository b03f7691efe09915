"""Which failures are tried again, and after how long."""

import fake_model
import fake_server
import pytest
from fake_http import Response, error_response
from fake_responses import raw, reset
from fake_server import GENERATE, FakeVLLM
from http_calls import GENERATION, Clock, generate
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.errors import (
    ServerUnreachableError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]


@pytest.mark.parametrize(
    ("step", "unanswered"),
    [
        (reset(), True),
        (raw(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n{"), False),
        (raw(b"HTTP/1.1 20"), True),
        (error_response(503), False),
        (error_response(429), False),
    ],
    ids=["reset", "half an answer", "half a status line", "503", "429"],
)
async def test_lost_connections_and_busy_servers_are_tried_again(
    server: FakeVLLM, connection: ServerConnection, clock: Clock, step: fake_server.Step, unanswered: bool
) -> None:
    server.script[GENERATE] += [step, step]
    reply = await generate(connection)
    assert reply.json()["choices"][0]["token_ids"] == fake_model.completion_of([1, 2, 3], 4)
    assert len(server.requests) == 3
    assert [seen.body for seen in server.requests] == [b"".join(GENERATION)] * 3
    assert clock.slept[-1] == 0.5
    assert len(clock.slept) == (1 if unanswered else 2)  # the first connection without a response costs no wait


async def test_retry_after_is_obeyed_in_both_forms_and_bounded(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    clock.chance = 0.5
    server.script[GENERATE] += [
        Response(429, headers={"retry-after": "2"}),
        Response(503, headers={"retry-after": "Tue, 14 Nov 2023 22:13:27 GMT"}),  # 7 s after the clock's 1,700,000,000
        Response(503, headers={"retry-after": "86400"}),
        Response(503, headers={"retry-after": "soon"}),
    ]
    assert (await generate(connection)).status == 200
    jitter = 0.5 * 0.25
    assert clock.slept == [2 + jitter, 7 + jitter, 15 + jitter, 0.5 * 2.0]


async def test_backoff_doubles_up_to_its_bound_then_the_response_is_returned(server: FakeVLLM, clock: Clock) -> None:
    limits = HttpLimits(retries=5, backoff_seconds=1, longest_backoff_seconds=6)
    connection = ServerConnection(server.base_url, limits=limits)
    server.script[GENERATE] += [error_response(503, "busy")] * 6
    reply = await generate(connection)
    assert reply.status == 503
    assert reply.json()["error"]["message"] == "busy"
    assert clock.slept == [1, 2, 4, 6, 6]
    assert len(server.requests) == 6
    await connection.close()


async def test_a_call_that_must_not_happen_twice_is_tried_once_on_a_new_connection(
    server: FakeVLLM, connection: ServerConnection, clock: Clock
) -> None:
    await generate(connection)
    server.script[GENERATE] += [error_response(503), reset()]
    assert (await generate(connection, retry=False)).status == 503
    with pytest.raises(ServerUnreachableError, match="failed once"):
        await generate(connection, retry=False)
    assert [seen.connection for seen in server.requests] == [1, 2, 3]
    assert clock.slept == []


async def test_no_retry_waits_past_the_deadline(server: FakeVLLM, connection: ServerConnection, clock: Clock) -> None:
    server.script[GENERATE] += [Response(503, headers={"retry-after": "9"}), reset(), reset()]
    assert (await generate(connection, seconds=5)).status == 503
    with pytest.raises(ServerUnreachableError):
        await generate(connection, seconds=0.2)
    assert clock.slept == []


@given(attempt=st.integers(1, 10_000), demanded=st.none() | st.floats(0, 1e9))
def test_a_retry_delay_is_never_negative_and_never_above_its_bound(attempt: int, demanded: float | None) -> None:
    delay = HttpLimits().retry_delay(attempt, None if demanded is None else str(demanded))
    assert 0 <= delay <= 15.25
    if demanded is not None:
        assert delay >= min(demanded, 15)


@given(st.text())
def test_any_retry_after_gives_a_delay(value: str) -> None:
    assert 0 <= HttpLimits().retry_delay(1, value) <= 15.25
