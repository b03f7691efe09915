"""Who is answered by `rollouts serve`: API keys, web pages of other origins, large bodies."""

from __future__ import annotations

import contextlib
import http.client
from urllib.parse import urlsplit

import openai
import pytest
from served_in_thread import ServedInThread, local_app
from starlette.applications import Starlette

from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import ApiKeyError
from rollouts.serve.errors import ApiKeyFileError, PortUnavailableError, UnprotectedAddressError
from rollouts.serve.server import bound_socket, check_protection, read_api_key, run_server

GENERATE = "/inference/v1/generate"
BODY = {"token_ids": [5, 6], "sampling_params": {"max_tokens": 1}}


@pytest.fixture(scope="module")
def guarded(tiny_model_dir):
    with ServedInThread(local_app(tiny_model_dir, api_key="secret", max_body_bytes=100_000)) as server:
        yield server


def test_every_route_but_that_of_health_needs_the_key(guarded):
    paths = {route.path: "GET" in route.methods for route in guarded.app.routes}
    assert len(paths) > 25
    for path, is_get in paths.items():
        answer = guarded.get(path) if is_get else guarded.post(path, {})
        assert (answer.status == 200) == (path in ("/health", "/ping"))
        if answer.status != 200:
            assert answer.status == 401
            if path.startswith("/v1/"):
                assert answer.json["error"]["code"] == "invalid_api_key"
            else:
                assert answer.json == {"error": "Unauthorized"}


@pytest.mark.parametrize("base", ["/v1", "/sessions/s/v1"])
def test_an_openai_client_with_another_key_reads_what_is_wrong(guarded, base):
    with (
        openai.OpenAI(base_url=guarded.base_url + base, api_key="other", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError, match="needs its API key") as raised,
    ):
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": "a"}])
    assert (raised.value.code, raised.value.type) == ("invalid_api_key", "invalid_request_error")


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer other", "bearer secret", "Basic secret", "Bearer sécret"])
def test_a_wrong_key_is_refused(guarded, value):
    assert guarded.get("/version", {"Authorization": value.encode().decode("latin-1")}).status == 401


async def test_an_engine_with_the_key_is_answered_and_one_without_is_told(guarded, renderer):
    async with VLLMEngine(guarded.base_url, api_key="secret") as engine:
        assert (await engine.capabilities()).scale_out
    async with VLLMEngine(guarded.base_url, api_key="other") as engine:
        with pytest.raises(ApiKeyError):
            await engine.capabilities()


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_refused(guarded, chunked):
    url = urlsplit(guarded.base_url)
    connection = http.client.HTTPConnection(url.hostname, url.port, timeout=30)
    pieces = iter([b"{" + b" " * 60_000] * 2) if chunked else b"{" + b" " * 120_000
    headers = {"Authorization": "Bearer secret", "Content-Type": "application/json"}
    with contextlib.suppress(ConnectionError):  # the server may have answered already
        connection.request("POST", GENERATE, pieces, headers, encode_chunked=chunked)
    response = connection.getresponse()
    assert response.status == 413
    assert b"100000 bytes" in response.read()
    connection.close()
    assert guarded.get("/health").status == 200


def test_a_body_of_openais_api_beyond_the_limit_is_refused_in_its_form(guarded):
    headers = {"Authorization": "Bearer secret"}
    refused = {path: guarded.post(path, b" " * 120_000, headers) for path in (GENERATE, "/v1/chat/completions")}
    assert [answer.status for answer in refused.values()] == [413, 413]
    codes = [answer.json["error"]["code"] for answer in refused.values()]
    assert codes == [413, "body_too_large"]


def test_without_a_key_web_pages_of_other_origins_are_refused(tiny_server):
    assert tiny_server.get("/version").status == 200
    assert tiny_server.post("/resume", {}, {"Origin": "https://example.org"}).status == 403
    assert tiny_server.post("/resume", {}, {"Origin": "null"}).status == 403
    assert tiny_server.post("/resume", {}, {"Origin": "http://["}).status == 403
    answer = tiny_server.post("/v1/chat/completions", {}, {"Origin": "https://example.org"})
    assert (answer.status, answer.json["error"]["code"]) == (403, "foreign_origin")
    own = tiny_server.base_url.removeprefix("http://")
    assert tiny_server.post("/resume", {}, {"Origin": f"http://{own}"}).status == 200
    for host in ("example.org", "example.org:80", "127.0.0.1.example.org", "[", "[::1", ""):
        assert tiny_server.get("/version", {"Host": host}).status == 403
    for host in ("localhost", "127.0.0.1:1234", "[::1]:80"):
        assert tiny_server.get("/version", {"Host": host}).status == 200


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "example.org"])
def test_an_address_that_others_reach_needs_a_key(host):
    with pytest.raises(UnprotectedAddressError, match="--api-key-file"):
        check_protection(host, None)
    check_protection(host, "key")
    for own in ("127.0.0.1", "::1", "localhost", "127.9.9.9"):
        check_protection(own, None)


def test_a_key_is_read_from_a_file_that_holds_one(tmp_path):
    file = tmp_path / "key"
    file.write_text("  s3cret\n")
    assert read_api_key(file) == "s3cret"
    for content in ("", "\n", "two keys", "clé"):
        file.write_text(content)
        with pytest.raises(ApiKeyFileError) as caught:
            read_api_key(file)
        assert not content.strip() or content not in str(caught.value)
    with pytest.raises(ApiKeyFileError, match="No such file"):
        read_api_key(tmp_path / "absent")


def test_a_port_in_use_is_named_with_the_cure():
    with bound_socket("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortUnavailableError, match=f"port {port}: Address already in use. Pass --port 0"):
            bound_socket("127.0.0.1", port)
    with pytest.raises(PortUnavailableError):
        bound_socket("no-such-host.invalid", 0)


def test_a_port_on_which_another_program_has_begun_to_listen_since_is_an_error_with_its_cure():
    with bound_socket("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with bound_socket("127.0.0.1", port) as second:
            first.listen()
            with pytest.raises(PortUnavailableError, match=f"port {port}.*--port 0"):
                run_server(Starlette(), second, on_ready=lambda: None)
