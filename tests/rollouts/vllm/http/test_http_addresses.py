"""Addresses, credentials, limits, the errors for error responses, and TLS."""

import asyncio
import json
import logging
import shutil
import ssl
import subprocess
from pathlib import Path

import pytest
from fake_http import json_response
from fake_responses import hold, raw, reset
from fake_server import GENERATE, FakeVLLM
from http_calls import Clock, generate
from hypothesis import given
from hypothesis import strategies as st

from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.errors import (
    MalformedResultError,
    ServerTimeoutError,
    ServerUnreachableError,
)

pytestmark = [pytest.mark.filterwarnings("error::ResourceWarning"), pytest.mark.usefixtures("nothing_leaks")]

KEY = "sk-very-secret"


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host:8000",
        "ftp://me:hidden@host",
        "http://",
        "http://host:port",
        "ftp://me:hid@hidden@host",
        "http://host/?key=hidden",
        "http://host/#hidden",
        "http://host:8000/v1",
        "http://hôst:8000",
    ],
)
def test_an_invalid_address_is_refused_without_printing_secrets(url: str) -> None:
    with pytest.raises(ValueError) as caught:
        ServerConnection(url)
    assert "hidden" not in str(caught.value)
    assert caught.value.__cause__ is None


async def test_the_key_goes_into_the_authorization_header_and_nowhere_else(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with FakeVLLM(api_key=KEY) as server:
        connection = ServerConnection(server.base_url, api_key=KEY, limits=HttpLimits(retries=1, backoff_seconds=0))
        assert (await generate(connection)).status == 200
        assert {name for name, value in server.requests[0].headers.items() if KEY in value} == {"authorization"}
        echo = json_response({"error": {"message": f"bad header Authorization: Bearer {KEY}"}}, 401)
        server.script[GENERATE] += [echo, reset(), reset(), reset(), raw(b"nonsense\r\n\r\n"), hold(asyncio.Event())]
        said = [repr(connection), str(response_error("r", await generate(connection), "generating"))]
        for expected, seconds in ((ServerUnreachableError, 30), (MalformedResultError, 30), (ServerTimeoutError, 0.05)):
            with pytest.raises(expected) as caught:
                await generate(connection, seconds=seconds)
            said += [str(caught.value), repr(caught.value)]
        await connection.close()
    assert KEY not in "\n".join(said + [record.getMessage() for record in caplog.records])


def test_two_kinds_of_credentials_and_keys_that_no_header_can_carry_are_refused() -> None:
    with pytest.raises(ValueError, match="one of them"):
        ServerConnection("http://me:hidden@host", api_key=KEY)
    for key in ("with space", "line\n", "käse"):
        with pytest.raises(ValueError, match="api_key") as caught:
            ServerConnection("http://host", api_key=key)
        assert key not in str(caught.value)


@pytest.mark.parametrize(
    "wrong",
    [
        {"concurrency": 0},
        {"retries": -1},
        {"response_bytes": 0},
        {"total_seconds": float("nan")},
        {"keepalive_seconds": -0.1},
        {"backoff_seconds": float("inf")},
    ],
)
def test_invalid_limits_are_refused_by_name(wrong: dict[str, float]) -> None:
    (name,) = wrong
    with pytest.raises(ValueError, match=name):
        HttpLimits(**wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            b'{"error":{"message":"The model `nope` does not exist.","type":"NotFoundError","param":"model"}}',
            "NotFoundError: The model `nope` does not exist.",
        ),
        (b'{"error":"Failed to pause generation"}', "Failed to pause generation"),
        (b'{"detail":"Not Found"}', "Not Found"),
        (b'{"detail":[{"loc":["body","x"],"msg":"Field required"}]}', "body.x: Field required"),
        (b'{"object":"error","message":"old shape"}', "old shape"),
        (b"<html>502</html>", "<html>502</html>"),
        (b"", "(no body)"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"refused for http://me:hidden@host/x", "refused for http://host/x"),
        (b"refused for http://me:hid@den@host/x", "refused for http://host/x"),
    ],
)
def test_the_message_of_an_error_response_is_extracted(body: bytes, said: str) -> None:
    error = response_error("r1", HttpResponse(404, {}, body), "asking for models")
    assert (error.request_id, error.status, error.body) == ("r1", 404, said)
    assert str(error) == f"request r1: asking for models: HTTP 404 {said}"


@pytest.mark.slow
@given(
    st.binary()
    | st.recursive(
        st.none() | st.text() | st.integers(),
        lambda inner: (
            st.lists(inner)
            | st.dictionaries(st.sampled_from(["error", "detail", "message", "type", "loc", "msg"]), inner)
        ),
    ).map(lambda content: json.dumps(content).encode())
)
def test_any_body_makes_an_error_of_bounded_length(body: bytes) -> None:
    assert len(str(response_error("r", HttpResponse(500, {}, body), "doing"))) < 2200


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A key and a certificate for 127.0.0.1, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl command to make a certificate with")
    both = tmp_path / "both.pem"
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=fake"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(cert)),
        ],
        check=True,
        capture_output=True,
    )
    both.write_bytes(key.read_bytes() + cert.read_bytes())
    return both


@pytest.mark.slow
async def test_https_works_with_a_trusted_certificate_only_and_a_bad_one_is_not_tried_again(
    certificate: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    async with FakeVLLM(tls=context) as server:
        assert server.base_url.startswith("https://")
        distrustful = ServerConnection(server.base_url)
        with pytest.raises(ServerUnreachableError, match="SSL_CERT_FILE"):
            await generate(distrustful)
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
        trusting = ServerConnection(server.base_url)
        for _ in range(2):
            assert (await generate(trusting)).status == 200
        assert server.requests[0].connection == server.requests[1].connection
        assert clock.slept == []
        await distrustful.close()
        await trusting.close()
